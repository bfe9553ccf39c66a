"""What dlq_redact hides."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="redaction")
