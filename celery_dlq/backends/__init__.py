"""Implementations of the contracts in `celery_dlq.backends.base`, one folder or module each."""
