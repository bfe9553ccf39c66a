"""Celery's acknowledgements under the guard: real requests, a pool that does nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from billiard.pool import ApplyResult
from celery.concurrency import prefork
from celery.concurrency.base import BasePool
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.worker import state
from celery.worker.request import Request
from guarded_worker import Pool, Worker, an_error
from intervals import change

from celery_dlq.features.dead_letter.demand import Demand
from celery_dlq.letters.record import Outcome, Reason, iso
from celery_dlq.store.metrics import DELIVERIES, INTERNAL_ERRORS
from celery_dlq.worker.dispatched import ENDED
from celery_dlq.worker.in_process import InProcessRequest, NotStartedError
from celery_dlq.writing.lifecycle import DeliveryState


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Celery remembers requests that run, and tasks that are revoked, for the whole process."""
    yield
    state.reset_state()


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """A worker whose queue allows one delivery."""
    return Worker(tmp_path)


def give_up(request: Any) -> None:
    """Cancel it, as a shutdown does."""
    known = inspect.signature(Request._announce_cancelled).parameters  # Celery 5.4 has none
    request._announce_cancelled(**({"emit_retry": False} if "emit_retry" in known else {}))


def test_a_letter_is_stored_before_its_message_is_acknowledged(worker: Worker) -> None:
    """In this order, and once."""
    request = worker.start()
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    assert worker.said == ["letter", "ack"]
    assert request.dlq_state is DeliveryState.STORED


def requeue(request: Any) -> None:
    """The task raises ``Reject(requeue=True)``."""
    request.on_failure(an_error(Reject("not now", requeue=True)), return_ok=True)


def run_out_of_memory(request: Any) -> None:
    """Celery stops the worker."""
    with pytest.raises(MemoryError):
        request.on_failure(an_error(MemoryError("no more")))


def lose_the_process(request: Any) -> None:
    """And the result backend is away."""
    request.task.backend.mark_as_failure = Mock(side_effect=ConnectionError("away"))
    with pytest.raises(ConnectionError):
        request.on_failure(an_error(WorkerLostError("SIGKILL")))


@pytest.mark.parametrize("store", ["up", "down"])
@pytest.mark.parametrize(
    ("end", "reason", "ended"),
    [
        (requeue, Reason.REJECTED, Reject),
        (give_up, Reason.WORKER_LOST, WorkerLostError),
        (run_out_of_memory, Reason.FAILED, None),
        (lose_the_process, Reason.WORKER_LOST, WorkerLostError),
    ],
)
def test_what_was_acknowledged_before_it_ran_becomes_a_letter(
    worker: Worker, end: Callable[[Any], None], reason: Reason, ended: type | None, store: str
) -> None:
    """The broker can give nothing back, whatever Celery asks of it; and the result ends."""
    worker.task.acks_late = False
    worker.task.backend.mark_as_failure = Mock()
    request = worker.start()
    assert worker.said == ["ack"]
    worker.down = store == "down"
    end(request)
    worker.down = False
    worker.guard.tick()
    assert worker.said == ["ack", "letter"]
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert letter.reason is reason
    failed = worker.task.backend.mark_as_failure
    assert [type(call.args[1]) for call in failed.mock_calls] == [ended] * (ended is not None)


@pytest.mark.parametrize("rests", [True, False])
def test_a_success_is_told_at_once_while_the_consumer_has_no_connection(
    worker: Worker, rests: bool
) -> None:
    """Another worker has the message soon, and nothing runs here that shows life; else it waits."""
    request = worker.start()
    if rests:
        worker.guard.disconnected()
    request.on_success((False, None, 0.1))
    assert len(worker.guard.counter.history(request.dlq_in_flight.key)) == (0 if rests else 1)


@pytest.mark.skipif(not hasattr(Request, "_success_was_stored"), reason="new in Celery 5.7")
@pytest.mark.parametrize("form", [str, datetime.isoformat, lambda at: at, lambda _: None])
@pytest.mark.parametrize(
    ("seconds", "redelivered"), [(-5, False), (-5, True), (0, False), (99, True)]
)
def test_the_result_of_an_earlier_message_with_this_id_is_no_success_of_this_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, form: Any, seconds: int, redelivered: bool
) -> None:
    """Its process was lost. A result from before its start, or of another clock, is not its own."""
    request = worker.start(redelivered=redelivered)
    at = form(datetime.now(timezone.utc) + timedelta(seconds=seconds))
    meta = {"status": "SUCCESS", "date_done": at, "result": None}
    monkeypatch.setattr(Request, "_success_was_stored", lambda _: meta)
    request.on_failure(an_error(WorkerLostError("SIGKILL")))
    lost = seconds != 0 and at is not None
    assert worker.said == (["letter", "ack"] if lost else ["ack"])


def test_a_message_is_not_acknowledged_while_its_letter_is_being_stored(worker: Worker) -> None:
    """A time limit and a result may be handled at once, in two threads."""
    request, store = worker.start(), worker.dlq.assembly.backend.new_letters.dead_letter

    def dead_letter(*args: Any) -> Any:
        request.acknowledge()
        return store(*args)

    worker.dlq.assembly.backend.new_letters.dead_letter = dead_letter  # type: ignore[method-assign]
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    assert worker.said == ["letter", "ack"]
    assert request.dlq_state is DeliveryState.STORED


def test_a_dead_message_is_held_back_until_the_store_answers(worker: Worker) -> None:
    """Neither acknowledged nor rejected, whatever Celery does; then acknowledged once."""
    worker.down = True
    request = worker.start()
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    request.acknowledge()
    request.reject(requeue=True)
    request._announce_revoked("terminated", True, "15", False)
    assert worker.said == []
    assert request.dlq_state is DeliveryState.WAITING_FOR_STORE
    worker.down = False
    worker.guard.tick()
    assert worker.said == ["letter", "ack"]
    assert request.dlq_state is DeliveryState.STORED


def test_a_message_past_its_limit_waits_for_the_store_too(worker: Worker) -> None:
    """It is not executed meanwhile, and its task fails once the letter is stored."""
    worker.start()
    worker.down = True
    request = worker.receive(redelivered=True)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert (worker.said, request.dlq_state) == ([], DeliveryState.WAITING_FOR_STORE)
    worker.down = False
    worker.guard.tick()
    assert (worker.said, request.dlq_state) == (["letter", "ack"], DeliveryState.STORED)


@pytest.mark.parametrize("refused", [False, True])
def test_a_waiting_letter_that_cannot_be_stored_waits_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """An error of our own acknowledges nothing: without its letter the message would be lost."""
    request = worker.start()
    worker.down = True
    if refused:
        request = worker.receive(redelivered=True)
        with pytest.raises(TaskRevokedError):
            request.execute_using_pool(Pool())
    else:
        request.on_failure(an_error(ValueError("x")), return_ok=True)
    assert request.dlq_state is DeliveryState.WAITING_FOR_STORE
    monkeypatch.setattr(worker.dlq.assembly.backend.new_letters, "dead_letter", lambda *_: 1 / 0)
    worker.guard.tick()
    assert (worker.said, request.dlq_state) == ([], DeliveryState.WAITING_FOR_STORE)


def test_a_revoked_task_whose_result_cannot_be_stored_is_no_letter(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is Celery's, as it is without the plugin."""
    request = worker.receive()
    state.revoked.add(worker.id)
    monkeypatch.setattr(worker.task.backend, "mark_as_revoked", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        request.execute_using_pool(Pool())
    assert "letter" not in worker.said


def test_a_job_that_begins_at_once_is_not_waited_for(tmp_path: Any) -> None:
    """A pool with a result thread says so before the pool has returned the job."""

    class Quick(Pool):
        """Accepts a job while it is given one; Celery's own handler has not come so far."""

        def apply_async(self, *_: Any, **kwargs: Any) -> Any:
            kwargs["accept_callback"](1, 0.0)
            request.time_start = None
            return ApplyResult({}, None)

    worker = Worker(tmp_path, Quick())
    request = worker.receive()
    request.execute_using_pool(Quick())
    assert request.dlq_state is DeliveryState.RUNNING
    assert worker.guard.at_work.requests() == [request]


@pytest.mark.parametrize("down", [False, True])
def test_an_expired_message_is_a_letter_before_celery_drops_it(worker: Worker, down: bool) -> None:
    """Celery announces the revocation once the letter is stored."""
    worker.down = down
    request = worker.receive(expires="2001-01-01T00:00:00+00:00")
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert worker.said == ([] if down else ["letter", "ack"])
    worker.down = False
    worker.guard.tick()
    assert worker.said == ["letter", "ack"]


def test_what_a_shutdown_gave_up_is_neither_acknowledged_nor_rejected(worker: Worker) -> None:
    """A lost process or a time limit that comes with the shutdown changes nothing."""
    request = worker.start()
    give_up(request)
    assert request.dlq_state is DeliveryState.RELEASED
    request.on_failure(an_error(WorkerLostError("gone")))
    request.on_timeout(False, 10)
    assert worker.said == []
    assert request.dlq_state is DeliveryState.RELEASED


def test_what_a_shutdown_gave_up_may_still_succeed(worker: Worker) -> None:
    """Then it is acknowledged, and not run again for nothing."""
    request = worker.start()
    give_up(request)
    request.on_success((False, None, 0.1))
    assert (worker.said, request.dlq_state) == (["ack"], DeliveryState.DONE)


def test_a_revoked_task_is_over_once(worker: Worker) -> None:
    """A later report of its process is no death, and counts nothing."""
    request = worker.start()
    request._announce_revoked("terminated", True, "15", False)
    request.on_failure(an_error(Terminated("15")))
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    request.on_success((False, None, 0.1))
    assert (worker.said, request.dlq_state) == (["ack"], DeliveryState.DONE)
    assert worker.counted(DELIVERIES) == {("orders", "succeeded", "shop.charge"): 1}


def test_an_ignored_message_is_done(worker: Worker) -> None:
    """Celery acknowledges it, as ever."""
    request = worker.start()
    request.on_failure(an_error(Ignore()), return_ok=True)
    assert (worker.said, request.dlq_state) == (["ack"], DeliveryState.DONE)


def test_an_end_that_is_none_leaves_the_task_running(worker: Worker) -> None:
    """Celery neither acknowledged nor rejected; the next end is judged again."""
    request = worker.start()
    request._already_cancelled = True
    request.on_failure(an_error(Terminated(15)))
    assert (worker.said, request.dlq_state) == ([], DeliveryState.RUNNING)


def test_a_pool_that_drops_a_job_has_not_started_it(worker: Worker) -> None:
    """Its delivery is not counted any more."""
    request = worker.receive()
    request.execute_using_pool(Pool())
    worker.guard.uncount_never_started([request])
    assert request.dlq_state is DeliveryState.NEW
    assert not request.dlq_in_flight.charged


class InterruptedPool(prefork.TaskPool):
    """A cold shutdown's handler ends it after the count and before it is given the job."""

    def apply_async(self, *_: Any, **__: Any) -> None:
        """Drop the job, as billiard's pool does."""
        self.terminate()


def test_a_start_that_a_cold_shutdown_interrupts_is_not_counted(tmp_path: Any) -> None:
    """The signal's handler runs between two lines of the main thread."""
    pool = InterruptedPool(1)
    request = Worker(tmp_path, pool).receive()
    pool._state = pool.RUN
    request.execute_using_pool(pool)
    assert request.dlq_state is DeliveryState.NEW
    assert not request.dlq_in_flight.charged


class BrokenPool(Pool):
    """Takes nothing."""

    def apply_async(self, *_: Any, **__: Any) -> None:
        """Fail as a pool does that cannot pickle a task."""
        raise ValueError("no such codec")


@pytest.mark.parametrize(
    ("policy", "said", "state"),
    [
        ({"max_deliveries": 1}, ["reject True"], DeliveryState.DONE),
        ({"max_retries": 1}, ["letter", "ack"], DeliveryState.STORED),
    ],
)
def test_a_task_that_no_pool_takes_comes_back_while_its_starts_are_counted(
    tmp_path: Any, policy: dict[str, int], said: list[str], state: DeliveryState
) -> None:
    """Without a limit it would come back forever: it is a letter at once."""
    worker = Worker(tmp_path, BrokenPool(), **policy)
    request = worker.receive()
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(BrokenPool())
    assert (worker.said, request.dlq_state) == (said, state)
    assert worker.counted(INTERNAL_ERRORS) == {}


def test_a_dead_message_is_not_run_because_it_could_not_be_settled(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is gone when it is to be acknowledged: it comes back, and finds its letter."""
    worker.start()
    request = worker.receive(redelivered=True)

    def on_ack(*_: object) -> None:
        raise ConnectionError("the broker is gone")

    request._on_ack = on_ack
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert len(list(worker.dlq.letters("orders-DLQ"))) == 1
    assert "could not be ended" in caplog.text


def test_a_start_that_an_error_of_our_own_keeps_from_being_counted_happens(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as an error; the task runs."""
    monkeypatch.setattr(worker.guard, "count_start", broken)
    request = worker.start()
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    assert worker.said == ["letter", "ack"]
    assert worker.counted(INTERNAL_ERRORS) == {("start",): 1}


def broken(*_: Any, **__: Any) -> None:
    """Fail as only our own code does."""
    raise TypeError("odd")


@pytest.mark.parametrize(
    "act",
    [
        lambda request: request.on_success((False, None, 0.1)),
        lambda request: request.on_failure(an_error(ValueError("x")), return_ok=True),
        lambda request: request.on_failure(an_error(WorkerLostError("x"))),
        lambda request: request.on_timeout(False, 1),
        give_up,
        lambda request: request._announce_revoked("terminated", True, "15", False),
    ],
)
@pytest.mark.parametrize("state", list(DeliveryState))
def test_no_event_in_any_state_fails_or_lets_go_of_a_message_that_waits(
    worker: Worker, state: DeliveryState, act: Callable[[Any], None]
) -> None:
    """Also events that Celery never sends then; and none is an illegal transition, but one."""
    request = worker.start()
    request.dlq_state = state
    logging.getLogger("celery.worker.request").disabled = True
    act(request)
    logging.getLogger("celery.worker.request").disabled = False
    if state is DeliveryState.WAITING_FOR_STORE:
        assert worker.said == []
    assert len(worker.counted(INTERNAL_ERRORS)) <= 1


def demand(worker: Worker) -> None:
    """An operator wants the worker's task dead-lettered, and the worker knows."""
    instructions = worker.dlq.assembly.backend.instructions
    now = instructions.now()
    one = Demand(id=worker.id, reason="wrong", since=now, until=now + timedelta(hours=1))
    assert instructions.give(one)
    worker.guard.tick()


def test_a_message_that_an_operator_ends_does_not_start(worker: Worker) -> None:
    """Its letter comes first; a message of another task starts."""
    demand(worker)
    request = worker.receive()
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert worker.said == ["letter", "ack"]
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert (letter.reason, letter.deliveries, letter.history) == (Reason.OPERATOR, 0, ())
    assert not worker.observer("dead_letter").known

    worker.id = str(uuid4())
    worker.start()


def test_a_demand_is_forgotten_only_after_the_acknowledgement(worker: Worker) -> None:
    """A worker that is killed before that must not run the message when it comes back."""
    demand(worker)
    with pytest.raises(TaskRevokedError):
        worker.receive().execute_using_pool(Pool())
    consumer = SimpleNamespace(timer=SimpleNamespace(schedule=SimpleNamespace(queue=[])))
    instructions = worker.dlq.assembly.backend.instructions
    worker.guard.in_loop(consumer)
    assert instructions.get(Demand, worker.id) is not None
    worker.guard.in_loop(consumer)
    assert instructions.get(Demand, worker.id) is None


def test_a_terminated_task_waits_for_the_store(worker: Worker) -> None:
    """It is not acknowledged before its letter is stored; what the pool reports changes nothing."""
    request = worker.start()
    demand(worker)
    worker.down = True
    request._announce_revoked("terminated", True, 15, False)
    request.on_failure(an_error(WorkerLostError("signal 15")))
    assert worker.said == []
    assert request.dlq_state is DeliveryState.WAITING_FOR_STORE

    worker.down = False
    worker.guard.tick()
    assert worker.said == ["letter", "ack"]
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert (letter.reason, letter.deliveries) == (Reason.OPERATOR, 1)
    assert letter.history[0].exception_message == "terminated; wrong (dead-lettered by )"


def test_a_task_that_celery_terminates_is_no_death(worker: Worker) -> None:
    """Revoked as ever, if no operator wants it dead-lettered."""
    request = worker.start()
    request._announce_revoked("terminated", True, 15, False)
    assert worker.said == ["ack"]


def test_a_redrive_after_the_demand_runs(worker: Worker) -> None:
    """One that was earlier does not count."""
    demand(worker)
    at, moment = worker.observer("dead_letter").known[worker.id].since, timedelta(microseconds=1)
    worker.start(dlq_redriven_at=iso(at + moment), dlq_redrives=1)
    with pytest.raises(TaskRevokedError):
        worker.receive(dlq_redriven_at=iso(at - moment)).execute_using_pool(Pool())


def test_a_task_that_succeeds_in_spite_of_a_demand_has_succeeded(worker: Worker) -> None:
    """The demand is forgotten with it."""
    request = worker.start()
    demand(worker)
    request.on_success((False, None, 0.1))
    assert worker.said == ["ack"]
    assert not worker.observer("dead_letter").known


def test_a_message_whose_end_celery_does_not_report_is_given_back_charged_and_counted(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delivery vanished; the error of its thread, which nobody else has seen, is in the log."""
    change(monkeypatch, tick=0)
    worker = Worker(tmp_path, kind=InProcessRequest)
    request = worker.start()
    request.dlq_job = future = Future[None]()
    future.set_exception(ConnectionError("the result backend is away"))
    for _ in range(2):
        worker.guard.look_for_missing_ends(Pool())
    assert worker.said == ["reject True"]
    assert request.dlq_state is DeliveryState.DONE
    assert request not in state.active_requests
    assert "the result backend is away" in caplog.text
    assert worker.counted(DELIVERIES) == {("orders", "vanished", "shop.charge"): 1}
    history = worker.guard.counter.history(request.dlq_in_flight.key)
    assert [each.outcome for each in history] == [Outcome.VANISHED]
    request.acknowledge()
    assert worker.said == ["reject True"]


def test_a_cancelled_message_is_given_back_without_a_word(
    worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery has said that it is cancelled."""
    change(monkeypatch, tick=0)
    request = worker.start()
    give_up(request)
    request.dlq_job = ENDED
    for _ in range(2):
        worker.guard.look_for_missing_ends(Pool())
    assert worker.said == ["reject True"]
    assert "did not report" not in caplog.text


class Channel:
    """A channel of RabbitMQ that is closed while a count is waited for."""

    connection: Any = object()


def test_a_start_whose_message_went_back_during_the_wait_for_its_count_does_not_happen(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker gives it to another worker; its count is taken back."""
    request = worker.receive(redelivered=True)
    request.message.channel = Channel()
    begin = worker.guard.count_start

    def lose_the_connection(request: Any) -> Any:
        request.message.channel.connection = None
        return begin(request)

    monkeypatch.setattr(worker.guard, "count_start", lose_the_connection)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert (worker.said, request.dlq_state) == ([], DeliveryState.DONE)
    assert not request.dlq_in_flight.charged


def test_a_start_that_a_cold_shutdown_overtakes_while_it_is_counted_is_not_charged(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool of threads, the signal comes in another thread than the count."""
    worker = Worker(tmp_path, kind=InProcessRequest)
    request = worker.receive()
    begin = worker.guard.count_start

    def shut_down(request: Any) -> Any:
        started = begin(request)
        monkeypatch.setattr(state, "should_terminate", True)
        return started

    monkeypatch.setattr(worker.guard, "count_start", shut_down)
    with pytest.raises(NotStartedError):
        request.on_accepted(1, 0.0)
    assert not request.dlq_in_flight.charged
    assert (worker.said, request.dlq_state) == ([], DeliveryState.NEW)


def test_a_task_that_its_pool_cannot_cancel_runs_to_its_end(worker: Worker) -> None:
    """With solo, Celery's handler of a cold shutdown would raise the error in the task's midst."""
    request = worker.start()
    request.time_start = 1.0
    request.cancel(BasePool())
    assert worker.said == []
    request.on_success((0, "fine", 0.1))
    assert worker.said == ["ack"]
    assert request.dlq_state is DeliveryState.DONE


def test_a_redriven_message_of_protocol_1_is_counted_as_its_letter_is_named(
    worker: Worker,
) -> None:
    """Celery reads such a message from its body, where nobody counts redrives."""
    request = worker.receive()
    request.message.headers["dlq_redrives"] = 1
    request.execute_using_pool(Pool())
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert request.dlq_in_flight.key.letter_id == letter.id
