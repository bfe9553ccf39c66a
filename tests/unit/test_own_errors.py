"""Errors of the plugin itself: logged, counted, and no message waits forever."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from builders import a_message, a_request, an_app
from fresh import fresh_conf, shared
from guarded_worker import Pool, Worker

from celery_dlq import DeadLetters
from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.record import Outcome
from celery_dlq.policies.decisions import End
from celery_dlq.store.metrics import INTERNAL_ERRORS
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
    guard.begin(request)
    return request


def errors(dlq: DeadLetters, guard: Guard, operation: str) -> int:
    """Number of errors of its own that the plugin counted."""
    guard.counts.flush(dlq.assembly.backend.metrics.add)
    counts = dlq.assembly.backend.metrics.read().counts
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
    monkeypatch.setattr(dlq.store, "dead_letter", failing(1, dlq.store.dead_letter))
    request = a_begun(guard)
    assert guard.end(request, FAILED, requeued=False) is DeliveryState.STORED
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
    assert guard.end(request, FAILED, requeued=False) is DeliveryState.STORED
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
    assert guard.stops(request) is None
    assert guard.death_at_end(request) is None
    assert guard.end(request, FAILED, requeued=False) is DeliveryState.STORED
    with pytest.raises(LookupError) as raised:
        raise LookupError("no price")
    assert guard.keeps(
        SimpleNamespace(name="shop.charge", throws=()), request.delivery_info, raised._excinfo
    )
    guard.connected()
    guard.in_loop(SimpleNamespace())
    guard.close()
    (letter,) = dlq.letters("orders-DLQ")
    assert (letter.task_id, letter.body) == ("t-1", a_message().body)
    assert errors(dlq, guard, "dead_letter") >= 1


def test_a_message_whose_letter_cannot_be_made_at_all_is_left_to_celery(
    dlq: DeadLetters,
    guard: Guard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It does not stay unacknowledged for the life of its worker."""
    monkeypatch.setattr(dlq.store, "dead_letter", failing(99, dlq.store.dead_letter))
    request = a_begun(guard)
    assert guard.end(request, FAILED, requeued=False) is DeliveryState.DONE
    assert "is left to Celery, without a letter" in caplog.text
    assert errors(dlq, guard, "letter") == 2


def test_a_message_past_its_limit_is_run_by_celery_if_no_letter_can_be_made(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is neither lost nor kept back forever, and it is logged."""
    worker = Worker(tmp_path)
    worker.start()
    monkeypatch.setattr(worker.dlq.store, "dead_letter", failing(99, worker.dlq.store.dead_letter))
    request = worker.receive(redelivered=True)
    request.execute_using_pool(Pool())
    assert request.dlq_state is DeliveryState.DISPATCHED
    assert worker.said == []
    assert "is executed once more" in caplog.text


def test_a_letter_that_waits_and_then_cannot_be_stored_holds_up_no_other(
    dlq: DeadLetters, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is let go after two tries, and the next one is stored."""
    store, down = dlq.store.dead_letter, [True]

    def dead_letter(letter: Any, key: Any) -> Any:
        if down[0]:
            raise StoreUnavailable("away")
        if letter.task_id == "t-1":
            raise TypeError("odd")
        return store(letter, key)

    monkeypatch.setattr(dlq.store, "dead_letter", dead_letter)
    requests = []
    for task_id in ("t-1", "t-2"):
        request = a_begun(guard)
        request.dlq_in_flight.key = type(request.dlq_in_flight.key)(
            dead_letter_queue="orders-DLQ", task_id=task_id
        )
        request.request_dict["id"] = task_id
        ended = guard.end(request, FAILED, requeued=False)
        assert ended is DeliveryState.WAITING_FOR_STORE
        requests.append(request)
    down[0] = False
    guard.tick()
    assert [r.waited for r in requests] == [[DeliveryState.DONE], [DeliveryState.STORED]]
    assert [letter.task_id for letter in dlq.letters("orders-DLQ")] == ["t-2"]
