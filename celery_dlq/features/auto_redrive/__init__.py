"""Letters that are redriven without an operator."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="auto_redrive")
