"""Copies of letters in a dead-letter exchange."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="exchange")
