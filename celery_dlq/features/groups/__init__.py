"""Keeps states of groups and notes on them: resolved, muted, open again."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    name="groups",
    pages="pages:ROUTES",
    panels={
        "group": "pages:notes_and_forms",
        "group_facts": "pages:state",
        "job": "pages:after_job",
    },
    block=Block.ACT,
    commands={
        "mute": "command:mute",
        "note": "command:note",
        "reopen": "command:reopen",
        "resolve": "command:resolve",
    },
    operations={
        "note": "operations:Notes.note",
        "notes": "operations:Notes.notes",
        "resolve": "operations:Notes.resolve",
        "mute": "operations:Notes.mute",
        "reopen": "operations:Notes.reopen",
    },
)
