"""The Django app."""

from __future__ import annotations

from importlib.util import find_spec
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
    """What the pages need: a package, and the project's Celery app."""
    del app_configs
    found = []
    if find_spec("jinja2") is None:
        found.append(
            Error(
                "expected jinja2 to be installed for the pages of dead letters",
                hint="pip install 'celery_dlq[django]'",
                id="celery_dlq.E001",
            )
        )
    # The app that Celery makes for those who have none.
    if current_app.main == "default" and not current_app.set_as_current:
        found.append(
            Error(
                "expected the project to make a Celery app, found none",
                hint="Import it in the __init__.py of the project: `from proj.celery import app`.",
                id="celery_dlq.E002",
            )
        )
    return found
