"""The contract of every `DemandStore`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_dlq.store.base import Backend, Demand, DemandStore


@pytest.fixture
def demands(parts: Backend) -> DemandStore:
    """Give each store in turn, empty."""
    return parts.demands


def a_demand(demands: DemandStore, task_id: str = "t-1", **changes: Any) -> Demand:
    """A demand for an hour."""
    now = demands.now()
    values: dict[str, Any] = {"at": now, "until": now + timedelta(hours=1)}
    return Demand(task_id=task_id, **{"reason": "wrong", "actor": "ann@desk", **values, **changes})


def test_a_demand_is_there_until_it_is_removed(demands: DemandStore) -> None:
    """Everything on it is read as it was written, whatever its task is called."""
    first, second = a_demand(demands), a_demand(demands, "t\ud800 🦄", reason="")
    assert demands.add(first)
    assert demands.add(second)

    assert demands.get("t-1") == first
    assert demands.get("t-2") is None
    assert demands.all() == [first, second]
    assert demands.remove("t-1")
    assert not demands.remove("t-1")
    assert demands.get("t-1") is None
    assert len(demands.all()) == 1


def test_a_new_demand_takes_the_place_of_the_one_before(demands: DemandStore) -> None:
    """For the same task."""
    demands.add(a_demand(demands))
    again = a_demand(demands, reason="very wrong")
    demands.add(again)
    assert demands.all() == [again]


def test_a_demand_ends(demands: DemandStore) -> None:
    """By the clock of the store; then nobody sees it."""
    past = demands.now() - timedelta(seconds=1)
    demands.add(a_demand(demands, until=past))
    assert demands.get("t-1") is None
    assert demands.all() == []
    assert not demands.remove("t-1")


def test_workers_notice_a_new_demand(parts: Backend) -> None:
    """By the revision that comes with their heartbeat."""
    before = parts.workers.heartbeat("celery@web-1")[1]
    parts.demands.add(a_demand(parts.demands))
    after = parts.workers.heartbeat("celery@web-1")[1]
    assert after != before


def test_the_number_of_demands_is_bounded(parts: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker keeps all of them in memory; one that is there can still be changed."""
    monkeypatch.setattr("celery_dlq.store.demands.MOST_DEMANDS", 2)
    demands = parts.demands
    assert [demands.add(a_demand(demands, name)) for name in "abca"] == [True, True, False, True]
    assert {one.task_id for one in demands.all()} == {"a", "b"}
