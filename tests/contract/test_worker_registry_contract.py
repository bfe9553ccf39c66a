"""The contract of every `WorkerRegistry`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from builders import NOW

from celery_dlq.events import Action, Change
from celery_dlq.letters.record import to_micros
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import WorkerInfo
from celery_dlq.store.workers import WorkerRegistry


@pytest.fixture
def registry(parts: Store) -> WorkerRegistry:
    """Give each registry in turn, empty."""
    return parts.workers


def a_worker(**changes: Any) -> WorkerInfo:
    """A worker, as it registers."""
    values: dict[str, Any] = {
        "hostname": "celery@web-1",
        "pid": 4711,
        "version": "0.1.0",
        "started_at": NOW,
        "queues": ("orders", "mails"),
        "tasks": ("shop.charge",),
        "policies": {"orders": {"max_deliveries": 3}},
    }
    return WorkerInfo(**{**values, **changes})


def test_a_worker_is_registered_until_it_deregisters(registry: WorkerRegistry) -> None:
    """Everything on it is read as it was written."""
    first, second = a_worker(), a_worker(hostname="celery@web-2", policies={})
    registry.register(second)
    registry.register(first)

    assert registry.workers() == [first, second]
    assert [info.tasks for info in registry.workers(with_tasks=False)] == [(), ()]
    assert registry.workers(with_tasks=False)[0].policies == first.policies

    registry.deregister("celery@web-1")

    assert registry.workers() == [second]
    assert registry.heartbeat("celery@web-1")[0] is False
    assert registry.heartbeat("celery@web-2")[0] is True


def test_a_heartbeat_tells_if_a_job_waits(parts: Store) -> None:
    """Not of one whose time has not come, nor of one that runs."""
    now, jobs = to_micros(parts.jobs.now()), parts.jobs
    assert not parts.workers.heartbeat("celery@web-1").job_waits
    jobs.write("1", {"state": "waiting", "run": 0, "start_at": now + 3_600_000_000})
    assert not parts.workers.heartbeat("celery@web-1").job_waits
    jobs.write("2", {"state": "waiting", "run": 0, "updated_at": now - 1_000_000})
    assert parts.workers.heartbeat("celery@web-1").job_waits
    jobs.write("2", {"state": "running", "run": 1})
    assert not parts.workers.heartbeat("celery@web-1").job_waits


def test_the_newest_changes_come_first(registry: WorkerRegistry) -> None:
    """A change has who did what, to how many letters."""
    changes = [
        Change(
            at=NOW + timedelta(seconds=n),
            action=Action.REDRIVEN,
            actor="ann@desk",
            target="orders-DLQ",
            letters=n,
            detail={"filter": {"reason": "failed"}},
        )
        for n in range(3)
    ]
    for change in changes:
        registry.record_change(change)

    assert registry.changes(limit=2) == [changes[2], changes[1]]
