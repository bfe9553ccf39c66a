"""The setting ``dlq_sentry``: whether Sentry gets an event of each cause."""

from __future__ import annotations

from celery_dlq.policies.checks import true_or_false

sentry = true_or_false
