"""Keeps what people decide about groups: notes, an owner, resolved, muted, open again."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    name="groups",
    pages="pages:ROUTES",
    panels={
        "group": "pages:notes_and_forms",
        "group_facts": "pages:facts",
        "group_note": "pages:in_row",
        "job": "pages:after_job",
    },
    block=Block.ACT,
    commands={
        "assign": "command:assign",
        "mute": "command:mute",
        "note": "command:note",
        "reopen": "command:reopen",
        "resolve": "command:resolve",
    },
    operations={
        "assign": "operations:Notes.assign",
        "note": "operations:Notes.note",
        "notes": "operations:Notes.notes",
        "resolve": "operations:Notes.resolve",
        "mute": "operations:Notes.mute",
        "reopen": "operations:Notes.reopen",
    },
)
