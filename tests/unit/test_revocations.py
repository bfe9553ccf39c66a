"""Which revoked messages run: those that were redriven later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.control import Panel
from guarded_worker import Pool, Worker

from celery_dlq.errors import NotFound, StoreUnavailable
from celery_dlq.letters.record import Reason, iso
from celery_dlq.store.revoked import MOST_REVOKED, RevokedTasks
from celery_dlq.worker.revoked import COMMANDS, Revocations, listen_for_revocations
from celery_dlq.writing.lifecycle import DeliveryState

HOUR = timedelta(hours=1)


@pytest.fixture
def worker(tmp_path: Any) -> Iterator[Worker]:
    """A worker that has been told nothing."""
    before = {name: Panel.data[name] for name in COMMANDS}
    listen_for_revocations()
    yield Worker(tmp_path)
    Panel.data.update(before)
    state.reset_state()


def now(worker: Worker) -> datetime:
    return worker.dlq.assembly.backend.instructions.now()


def later(worker: Worker) -> datetime:
    """Beyond what a reply of Redis takes: by so much a revocation may seem younger than it is."""
    return now(worker) + timedelta(seconds=1)


def command(worker: Worker, name: str, **given: Any) -> None:
    """A command of an operator, as a worker handles it."""
    controller = SimpleNamespace(dead_letter_guard=worker.guard)
    consumer = SimpleNamespace(controller=controller, pool=None)
    Panel.data[name](SimpleNamespace(consumer=consumer, app=worker.app), **given)


def runs(worker: Worker, at: datetime | None = None, **headers: Any) -> bool:
    """Whether a message that was redriven at this time starts."""
    sent = {} if at is None else {"dlq_redriven_at": iso(at), "dlq_redrives": 1}
    request = worker.receive(**sent, **headers)
    try:
        request.execute_using_pool(Pool())
    except TaskRevokedError:
        return False
    return request.dlq_state is DeliveryState.DISPATCHED


def letters(worker: Worker) -> list[tuple[Reason, str]]:
    with suppress(NotFound):
        return [(one.reason, one.description or "") for one in worker.dlq.letters("orders-DLQ")]
    return []


@pytest.mark.parametrize("sent", [True, False], ids=["in the store", "on its way"])
def test_a_revocation_holds_for_redrives_before_it(worker: Worker, sent: bool) -> None:
    """Also while the store has not been told yet."""
    before = now(worker)
    command(worker, "revoke", task_id=[worker.id])
    if sent:
        worker.guard.tick()
    assert not runs(worker, before)
    assert letters(worker) == [(Reason.OPERATOR, "revoked after it was redriven")]
    assert worker.said == ["letter", "ack"]
    worker.guard.tick()
    assert runs(worker, later(worker))


def test_a_redrive_within_the_second_of_its_revocation_runs(worker: Worker) -> None:
    """The store is told of a revocation once a second, and at once if a message asks."""
    command(worker, "revoke", task_id=[worker.id])
    assert runs(worker, later(worker))
    assert letters(worker) == []


def test_an_id_that_no_operator_revoked_runs_once_it_is_redriven(worker: Worker) -> None:
    """Celery adds the ids of expired messages, and those that other workers have."""
    state.revoked.add(worker.id)
    assert runs(worker, now(worker) - HOUR)
    assert not runs(worker)
    assert worker.said == ["ack"]
    assert letters(worker) == []


def test_a_redriven_message_expires_like_any_other(worker: Worker) -> None:
    """Once more, whoever revoked its id before."""
    assert not runs(worker, now(worker), expires=iso(now(worker) - HOUR))
    assert [reason for reason, _ in letters(worker)] == [Reason.EXPIRED]


@pytest.mark.parametrize("headers", [{"batch": 7}, ["batch=7"]], ids=["app.control", "celery"])
def test_a_stamp_is_revoked_like_an_id(worker: Worker, headers: Any) -> None:
    """For what was redriven before; other values of the stamp run."""
    before = now(worker)
    command(worker, "revoke_by_stamped_headers", headers=headers)
    worker.guard.tick()
    stamped = {"stamped_headers": ["batch"]}
    value = 7 if isinstance(headers, dict) else "7"
    assert not runs(worker, before, **stamped, stamps={"batch": [value]})
    assert len(letters(worker)) == 1
    assert runs(worker, before, **stamped, stamps={"batch": 8})
    assert runs(worker, later(worker), **stamped, stamps={"batch": [value]})


@pytest.mark.parametrize("header", [5, "yesterday", "2026-01-01T00:00:00", None])
def test_a_time_that_nobody_can_read_is_no_redrive_after_the_revocation(
    worker: Worker, header: Any
) -> None:
    """It becomes a letter, as it was redriven some time."""
    state.revoked.add(worker.id)
    assert not runs(worker, dlq_redriven_at=header, dlq_redrives=1)
    assert len(letters(worker)) == 1


def test_while_the_store_is_away_a_revoked_message_does_not_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which was later, and a letter can be redriven."""

    def away(*_: Any) -> float:
        raise StoreUnavailable("away")

    state.revoked.add(worker.id)
    monkeypatch.setattr(RevokedTasks, "last_revoked_at", away)
    assert not runs(worker, now(worker))
    assert len(letters(worker)) == 1


def test_a_released_message_that_was_revoked_is_a_letter(worker: Worker) -> None:
    """Whenever that was: for Celery it waited all the time."""
    state.revoked.add(worker.id)
    assert not runs(worker, dlq_hold="hold-1")
    assert letters(worker) == [(Reason.OPERATOR, "revoked; it was released from a hold")]


def test_a_running_task_that_is_terminated_is_a_letter_if_it_was_redriven(worker: Worker) -> None:
    """With the delivery that was cut off; what the pool reports then changes nothing."""
    request = worker.start(dlq_redriven_at=iso(now(worker)), dlq_redrives=1)
    request._announce_revoked("terminated", True, 15, False)
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert (letter.reason, letter.deliveries) == (Reason.OPERATOR, 1)
    assert letter.history[0].exception_message == "terminated; revoked after it was redriven"
    assert worker.said == ["letter", "ack"]
    request.on_success((False, None, None))
    assert worker.said == ["letter", "ack"]


def test_a_released_delivery_that_is_revoked_meanwhile_comes_back(worker: Worker) -> None:
    """A lost connection gave it back; its next delivery is the letter."""
    request = worker.start(dlq_redriven_at=iso(now(worker)), dlq_redrives=1)
    request._announce_cancelled()
    request._announce_revoked("terminated", True, 15, False)
    assert worker.said == []
    assert letters(worker) == []


def test_what_waits_for_the_store_is_bounded_and_sent_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest stay; whatever the store did not take waits for the next tick."""
    store = worker.dlq.assembly.backend.revoked
    noted: list[int] = []
    revocations = Revocations(store)
    revocations.note_command({"task_id": [str(n) for n in range(MOST_REVOKED + 2)]})

    def note(ages: Any) -> None:
        noted.append(len(ages))
        if len(noted) == 1:
            raise StoreUnavailable("away")

    monkeypatch.setattr(store, "note_tasks", note)
    with pytest.raises(StoreUnavailable):
        revocations.send_to_store()
    revocations.send_to_store()
    revocations.send_to_store()
    assert noted == [MOST_REVOKED] * 2
