"""Holds messages back until an operator releases them."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature, Metric

HELD_MESSAGES = Metric.counter("held_messages", "queue", "Messages that workers held.")
HELD = Metric.gauge("held", "hold task", "Messages that wait in a hold.", read="operations:held")

FEATURE = Feature(
    observer="observer:HoldObserver",
    name="hold",
    metrics=(HELD_MESSAGES, HELD),
    waits="operations:WaitsInHolds",
    pages="pages:ROUTES",
    panels={"in_force": "pages:in_force", "group_actions": "pages:of_cause"},
    block=Block.STOP,
    commands={"hold": "commands:hold", "holds": "commands:holds", "release": "commands:release"},
    operations={
        "check_hold": "operations:Holds.preview",
        "hold": "operations:Holds.hold",
        "end_hold": "operations:Holds.end",
        "holds": "operations:Holds.holds",
        "release": "operations:Holds.release",
    },
)
