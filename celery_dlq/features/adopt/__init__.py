"""Letters from a broker's own dead-letter queue."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="adopt")
