"""A model without a table: it carries the permissions and the entry in the admin's index."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from celery_dlq.errors import MissingExtra

try:
    from celery_dlq.web.http import Permission
    from celery_dlq.web.site import allowed
except ModuleNotFoundError as exc:
    raise MissingExtra("celery_dlq.web.django", exc.name or "jinja2", "django") from exc


class DeadLetters(models.Model):  # noqa: DJ008 - there are no rows to describe
    """The letters are in Redis; Django's database has nothing of them."""

    class Meta:
        """No table, no rows: only permissions."""

        managed = False
        default_permissions = ()
        verbose_name = "dead letters"
        verbose_name_plural = "dead letters"
        permissions: ClassVar = [
            (f"{name}_deadletters", f"Can {allowed(name)}") for name in Permission
        ]
