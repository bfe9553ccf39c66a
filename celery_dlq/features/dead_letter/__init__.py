"""Makes letters of messages that an operator names."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    observer="observer:observer",
    name="dead_letter",
    instructions={"demand": "demand:Demand"},
    block=Block.STOP,
    commands={"dead-letter": "command:dead_letter"},
    operations={
        "dead_letter": "operations:DemandRun.dead_letter",
        "withdraw": "operations:DemandRun.withdraw",
    },
)
