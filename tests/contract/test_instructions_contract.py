"""The contract of demands and overrides among the instructions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_dlq.features.dead_letter.demand import Demand
from celery_dlq.store.giving import Instructions
from celery_dlq.store.instructions import Override
from celery_dlq.store.store import Store


@pytest.fixture
def instructions(parts: Store) -> Instructions:
    """Give each store in turn, empty."""
    return parts.instructions


def a_demand(instructions: Instructions, task_id: str = "t-1", **changes: Any) -> Demand:
    """A demand for an hour."""
    now = instructions.now()
    values: dict[str, Any] = {"since": now, "until": now + timedelta(hours=1)}
    return Demand(id=task_id, **{"reason": "wrong", "actor": "ann@desk", **values, **changes})


def an_override(instructions: Instructions, **changes: Any) -> Override:
    """An override for an hour."""
    now = instructions.now()
    values: dict[str, Any] = {
        "queue": "orders",
        "key": "max_deliveries",
        "value": 3,
        "until": now + timedelta(hours=1),
        "actor": "ann@desk",
        "since": now,
    }
    return Override(**{**values, **changes})


def test_a_demand_is_there_until_it_is_met(instructions: Instructions) -> None:
    """Everything on it is read as it was written, whatever its task is called."""
    first, second = a_demand(instructions), a_demand(instructions, "t\ud800 🦄", reason="")
    assert instructions.give(first)
    assert instructions.give(second)

    assert instructions.get(Demand, "t-1") == first
    assert instructions.get(Demand, "t-2") is None
    assert instructions.of(Demand) == [first, second]
    assert instructions.forget([first]) == 1
    assert instructions.forget([first]) == 0
    assert instructions.get(Demand, "t-1") is None
    assert len(instructions.all()) == 1


def test_a_new_demand_takes_the_place_of_the_one_before(instructions: Instructions) -> None:
    """For the same task."""
    instructions.give(a_demand(instructions))
    again = a_demand(instructions, reason="very wrong")
    instructions.give(again)
    assert instructions.of(Demand) == [again]


def test_a_demand_ends(instructions: Instructions) -> None:
    """By the clock of the store; then nobody sees it."""
    past = instructions.now() - timedelta(seconds=1)
    ended = a_demand(instructions, until=past)
    instructions.give(ended)
    assert instructions.get(Demand, "t-1") is None
    assert instructions.in_force(Demand) == []
    assert instructions.forget([ended]) == 0


def test_workers_notice_a_new_instruction(parts: Store) -> None:
    """By the revision that comes with their heartbeat; not that a demand was met."""
    found = parts.instructions
    revisions = [parts.workers.heartbeat("celery@web-1").revision]
    for one in (a_demand(found), an_override(found)):
        found.give(one)
        revisions.append(parts.workers.heartbeat("celery@web-1").revision)
    found.remove(one)
    revisions.append(parts.workers.heartbeat("celery@web-1").revision)
    assert revisions == sorted(set(revisions))
    found.forget(found.of(Demand))
    assert parts.workers.heartbeat("celery@web-1").revision == revisions[-1]


def test_the_number_of_demands_is_bounded(instructions: Instructions) -> None:
    """Every worker keeps all of them in memory; one that is there can still be changed."""
    put = [instructions.give(a_demand(instructions, name), 2) for name in "abca"]
    assert put == [True, True, False, True]
    assert {one.id for one in instructions.of(Demand)} == {"a", "b"}


def test_an_override_is_in_force_until_its_end(
    instructions: Instructions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's clock says when the end is."""
    now = instructions.now()
    instructions.give(an_override(instructions, value=5))
    instructions.give(an_override(instructions, since=now))
    later = now + timedelta(hours=2)
    instructions.give(an_override(instructions, key="reasons", value=["failed"], until=later))

    found = instructions.in_force(Override)
    assert {one.key: one.value for one in found} == {"max_deliveries": 3, "reasons": ["failed"]}
    with monkeypatch.context() as end:
        end.setattr(instructions, "now", lambda: now + timedelta(hours=1.5))
        assert [one.key for one in instructions.in_force(Override)] == ["reasons"]
    assert [one.key for one in instructions.of(Override)] == ["reasons"]


def test_an_override_can_be_lifted(instructions: Instructions) -> None:
    """Once."""
    one = an_override(instructions)
    instructions.give(one)
    assert instructions.remove(one) is True
    assert instructions.remove(one) is False
    assert instructions.of(Override) == []
