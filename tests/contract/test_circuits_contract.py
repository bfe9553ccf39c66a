"""The contract of every `CircuitStore`, and of the breaker's state, which a hold keeps."""

from __future__ import annotations

from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

from builders import NOW
from waiting import poll

from celery_dlq.events import Action, Events
from celery_dlq.features.circuit_breaker.circuits import Circuits
from celery_dlq.features.circuit_breaker.ends import CircuitStore, hold_id_of
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Died,
    Ends,
    Happened,
    Succeeded,
)
from celery_dlq.store.holds import Circuit, Hold
from celery_dlq.store.metrics import Counts
from celery_dlq.store.store import Store

TASK, QUEUE, BROKER = "shop.süß", "orders", "redis://here/0"
HOLD = hold_id_of(TASK, QUEUE, BROKER)
BREAKER = CircuitBreaker(deaths=3)


def told(number: int = 0, *, breaker: str = HOLD, window: float = 60.0) -> Succeeded:
    """Successes."""
    return Succeeded(breaker, window, number)


def test_letters_of_one_fingerprint_are_counted_among_all_ends(parts: Store) -> None:
    """Of one task and queue; successes come with a letter or by themselves."""
    store = parts.part(CircuitStore)
    assert store.count_death("f", told()) == Ends(1, 1)
    store.succeeded([told(4), told(7, breaker="another")])
    assert store.count_death("g", told(2)) == Ends(1, 8)
    assert store.count_death("f", told()) == Ends(2, 9)
    assert store.count_death("f", told(breaker="another")) == Ends(1, 8)
    store.forget_counts(HOLD)
    assert store.count_death("f", told()) == Ends(1, 1)


def test_what_left_the_window_counts_no_more(parts: Store) -> None:
    """The newest stay."""
    store, short = parts.part(CircuitStore), told(5, window=0.4)
    store.succeeded([short])
    assert store.count_death("f", told(window=0.4)).all <= 6
    poll(lambda: store.count_death("f", told(window=0.4)).died < 3, every_seconds=0.5)


def test_more_groups_than_are_told_apart_count_among_all(parts: Store) -> None:
    """Their number is bounded in the store."""
    for number in range(60):
        ends = parts.part(CircuitStore).count_death(f"f{number}", told())
    assert ends.all == 60
    assert parts.part(CircuitStore).count_death("f0", told()).died >= 1


def test_the_state_of_a_breaker_comes_back_with_its_hold(parts: Store) -> None:
    """Whole, and workers are told that it changed."""
    circuit = Circuit(
        task=TASK, queue=QUEUE, opened_at=7, probe_every=1.5, probes=2, probed_at=9, successes=1
    )
    hold = Hold(id="breaker-1", since=NOW, circuit=circuit)
    assert parts.instructions.replace(None, hold)
    assert parts.instructions.of(Hold) == [hold]
    other = replace(hold, circuit=replace(circuit, successes=2))
    assert parts.instructions.replace(hold, other)
    assert not parts.instructions.replace(hold, other)


def changes(parts: Store) -> tuple[Circuits, list[Any]]:
    """What changes breakers, and the changes that it tells."""
    events, seen = Events(), []
    events.subscribe(seen.append)
    return Circuits(parts, events, Counts(), BROKER), seen


def test_of_many_processes_one_opens_and_tells(parts: Store) -> None:
    """At the same moment, for the same cause."""
    circuits, seen = changes(parts)
    barrier, won = Barrier(4), []

    def open_it() -> None:
        barrier.wait()
        died = Died(Ends(3, 3), "f", "letter")
        won.append(circuits.change_breaker(TASK, QUEUE, died, BREAKER)[1])

    threads = [Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False, False, False, True]
    assert [change.action for change in seen] == [Action.CIRCUIT_OPENED]
    assert [change.action for change in parts.workers.changes(limit=9)] == [Action.CIRCUIT_OPENED]


def test_a_breaker_opens_closes_and_opens_again_with_one_hold(parts: Store) -> None:
    """Which ends when its messages are released; counts begin anew at the closing."""
    circuits, seen = changes(parts)
    parts.part(CircuitStore).count_death("f", told())
    opened, _ = circuits.change_breaker(
        TASK, QUEUE, Happened.OPENED, BREAKER, actor="ann", reason="why"
    )
    assert opened is not None
    assert opened.circuit is not None
    assert (opened.id, opened.actor, opened.reason) == (HOLD, "ann", "why")
    closed, _ = circuits.change_breaker(TASK, QUEUE, Happened.CLOSED, actor="bob")
    assert closed is not None
    assert parts.part(CircuitStore).count_death("f", told()) == Ends(1, 1)
    assert circuits.change_breaker(TASK, QUEUE, Happened.EMPTIED) != (closed, False)
    (ended,) = parts.instructions.of(Hold)
    assert not ended.in_force(parts.instructions.now())
    again, changed = circuits.change_breaker(TASK, QUEUE, Died(Ends(3, 3), "f", "l"), BREAKER)
    assert changed
    assert again is not None
    assert again.circuit is not None
    assert again.circuit.opened_at > opened.circuit.opened_at
    assert [hold.id for hold in parts.instructions.of(Hold)] == [opened.id]
    assert [str(change.action)[8:] for change in seen] == ["opened", "closed", "opened"]
    assert [change.actor for change in seen] == ["ann", "bob", "circuit_breaker"]
