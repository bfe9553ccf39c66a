"""Shows the messages of a hold before anybody starts them, and stops single ones."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    name="held",
    block=Block.STOP,
    commands={"held": "command:held"},
    operations={
        "held_messages": "operations:HeldWindow.held_messages",
        "discard_held": "operations:HeldWindow.discard_held",
    },
)
