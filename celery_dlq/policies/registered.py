"""The policies that workers registered: how those of two workers differ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from celery_dlq.errors import SettingsError
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.worker_records import TASK_PREFIX, WorkerInfo


def differences(mine: WorkerInfo, other: WorkerInfo) -> list[str]:
    """One sentence for each queue or task whose policy differs between two workers."""
    ours, theirs = table_of(mine), table_of(other)
    queues = {*mine.queues} & {*other.queues} | {*ours.queues} & {*theirs.queues}
    pairs = [(f"queue {name!r}", ours.resolve(name), theirs.resolve(name)) for name in queues]
    pairs += [
        (f"task {name}", ours.tasks.get(name), theirs.tasks.get(name))
        for name in {*ours.tasks, *mine.tasks} & {*theirs.tasks, *other.tasks}
    ]
    return [
        f"For {what}, {mine.hostname} and {other.hostname} have different policies: "
        f"{_difference(own or Policy(), its or Policy()) or 'only one of them guards it'}"
        for what, own, its in sorted(pairs, key=lambda pair: pair[0])
        if own != its
    ]


def _difference(own: Policy, its: Policy) -> str:
    mine, theirs = _flat_values(own), _flat_values(its)
    return ", ".join(
        f"{key} {mine.get(key, 'not set')} and {theirs.get(key, 'not set')}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    )


def _flat_values(policy: Policy) -> dict[str, Any]:
    """The keys that are set; those of a mapping are one each."""
    found: dict[str, Any] = {}
    for key, value in policy.to_json().items():
        if isinstance(value, dict):
            found.update({f"{key}[{name!r}]": one for name, one in value.items()})
        else:
            found[key] = value
    return found


def table_of(info: WorkerInfo) -> PolicyTable:
    """The policies that a worker registered; keys that this version does not know are left out."""
    parsed = {name: _policy_of(values) for name, values in info.policies.items()}
    return PolicyTable(
        {name: policy for name, policy in parsed.items() if not name.startswith(TASK_PREFIX)},
        {name[len(TASK_PREFIX) :]: p for name, p in parsed.items() if name.startswith(TASK_PREFIX)},
    )


def _policy_of(values: Mapping[str, Any]) -> Policy:
    policy = Policy()
    for key, value in values.items():
        with suppress(SettingsError):  # a key of another version
            policy = Policy.parse({key: value}, key).over(policy)
    return policy
