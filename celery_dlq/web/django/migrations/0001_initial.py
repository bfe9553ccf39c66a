"""The permissions."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Makes no table."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="DeadLetters",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                )
            ],
            options={
                "verbose_name": "dead letters",
                "verbose_name_plural": "dead letters",
                "permissions": [
                    ("view_deadletters", "Can view dead letters"),
                    ("redrive_deadletters", "Can redrive, edit, restore and note dead letters"),
                    ("discard_deadletters", "Can discard dead letters"),
                    ("edit_policies_deadletters", "Can edit policies of dead letters"),
                ],
                "managed": False,
                "default_permissions": (),
            },
        ),
    ]
