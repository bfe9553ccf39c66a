"""Redrives letters without an operator, as their policy says."""

from __future__ import annotations

from celery_dlq.registry import Feature, Metric, PolicyKey

REDRIVES_USED_UP = Metric.counter(
    "redrives_used_up",
    "queue dead_letter_queue",
    "Letters of messages that auto_redrive redrives no more.",
)

FEATURE = Feature(
    name="auto_redrive",
    observer="observer:observer",
    metrics=(REDRIVES_USED_UP,),
    intervals={
        "redrive_look": 60.0,  # Between two looks for letters due; less if they wait < 10 minutes
        "redrive_lease": 30.0,  # After a process that was killed, another one goes on
        "canary": 60.0,  # Shortest wait for what becomes of a redrive's first message
        "max_canary": 300.0,  # The longest
    },
    policy_keys={
        "auto_redrive": PolicyKey(
            check="policy:auto_redrive",
            example={"after": 60, "times": 1},
            doc="When letters are redriven without an operator: a mapping of ``after`` (seconds, "
            "timedelta or text such as 30m), ``times``, and perhaps ``backoff`` (2), ``reasons`` "
            "and ``canary``; see [how](../how-to/auto-redrive.md). Unset: never.",
            redrives="policy:AutoRedrive.chooses",
        )
    },
)
