"""A model without a table: it carries the permissions and the entry in the admin's index."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

PERMISSIONS = {
    "view": "view_deadletters",
    "redrive": "redrive_deadletters",
    "discard": "discard_deadletters",
    "edit_policies": "edit_policies_deadletters",
}
"""Django's codename by the permission of the pages."""


class DeadLetters(models.Model):  # noqa: DJ008 - there are no rows to describe
    """The letters are in Redis, or on the broker; Django's database has nothing of them."""

    class Meta:
        """No table, no rows: only permissions."""

        managed = False
        default_permissions = ()
        verbose_name = "dead letters"
        verbose_name_plural = "dead letters"
        permissions: ClassVar = [
            ("view_deadletters", "Can view dead letters"),
            ("redrive_deadletters", "Can redrive, edit, restore and note dead letters"),
            ("discard_deadletters", "Can discard dead letters"),
            ("edit_policies_deadletters", "Can edit policies of dead letters"),
        ]
