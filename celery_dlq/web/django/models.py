"""A model without a table: it carries the permissions and the entry in the admin's index."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

PERMISSIONS = {
    "view": "view",
    "redrive": "redrive, edit, restore and note",
    "discard": "discard",
    "edit_policies": "edit policies of",
}
"""What a user may do with dead letters, by the permission of the pages."""


class DeadLetters(models.Model):  # noqa: DJ008 - there are no rows to describe
    """The letters are in Redis, or on the broker; Django's database has nothing of them."""

    class Meta:
        """No table, no rows: only permissions."""

        managed = False
        default_permissions = ()
        verbose_name = "dead letters"
        verbose_name_plural = "dead letters"
        permissions: ClassVar = [
            (f"{name}_deadletters", f"Can {what} dead letters")
            for name, what in PERMISSIONS.items()
        ]
