"""Errors of the plugin itself: logged, counted, and no message is settled or started by one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
from builders import a_message, a_request, an_app
from celery.exceptions import Reject, TaskRevokedError
from fresh import fresh_conf, shared
from guarded_worker import Pool, Worker, an_error
from kombu.common import QoS
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.record import Outcome
from celery_dlq.policies.decisions import End
from celery_dlq.store.metrics import INTERNAL_ERRORS
from celery_dlq.worker import request as request_module
from celery_dlq.worker import starts
from celery_dlq.worker.dropped import watch_dropped_messages
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.wiring import guard_of
from celery_dlq.writing import letter as letter_module
from celery_dlq.writing.failure import Failure
from celery_dlq.writing.lifecycle import DeliveryState

FAILED = Failure(End(outcome=Outcome.FAILED, text="no price"), "LookupError", "no price", "File …")


@pytest.fixture
def dlq(tmp_path: Any) -> DeadLetters:
    """The plugin, with one store."""
    conf = {**fresh_conf(), "dlq_queues": {"orders": {"max_deliveries": 1}}}
    app = an_app(**conf, dlq_spool_dir=str(tmp_path), task_default_queue="orders")
    made: DeadLetters = shared(DeadLetters(app))
    return made


@pytest.fixture
def guard(dlq: DeadLetters) -> Guard:
    """The guard of its worker."""
    made: Guard = guard_of(dlq.assembly, hostname="celery@web-1", pid=1, flags_redelivery=True)
    return made


def a_begun(guard: Guard, **info: Any) -> Any:
    """A request that was begun."""
    waited: list[DeliveryState] = []
    request = SimpleNamespace(
        id="t-1",
        task=SimpleNamespace(name="shop.charge", max_retries=3, app=None),
        delivery_info={"exchange": "", "routing_key": "orders", **info},
        request_dict=a_request(id="t-1"),
        message=a_message(),
        dlq_in_flight=None,
        worker_pid=1,
        acknowledged=False,
        dlq_state=DeliveryState.NEW,
        waited=waited,
        dlq_wait_is_over=waited.append,
    )
    guard.count_start(request)
    return request


def errors(dlq: DeadLetters, guard: Guard, operation: str) -> int:
    """Number of errors of its own that the plugin counted."""
    guard.counts.flush(dlq.assembly.backend.metrics.add_counts)
    counts = dlq.assembly.backend.metrics.read_all().counts
    return counts.get((INTERNAL_ERRORS.name, operation), 0)


def failing(times: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """Let something fail as only our own code does, so often."""
    left = [times]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise TypeError("a tuple item must be str, int, float or bytes")
        return act(*args, **kwargs)

    return wrapped


def test_a_letter_that_cannot_be_stored_is_stored_as_plainly_as_it_can_be_made(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message and the reason are worth more than the details of the death."""
    monkeypatch.setattr(
        dlq.assembly.backend.new_letters,
        "dead_letter",
        failing(1, dlq.assembly.backend.new_letters.dead_letter),
    )
    request = a_begun(guard)
    assert guard.decide_end(request, FAILED, requeued=False) is DeliveryState.STORED
    (letter,) = dlq.letters("orders-DLQ")
    assert (letter.task_id, letter.body, letter.traceback) == ("t-1", a_message().body, None)
    assert letter.headers
    assert letter.description == "no price"
    assert errors(dlq, guard, "letter") == 1


def test_a_death_that_cannot_be_described_is_a_letter_all_the_same(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its history and traceback."""
    monkeypatch.setattr(letter_module, "fingerprint", failing(1, letter_module.fingerprint))
    request = a_begun(guard)
    assert guard.decide_end(request, FAILED, requeued=False) is DeliveryState.STORED
    (letter,) = dlq.letters("orders-DLQ")
    assert (letter.task_id, letter.history, letter.exception_type) == ("t-1", (), None)


@pytest.mark.parametrize(
    "hook",
    [
        "before_start",
        "before_end",
        "after_end",
        "before_store",
        "on_error",
        "connected",
        "in_loop",
        "close",
    ],
)
def test_an_observer_that_fails_harms_no_message(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """What a feature does beside a message is never the message's failure."""
    kind = type(next(one for one in guard.observers if one.name == "dead_letter"))
    monkeypatch.setattr(kind, "watching", True)
    monkeypatch.setattr(kind, hook, failing(99, print))
    guard = guard_of(dlq.assembly, hostname="celery@web-2", pid=2, flags_redelivery=True)
    request = a_begun(guard)
    assert guard.verdict_before_start(request) is None
    assert guard.death_at_end(request) is None
    assert guard.decide_end(request, FAILED, requeued=False) is DeliveryState.STORED
    with pytest.raises(LookupError) as raised:
        raise LookupError("no price")
    assert guard.will_dead_letter(
        SimpleNamespace(name="shop.charge", throws=()), request.delivery_info, raised._excinfo
    )
    guard.connected()
    guard.in_loop(SimpleNamespace())
    guard.close()
    (letter,) = dlq.letters("orders-DLQ")
    assert (letter.task_id, letter.body) == ("t-1", a_message().body)
    assert errors(dlq, guard, "dead_letter") >= 1


def test_a_letter_that_cannot_be_stored_waits_as_in_an_outage(
    dlq: DeadLetters,
    guard: Guard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its message is not settled meanwhile; one line says so, however often it is tried."""
    monkeypatch.setattr(
        dlq.assembly.backend.new_letters,
        "dead_letter",
        failing(8, dlq.assembly.backend.new_letters.dead_letter),
    )
    request = a_begun(guard)
    assert guard.decide_end(request, FAILED, requeued=False) is DeliveryState.WAITING_FOR_STORE
    for _ in range(3):  # each tries twice: whole, and without details
        guard.tick()
    assert request.waited == []
    assert [record.levelname for record in caplog.records if "t-1" in record.getMessage()] == [
        "CRITICAL"
    ]
    guard.tick()
    assert request.waited == [DeliveryState.STORED]
    assert [letter.task_id for letter in dlq.letters("orders-DLQ")] == ["t-1"]
    assert errors(dlq, guard, "letter") == 1


def test_a_message_past_its_limit_does_not_run_if_no_letter_can_be_made(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what killed its worker; it waits, and is settled once its letter is stored."""
    worker = Worker(tmp_path)
    worker.start()
    store = worker.dlq.assembly.backend.new_letters.dead_letter
    monkeypatch.setattr(worker.dlq.assembly.backend.new_letters, "dead_letter", failing(2, store))
    request = worker.receive(redelivered=True)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert (worker.said, request.dlq_state) == ([], DeliveryState.WAITING_FOR_STORE)
    worker.guard.tick()
    assert (worker.said, request.dlq_state) == (["letter", "ack"], DeliveryState.STORED)


def test_a_message_whose_count_an_error_of_ours_hides_waits_as_in_an_outage(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what killed its worker. Then what this worker knows decides."""
    worker = Worker(tmp_path)
    worker.start()
    monkeypatch.setattr(worker.guard.counter, "count_delivery", failing(99, print))
    request = worker.receive(redelivered=True)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert (list(worker.later), worker.said) == ([request], [])
    assert worker.counted(INTERNAL_ERRORS) == {("start",): 1}
    monkeypatch.setattr(starts, "OUTAGE_WAIT_SECONDS", -1.0)
    request.execute_using_pool(Pool())
    assert request.dlq_state is DeliveryState.DISPATCHED


def test_an_end_that_cannot_be_decided_is_decided_later(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is it acknowledged, nor is it a letter, before that is known."""
    worker = Worker(tmp_path)
    monkeypatch.setattr(worker.guard, "decide_end", failing(2, worker.guard.decide_end))
    request = worker.start()
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    worker.guard.tick()
    assert (worker.said, request.dlq_state) == ([], DeliveryState.WAITING_FOR_STORE)
    worker.guard.tick()
    assert (worker.said, request.dlq_state) == (["letter", "ack"], DeliveryState.STORED)
    assert worker.counted(INTERNAL_ERRORS) == {("end",): 1}


@pytest.mark.parametrize("requeue", [False, True])
def test_an_end_that_turns_out_to_be_no_death_is_settled_as_by_celery(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, requeue: bool
) -> None:
    """An expected error is acknowledged, and what the task requeues is requeued."""
    worker = Worker(tmp_path)
    worker.task.throws = (KeyError,)
    monkeypatch.setattr(worker.guard, "decide_end", failing(1, worker.guard.decide_end))
    request = worker.start()
    error = Reject("later", requeue=True) if requeue else KeyError("as planned")
    request.on_failure(an_error(error), return_ok=True)
    assert worker.said == []
    worker.guard.tick()
    said = ["reject True"] if requeue else ["ack"]
    assert (worker.said, request.dlq_state) == (said, DeliveryState.DONE)


def test_a_failure_that_cannot_be_described_is_a_letter(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery would acknowledge it."""
    worker = Worker(tmp_path)
    monkeypatch.setattr(request_module, "failure_of", failing(1, print))
    request = worker.start()
    request.on_failure(an_error(ValueError("x")), return_ok=True)
    (letter,) = worker.dlq.letters("orders-DLQ")
    assert (worker.said, letter.description) == (
        ["letter", "ack"],
        "its error could not be described",
    )


def test_a_history_that_cannot_be_read_keeps_no_letter_waiting(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version may have written it: the letter comes without."""
    request = a_begun(guard, redelivered=True)
    monkeypatch.setattr(guard.counter, "history", failing(9, print))
    assert guard.decide_end(request, FAILED, requeued=False) is DeliveryState.STORED
    (letter,) = dlq.letters("orders-DLQ")
    assert [one.number for one in letter.history] == [1]


def test_a_dropped_message_whose_letter_cannot_be_made_waits(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery would acknowledge it, or drop it at the broker."""
    said: list[str] = []
    consumer = SimpleNamespace(
        on_unknown_message=lambda *_: said.append("dropped"),
        on_unknown_task=None,
        on_invalid_task=None,
        on_decode_error=None,
        create_task_handler=None,
        on_close=None,
        blueprint=SimpleNamespace(),
        connection_errors=(),
    )
    watch_dropped_messages(consumer, guard)
    message = a_message(delivery_info={"exchange": "", "routing_key": "orders"})
    monkeypatch.setattr(guard, "decide_dropped", failing(2, guard.decide_dropped))
    consumer.on_unknown_message("no task", message)
    guard.tick()
    assert said == []
    guard.tick()
    assert said == ["dropped"]
    assert len(list(dlq.letters("orders-DLQ"))) == 1


def test_a_letter_that_an_error_of_ours_keeps_waiting_holds_up_no_other(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again, after those behind it."""
    store, down = dlq.assembly.backend.new_letters.dead_letter, [True]

    def dead_letter(letter: Any, key: Any) -> Any:
        if down[0]:
            raise StoreUnavailable("away")
        if letter.task_id == "t-1":
            raise TypeError("odd")
        return store(letter, key)

    monkeypatch.setattr(dlq.assembly.backend.new_letters, "dead_letter", dead_letter)
    requests = []
    for task_id in ("t-1", "t-2"):
        request = a_begun(guard)
        request.dlq_in_flight.key = type(request.dlq_in_flight.key)(
            dead_letter_queue="orders-DLQ", task_id=task_id
        )
        request.request_dict["id"] = task_id
        ended = guard.decide_end(request, FAILED, requeued=False)
        assert ended is DeliveryState.WAITING_FOR_STORE
        requests.append(request)
    down[0] = False
    for _ in range(3):
        guard.tick()
    assert [r.waited for r in requests] == [[], [DeliveryState.STORED]]
    assert [letter.task_id for letter in dlq.letters("orders-DLQ")] == ["t-2"]


def test_a_handler_of_the_log_that_raises_raises_to_nobody(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come between a letter and the acknowledgement of its message."""

    class Raising(logging.Handler):
        """Fails as one that writes to a database does."""

        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("not in this thread")

    raising = Raising()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("celery_dlq").addHandler(raising)
    try:
        worker = Worker(tmp_path)
        request = worker.start()
        request.on_failure(an_error(ValueError("x")), return_ok=True)
    finally:
        logging.getLogger("celery_dlq").removeHandler(raising)
    assert worker.said == ["letter", "ack"]


def test_what_waits_for_long_goes_back_to_its_queue(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ would close the channel: of a death that is undecided, of a start not counted."""
    worker = Worker(tmp_path, gives_back=True)
    monkeypatch.setattr(worker.guard, "decide_end", failing(9, print))
    died = worker.start()
    died.on_failure(an_error(ValueError("x")), return_ok=True)
    monkeypatch.setattr(worker.guard.counter, "count_delivery", failing(9, print))
    put_off = worker.receive(redelivered=True)
    with pytest.raises(TaskRevokedError):
        put_off.execute_using_pool(Pool())
    started: list[Any] = []
    consumer = SimpleNamespace(apply_eta_task=started.append, qos=QoS(print, 0))
    worker.guard.tick()
    worker.guard.start_later(consumer)
    assert (worker.said, started) == ([], [put_off])
    worker.later.append(put_off)
    intervals.change(monkeypatch, consumer_timeout=0.0)
    worker.guard.tick()
    assert (worker.said, died.dlq_state) == (["reject True"], DeliveryState.DONE)
    worker.guard.start_later(consumer)
    assert (worker.said, put_off.dlq_state) == (["reject True"] * 2, DeliveryState.DONE)
    assert started == [put_off]


def test_signs_of_life_that_hang_do_not_hold_up_the_workers_end(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their thread waits for a store that does not answer; it holds nothing, and ends later."""
    guard = Worker(tmp_path).guard
    hangs, answers = threading.Event(), threading.Event()

    def tick() -> None:
        hangs.set()
        answers.wait(20)

    monkeypatch.setattr(guard.life, "tick", tick)
    guard.life.start()
    try:
        assert hangs.wait(5)
        begun = time.monotonic()
        guard.close()
        assert time.monotonic() - begun < 4
        assert not guard.life.ended
    finally:
        answers.set()
    poll(lambda: guard.life.ended)
