"""Redis does what it is told and its reply is lost: the second attempt knows its own work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of
from command_proxy import CommandProxy, Matches, sends
from fresh import fresh_store, jobs_on
from servers import RedisServer

from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Action, Events, GroupState
from celery_dlq.features.circuit_breaker import CIRCUITS
from celery_dlq.features.circuit_breaker.circuits import Circuits
from celery_dlq.features.circuit_breaker.ends import CircuitStore
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Died,
    Ends,
    Happened,
)
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import EPOCH
from celery_dlq.operations.job import DONE, RUNNING, WAITING
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.store.holds import OPEN, Hold
from celery_dlq.store.metrics import Counts
from celery_dlq.store.records import GroupStatus
from celery_dlq.store.scripts import script_text
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import Stored, WorkerInfo
from celery_dlq.worker.heartbeat import Heartbeat

TASK, QUEUE, BROKER = "shop.charge", "orders", "broker"
BREAKER = CircuitBreaker(deaths=2)


def runs(name: str) -> Matches:
    """Match the calls of one of the store's scripts."""
    script = script_text(name)
    calls = [sends("EVAL", script.text), sends("EVALSHA", script.digest)]
    return lambda command: any(call(command) for call in calls)


@pytest.fixture
def proxy(redis_server: RedisServer, redis_url: str) -> Iterator[CommandProxy]:
    """What loses replies."""
    with CommandProxy(redis_server.port) as made:
        yield made


@pytest.fixture
def parts(proxy: CommandProxy) -> Iterator[Store]:
    """The store behind it, every script of which is known to Redis."""
    made = Store(proxy.url)
    yield made
    made.close()


def change(circuits: Circuits, happened: Any) -> tuple[str | None, int, bool]:
    """Let something happen to the breaker; its state, its successes, and whether that changed."""
    hold, changed = circuits.change_breaker(TASK, QUEUE, happened, BREAKER)
    circuit = None if hold is None else hold.circuit
    return (None, 0, changed) if circuit is None else (circuit.state, circuit.successes, changed)


def test_a_breaker_whose_opening_has_no_reply_is_told_once(
    proxy: CommandProxy, parts: Store
) -> None:
    """Log, metric, event and audit would lack it, and nobody would know why tasks wait."""
    seen: list[Any] = []
    events, counts = Events(), Counts()
    events.subscribe(seen.append)
    circuits = Circuits(parts, events, counts, BROKER)
    circuits.change_breaker(TASK, "another", Happened.OPENED, BREAKER)
    seen.clear()
    lost = proxy.fault("after", runs("instruct"))

    opened = change(circuits, Died(Ends(2, 2), "f", "letter"))

    assert lost.met.is_set()
    assert opened == (OPEN, 0, True)
    assert [one.action for one in seen] == [Action.CIRCUIT_OPENED]
    assert len(parts.workers.changes(limit=9)) == 2
    metrics = fresh_store().metrics
    counts.flush(metrics.add_counts)
    assert metrics.read_all().counts[CIRCUITS.name, TASK, QUEUE, "open"] == 1


def test_a_probe_whose_success_has_no_reply_counts_once(proxy: CommandProxy, parts: Store) -> None:
    """Counted twice, one probe would close a breaker that asks for two."""
    circuits = Circuits(parts, Events(), Counts(), BROKER)
    change(circuits, Happened.OPENED)
    lost = proxy.fault("after", runs("instruct"))

    assert change(circuits, Happened.PROBE_SUCCEEDED) == (OPEN, 1, True)
    assert lost.met.is_set()


def test_of_two_equal_changes_of_two_processes_one_is_made(parts: Store) -> None:
    """What another process wrote is not taken for our own, though it is equal."""
    change(Circuits(parts, Events(), Counts(), BROKER), Happened.OPENED)
    (hold,) = parts.instructions.of(Hold)
    assert parts.instructions.replace(hold, hold)
    (again,) = parts.instructions.of(Hold)
    assert again == hold

    text = parts.client.hget(parts.keys.instructions(), f"hold:{hold.id}")
    other = Store(parts.url)
    assert other.instructions.replace(hold, hold)
    assert parts.client.hget(parts.keys.instructions(), f"hold:{hold.id}") != text
    other.close()


def test_a_closing_is_told_though_its_counts_cannot_be_forgotten(
    parts: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker is closed in the store: that is said before anything else can fail."""
    seen: list[Any] = []
    events = Events()
    events.subscribe(seen.append)
    circuits = Circuits(parts, events, Counts(), BROKER)
    change(circuits, Happened.OPENED)

    def away(_breaker: str) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(parts.part(CircuitStore), "forget_counts", away)
    circuits.change_breaker(TASK, QUEUE, Happened.CLOSED)
    assert [one.action for one in seen] == [Action.CIRCUIT_OPENED, Action.CIRCUIT_CLOSED]


def test_a_letter_whose_reply_is_lost_is_new_all_the_same(
    proxy: CommandProxy, parts: Store
) -> None:
    """Taken for another worker's, it would be in no log, no metric, no signal and no breaker."""
    parts.connection.send_and_wait("PING")
    for _ in range(2):  # the second one goes over the worker's connection
        first = a_letter()
        assert parts.letters.dead_letter(first, key_of(first)) is Stored.NEW
    letter = a_letter()
    lost = proxy.fault("after", runs("dead_letter"))

    found = parts.letters.dead_letter(letter, key_of(letter))

    assert lost.met.is_set()
    assert found is Stored.NEW
    assert parts.letters.length(letter.dead_letter_queue) == 3
    parts.connection.breaker.worked()  # it would rest for a while
    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.ALREADY_THERE


def test_a_letter_whose_store_answers_at_a_later_attempt_is_new(
    proxy: CommandProxy, parts: Store
) -> None:
    """The worker kept it in memory, because nobody had said that it is stored."""
    for _ in range(2):
        first = a_letter()
        assert parts.letters.dead_letter(first, key_of(first)) is Stored.NEW
    letter = a_letter()
    proxy.fault("after", runs("dead_letter"), 9)
    with pytest.raises(StoreUnavailable):
        parts.letters.dead_letter(letter, key_of(letter))
    for fault in proxy._faults:
        fault.release()
    parts.connection.breaker.worked()

    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.NEW
    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.ALREADY_THERE


@pytest.mark.parametrize("again", ["at once", "later"])
def test_a_letter_whose_reply_is_lost_tells_that_its_group_was_resolved(
    proxy: CommandProxy, parts: Store, again: str
) -> None:
    """The first attempt changed the state; the second one finds it changed by this very letter."""
    for _ in range(2):
        first = a_letter()
        parts.letters.dead_letter(first, key_of(first))
    resolved = GroupStatus(state=GroupState.RESOLVED, at=NOW, actor="ann")
    parts.notes.set_status(DLQ, first.fingerprint, resolved)
    letter = a_letter()
    proxy.fault("after", runs("dead_letter"), 1 if again == "at once" else 9)
    if again == "later":
        with pytest.raises(StoreUnavailable):
            parts.letters.dead_letter(letter, key_of(letter))
        for fault in proxy._faults:
            fault.release()
        parts.connection.breaker.worked()

    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.REGRESSED


def test_a_letter_of_another_worker_is_not_taken_for_the_own_after_a_failure(
    proxy: CommandProxy, parts: Store
) -> None:
    """Its message died there a moment before, and this worker's first attempt came to nothing."""
    letter = a_letter()
    other = replace(letter, dead_lettered_at=letter.dead_lettered_at - timedelta(microseconds=1))
    proxy.fault("before", runs("dead_letter"), 9)
    with pytest.raises(StoreUnavailable):
        parts.letters.dead_letter(letter, key_of(letter))
    for fault in proxy._faults:
        fault.release()
    parts.connection.breaker.worked()
    elsewhere = Store(parts.url)
    assert elsewhere.letters.dead_letter(other, key_of(other)) is Stored.NEW
    elsewhere.close()

    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.ALREADY_THERE


def test_a_job_whose_beginning_has_no_reply_is_run_by_this_process(
    proxy: CommandProxy, parts: Store
) -> None:
    """Taken for another process's, nobody would run it until a person looked."""
    jobs = jobs_on(parts)
    for _ in range(2):  # at the second one, Redis knows the script
        run = jobs.make("redrive", "orders-DLQ", LetterFilter(), RedriveOptions())
        run.send_heartbeat(now=True)
        run.end(WAITING, {})
        lost = proxy.fault("after", runs("save_job"))
        begun = jobs.begin_again(run.job.id)
        assert (begun.job.id, begun.job.state) == (run.job.id, RUNNING)
        assert lost.met.is_set()
        begun.end(DONE, {})
    assert jobs.run_next(lambda: False) is None


def a_heartbeat(parts: Store, apply: Any = lambda *_: None, **info: Any) -> Heartbeat:
    known = {"hostname": "celery@web-1", "pid": 1, "version": "1", "started_at": EPOCH}
    made = WorkerInfo(**{**known, "queues": (), "tasks": (), "policies": {}, **info})
    return Heartbeat(
        parts.workers,
        made,
        parts.instructions,
        apply,
    )


def test_a_worker_that_starts_again_is_known_by_what_it_is_now(parts: Store) -> None:
    """Taken for the one that was killed, its new tasks would have no worker."""
    a_heartbeat(parts, pid=1, tasks=("shop.old",)).tick()

    a_heartbeat(parts, pid=2, tasks=("shop.old", "shop.new")).tick()

    (found,) = parts.workers.workers()
    assert (found.pid, found.tasks) == (2, ("shop.old", "shop.new"))


def test_a_hold_that_could_not_be_applied_is_applied_by_the_next_heartbeat(
    parts: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The revision of what was applied is kept, not of what was read."""
    caplog.set_level(logging.ERROR)
    applied: list[Any] = []

    def apply(holds: Any, _now: Any) -> None:
        applied.append(holds)
        if len(applied) == 2:
            raise ConnectionError("the consumer's connection is gone")

    heartbeat = a_heartbeat(parts, apply)
    parts.instructions.replace(None, a_hold())
    heartbeat.tick()
    change(Circuits(parts, Events(), Counts(), BROKER), Happened.OPENED)
    with pytest.raises(ConnectionError):
        heartbeat.tick()
    heartbeat.tick()
    assert [len(holds) for holds in applied] == [1, 2, 2]
    heartbeat.tick()
    assert len(applied) == 3


def a_hold() -> Hold:
    return Hold(id="hold-1", since=EPOCH)
