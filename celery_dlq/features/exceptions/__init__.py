"""Rules for exceptions."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="exceptions")
