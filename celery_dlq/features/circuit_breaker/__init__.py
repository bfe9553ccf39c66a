"""Holds a task by itself while nearly all of its executions die."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature, Metric, PolicyKey

CIRCUITS = Metric.counter(
    "circuit_changes", "task queue state", "Times a circuit breaker opened or closed."
)
CIRCUIT = Metric.gauge(
    "circuit_open",
    "task queue",
    "Circuit breakers: 1 open, 0.5 closed and still releasing; the others are left out.",
    read="operations:are_open",
)

FEATURE = Feature(
    name="circuit_breaker",
    metrics=(CIRCUITS, CIRCUIT),
    intervals={"probe": 30.0},  # Between two probes of an open circuit breaker
    observer="observer:observer",
    policy_keys={
        "circuit_breaker": PolicyKey(
            check="policy:circuit_breaker",
            example={"deaths": 20, "window": 60},
            doc="When nearly all executions of a task die of one cause, its messages are held, and "
            "probes find out when they may run again: a mapping with any of ``deaths`` (20 letters "
            "of one fingerprint) and ``window`` (within 60 seconds). Unset: none.",
        )
    },
    block=Block.STOP,
    commands={"breaker": "command:breaker"},
    operations={
        "breakers": "operations:Breakers.breakers",
        "open_breaker": "operations:Breakers.open_breaker",
        "close_breaker": "operations:Breakers.close_breaker",
    },
)
