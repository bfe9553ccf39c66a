"""The contract of every `WorkerRegistry`."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from builders import NOW

from celery_dlq.events import Action, Change
from celery_dlq.letters.record import to_micros
from celery_dlq.store.base import Backend, Override, WorkerInfo, WorkerRegistry


@pytest.fixture
def registry(parts: Backend) -> WorkerRegistry:
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


def an_override(**changes: Any) -> Override:
    """An override for an hour."""
    values: dict[str, Any] = {
        "queue": "orders",
        "key": "max_deliveries",
        "value": 3,
        "until": datetime.now(timezone.utc) + timedelta(hours=1),
        "actor": "ann@desk",
        "since": NOW,
    }
    return Override(**{**values, **changes})


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


def test_a_heartbeat_tells_if_a_job_waits(parts: Backend) -> None:
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
        registry.record(change)

    assert registry.changes(limit=2) == [changes[2], changes[1]]


def test_an_override_is_in_force_until_its_end(
    registry: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker notices by the revision; the store's clock says when the end is."""
    now = registry.now()
    before = registry.heartbeat("celery@web-1").revision
    registry.override(an_override(value=5))
    registry.override(an_override(until=now + timedelta(hours=1)))
    registry.override(an_override(key="reasons", value=["failed"], until=now + timedelta(hours=2)))
    after = registry.heartbeat("celery@web-1").revision

    assert after > before
    assert [o.value for o in registry.overrides()] == [3, ["failed"]]
    assert {o.since for o in registry.overrides()} == {NOW}
    with monkeypatch.context() as later:
        later.setattr(registry, "now", lambda: now + timedelta(hours=1))
        assert [o.key for o in registry.overrides()] == ["reasons"]
    assert [o.key for o in registry.overrides()] == ["reasons"]


def test_an_override_can_be_lifted(registry: WorkerRegistry) -> None:
    """Once."""
    registry.override(an_override())

    assert registry.lift("orders", "max_deliveries") is True
    assert registry.lift("orders", "max_deliveries") is False
    assert registry.overrides() == []
