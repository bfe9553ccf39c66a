"""Makes letters of messages in a broker's own dead-letter queue."""

from __future__ import annotations

from types import MappingProxyType

from celery_dlq.registry import Block, Feature, Setting

FEATURE = Feature(
    name="adopt",
    observer="adopter:observer",
    settings={
        "adopt": Setting(
            check="settings:adopt",
            default=MappingProxyType({}),
            doc="Queues into which the broker itself puts dead messages, by name, with the "
            "dead-letter queue that their letters go to; every worker empties them. "
            "Special value: None as the dead-letter queue takes that of each message's own queue. "
            "Defaults to {}.",
        )
    },
    check_settings="settings:check",
    block=Block.ACT,
    commands={"import": "command:import_"},
    operations={"adopt": "operations:AdoptRun.adopt"},
)
