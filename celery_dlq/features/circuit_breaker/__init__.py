"""Holds a task by itself while nearly all of its executions die."""

from __future__ import annotations

from celery_dlq.registry import Feature, PolicyKey

FEATURE = Feature(
    name="circuit_breaker",
    observer="observer:observer",
    policy_keys={
        "circuit_breaker": PolicyKey(
            check="policy:circuit_breaker",
            doc="When nearly all executions of a task die of one cause, its messages are held, and "
            "probes find out when they may run again: a mapping with any of ``deaths`` (20 letters "
            "of one fingerprint) and ``window`` (within 60 seconds). Unset: none.",
        )
    },
    commands={"breaker": "command:breaker"},
    operations={
        "breakers": "operations:Breakers.breakers",
        "open_breaker": "operations:Breakers.open_breaker",
        "close_breaker": "operations:Breakers.close_breaker",
    },
)
