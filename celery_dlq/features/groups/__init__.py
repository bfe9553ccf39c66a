"""States of groups, and notes on them."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(
    name="groups",
    pages="pages:ROUTES",
    commands={
        "mute": "command:mute",
        "note": "command:note",
        "reopen": "command:reopen",
        "resolve": "command:resolve",
    },
)
