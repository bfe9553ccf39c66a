"""Holding messages back, and releasing them."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(
    observer="observer:HoldObserver",
    name="hold",
    pages="pages:ROUTES",
    commands={"hold": "commands:hold", "holds": "commands:holds", "release": "commands:release"},
    operations={
        "check_hold": "operations:Holds.preview",
        "hold": "operations:Holds.hold",
        "end_hold": "operations:Holds.end",
        "holds": "operations:Holds.holds",
        "release": "operations:Holds.release",
    },
)
