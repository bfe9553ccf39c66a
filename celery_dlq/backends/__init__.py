"""Implementations of the contracts in `celery_dlq.ports`, one folder or module each."""
