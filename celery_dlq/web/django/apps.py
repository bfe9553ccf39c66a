"""The Django app."""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.apps import AppConfig
from django.core.checks import Error, register


class DeadLettersConfig(AppConfig):
    """``celery_dlq.web.django``."""

    name = "celery_dlq.web.django"
    label = "celery_dlq"
    verbose_name = "Celery"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Let ``manage.py check`` tell what the pages need."""
        register(check)


def check(app_configs: Any, **_: Any) -> list[Error]:
    """The pages need the project's Celery app, not the one that Celery makes for who has none."""
    del app_configs
    if current_app.main != "default" or current_app.set_as_current:
        return []
    return [
        Error(
            "expected the project to make a Celery app, found none",
            hint="Import it in the __init__.py of the project: `from proj.celery import app`.",
            id="celery_dlq.E002",
        )
    ]
