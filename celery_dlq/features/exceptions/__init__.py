"""Retries, rejects or ignores what a task raises, by rules of its policy."""

from __future__ import annotations

from celery_dlq.registry import Feature, PolicyKey

FEATURE = Feature(
    name="exceptions",
    observer="observer:observer",
    policy_keys={
        "exceptions": PolicyKey(
            check="policy:exceptions",
            example={"KeyError": "ignore"},
            kind="Mapping[Any, str | Mapping[str, Any]]",
            doc="What to do about an exception, by its class or dotted name, for subclasses too: a "
            "mapping of names to ``ignore`` (the failure is no death), or to mappings with the "
            "keys of `celery_dlq.features.exceptions.policy.ExceptionRule`. Unset: as Celery "
            "does.",
            why_not="it acts in the processes that run tasks, and these do not ask Redis",
        )
    },
)
