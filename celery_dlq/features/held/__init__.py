"""Shows the messages of a hold before anybody starts them, edits single ones, and stops them."""

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    name="held",
    block=Block.STOP,
    pages="pages:ROUTES",
    panels={"hold_links": "pages:link"},
    commands={"held": "command:held"},
    operations={
        name: f"operations:HeldWindow.{name}"
        for name in ("held_messages", "edit_held", "discard_held")
    },
)
