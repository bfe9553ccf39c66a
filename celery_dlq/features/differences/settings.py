"""The setting ``dlq_sample_successes``: the share of successes that workers record."""

from __future__ import annotations

from celery_dlq.policies.checks import share

sample_successes = share
