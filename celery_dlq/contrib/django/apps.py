"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig


class DeadLettersConfig(AppConfig):
    """``celery_dlq.contrib.django``."""

    name = "celery_dlq.contrib.django"
    label = "celery_dlq"
    verbose_name = "Celery"
    default_auto_field = "django.db.models.BigAutoField"
