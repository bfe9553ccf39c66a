"""Copies of letters in a dead-letter exchange."""

from __future__ import annotations

from celery_dlq.registry import Feature, PolicyKey

FEATURE = Feature(
    name="exchange",
    policy_keys={
        "dead_letter_exchange": PolicyKey(
            check="policy:dead_letter_exchange",
            type="DeadLetterExchange",
            doc="Exchange to which each letter is published too, for other services: its name, or "
            "a mapping of ``name`` and ``type`` (direct, fanout, topic). Unset: none.",
            is_name=True,
        ),
        "dead_letter_routing_key": PolicyKey(
            check="policy:dead_letter_routing_key",
            type="str",
            doc="Routing key of what is published there. Unset: the name of the queue that the "
            "message came from.",
            is_name=True,
        ),
    },
)
