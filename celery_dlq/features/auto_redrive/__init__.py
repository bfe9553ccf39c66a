"""Letters that are redriven without an operator."""

from __future__ import annotations

from celery_dlq.registry import Feature, PolicyKey

FEATURE = Feature(
    name="auto_redrive",
    observer="observer:observer",
    policy_keys={
        "auto_redrive": PolicyKey(
            check="policy:auto_redrive",
            doc="When letters are redriven without an operator: a mapping of ``after`` (seconds, "
            "timedelta or text such as 30m), ``times``, and perhaps ``backoff`` (2), ``reasons`` "
            "and ``canary``. Unset: never.",
            of_whole_queue=True,
        )
    },
)
