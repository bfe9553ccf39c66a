"""What a worker does with the messages of a hold: real requests, a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import TaskRevokedError
from celery.worker import state
from guarded_worker import Pool, Worker
from waiting import poll

from celery_dlq import DeadLetter, Reason
from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.hold import HELD_MESSAGES
from celery_dlq.features.hold.unread import Unread
from celery_dlq.store.holds import Hold
from celery_dlq.store.metrics import DELIVERIES, INTERNAL_ERRORS, STORE_ERRORS
from celery_dlq.writing.lifecycle import DeliveryState


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Celery remembers requests that run, and tasks that are revoked, for the whole process."""
    yield
    state.reset_state()


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """A worker whose queue allows three deliveries."""
    return Worker(tmp_path, max_deliveries=3)


@pytest.mark.parametrize(
    ("pattern", "held", "not_held"),
    [
        ("[bold]", "[bold]", "orders"),
        ("a*b", "a*b", "b"),
        ("a[*]b", "a*b", "a-b"),
        ("shop.*", "shop.eu", "shop"),
    ],
)
def test_a_hold_covers_the_name_itself_and_what_a_pattern_fits(
    pattern: str, held: str, not_held: str
) -> None:
    """A queue of that very name was not known, and could not be held."""
    made = Hold(id="h", queue=pattern)
    assert made.covers("shop.charge", held)
    assert not made.covers("shop.charge", not_held)


def hold(worker: Worker, task: str | None = "shop.charge", **options: Any) -> Hold:
    """Make a hold, and let the worker notice."""
    made = worker.dlq.hold(task, **options)
    worker.guard.tick()
    return made


def dispatch(worker: Worker, **headers: Any) -> Any:
    """Let Celery start a message; whether the pool got it is the request's state."""
    request = worker.receive(**headers)
    try:
        request.execute_using_pool(Pool())
    except TaskRevokedError:
        assert request.dlq_state is not DeliveryState.DISPATCHED
    return request


def held(worker: Worker, one: Hold) -> list[DeadLetter]:
    """The messages of a hold, oldest first."""
    store = worker.dlq.assembly.backend.held
    return [found.letter for found in store.letters(one.id, newest_first=False)]


def test_a_held_message_is_acknowledged_and_nothing_else(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No letter, no count, no result; the message is in the queue of the hold."""
    results: list[Any] = []
    monkeypatch.setattr(worker.task.backend, "store_result", lambda *a, **_: results.append(a))
    one = hold(worker, reason="gateway down")
    request = dispatch(worker)
    assert (worker.said, request.dlq_state) == (["ack"], DeliveryState.DONE)
    (kept,) = held(worker, one)
    assert (kept.task_id, kept.source_queue, kept.reason) == (worker.id, "orders", Reason.HELD)
    assert (kept.description, kept.deliveries) == ("gateway down", 0)
    assert worker.counted(HELD_MESSAGES) == {("orders",): 1}
    assert worker.counted(DELIVERIES) == {}
    assert results == []
    assert worker.dlq.queues() == []


def test_a_copy_of_a_held_message_is_held_once(worker: Worker) -> None:
    """A worker was killed between storing and acknowledging: the message comes back."""
    one = hold(worker)
    for redelivered in (False, True):
        dispatch(worker, redelivered=redelivered)
    assert worker.said == ["ack", "ack"]
    assert len(held(worker, one)) == 1


@pytest.mark.parametrize(
    ("task", "options", "taken"),
    [
        ("shop.*", {}, True),
        ("shop.refund", {}, False),
        (None, {"queue": "orders"}, True),
        ("shop.charge", {"queue": "mail*"}, False),
        ("shop.charge", {"conditions": ["kwargs.tenant=42"]}, True),
        ("shop.charge", {"conditions": ["kwargs.tenant=7"]}, False),
        ("shop.charge", {"conditions": ["kwargs.tenant=42", "args[0]=8"]}, False),
    ],
)
def test_a_hold_takes_what_matches_all_of_it(
    worker: Worker, task: str | None, options: dict[str, Any], taken: bool
) -> None:
    """Task, queue and conditions; the rest runs."""
    worker.app.amqp.queues.add("mail-a")

    @worker.app.task(name="shop.refund", shared=False)
    def refund() -> None:
        """Is another task."""

    hold(worker, task, **options)
    request = worker.receive()
    request.message.body = b'[[7], {"tenant": 42}, {}]'
    if taken:
        with pytest.raises(TaskRevokedError):
            request.execute_using_pool(Pool())
    else:
        request.execute_using_pool(Pool())
    assert (request.dlq_state is DeliveryState.DISPATCHED) is not taken


def test_a_message_that_a_hold_has_released_is_not_taken_by_it_again(worker: Worker) -> None:
    """A worker that has not noticed the end would hold it again; another hold may."""
    one = hold(worker)
    assert dispatch(worker, dlq_hold=one.id).dlq_state is DeliveryState.DISPATCHED
    assert dispatch(worker, dlq_hold="hold-of-before").dlq_state is DeliveryState.DONE


def test_a_released_message_starts_no_more_often_than_its_limit(tmp_path: Any) -> None:
    """A broker does not flag it as redelivered, so the worker waits for its count."""
    worker = Worker(tmp_path, max_deliveries=1)
    worker.start()
    request = dispatch(worker, dlq_hold="hold-of-before")
    assert request.dlq_state is DeliveryState.STORED
    assert worker.said[-2:] == ["letter", "ack"]


def test_a_hold_ends_by_itself(worker: Worker) -> None:
    """By the store's clock; the worker knows which holds have ended."""
    one = hold(worker, span=timedelta(hours=1))
    worker.observer("hold").instructed([one], one.since + timedelta(hours=1))
    assert dispatch(worker).dlq_state is DeliveryState.DISPATCHED
    assert worker.observer("hold").ended == (one,)


def test_while_the_store_is_away_its_messages_run(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage of ours stops nobody's tasks; each is in the log."""
    hold(worker)
    store = worker.dlq.assembly.backend.new_held

    def away(*_: Any) -> Any:
        raise StoreUnavailable("away")

    store.dead_letter = away  # type: ignore[method-assign]
    assert dispatch(worker).dlq_state is DeliveryState.DISPATCHED
    assert worker.counted(STORE_ERRORS) == {("hold",): 1}
    assert f"Task {worker.id} runs, because" in caplog.text


def test_an_error_of_our_own_lets_the_message_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged and counted, and neither holds nor acknowledges."""
    hold(worker)
    monkeypatch.setattr(worker.observer("hold"), "before_start", lambda _: 1 / 0)
    assert dispatch(worker).dlq_state is DeliveryState.DISPATCHED
    assert worker.said == []
    assert worker.counted(INTERNAL_ERRORS) == {("hold",): 1}


def test_a_revoked_task_is_revoked_and_not_held(worker: Worker) -> None:
    """Who revoked it does not want it later."""
    one = hold(worker)
    state.revoked.add(worker.id)
    dispatch(worker)
    assert worker.said == ["ack"]
    assert held(worker, one) == []


class Consumer:
    """What is told to Celery's consumer."""

    def __init__(self, said: list[str]) -> None:
        self.cancel_task_queue: Callable[[str], None] = lambda queue: said.append(f"stop {queue}")
        self.add_task_queue: Callable[[str], None] = lambda queue: said.append(f"consume {queue}")


def test_when_a_hold_is_full_its_queue_is_not_consumed_until_there_is_room(
    worker: Worker,
) -> None:
    """The message goes back first; it neither runs nor fills the prefetch window."""
    one = hold(worker)
    holding, consumer = worker.observer("hold"), Consumer(worker.said)
    holding.most = 0
    back = worker.observer("hold")
    request = dispatch(worker)
    assert (worker.said, request.dlq_state) == ([], DeliveryState.NEW)
    back.in_loop(consumer)
    back.in_loop(consumer)
    assert worker.said == ["stop orders", "reject True"]
    assert held(worker, one) == []
    holding.most = 1
    holding.lengths.clear()
    back.in_loop(consumer)
    back.in_loop(consumer)
    assert worker.said == ["stop orders", "reject True", "consume orders"]


@pytest.mark.parametrize("call", ["cancel_task_queue", "add_task_queue"])
def test_what_the_broker_did_not_take_is_done_at_the_next_tick(worker: Worker, call: str) -> None:
    """A queue that was said to be consumed again, and is not, would wait for ever."""
    one = hold(worker)
    holding, consumer = worker.observer("hold"), Consumer(worker.said)
    holding.most = 0
    back, works = worker.observer("hold"), getattr(consumer, call)
    dispatch(worker)
    if call == "add_task_queue":
        back.in_loop(consumer)
        holding.instructed([], one.since)
    setattr(consumer, call, Mock(side_effect=ConnectionError("lost")))
    with pytest.raises(ConnectionError):
        back.in_loop(consumer)
    setattr(consumer, call, works)
    back.in_loop(consumer)
    holding.instructed([], one.since)
    back.in_loop(consumer)
    assert worker.said == ["stop orders", "reject True", "consume orders"]


def test_a_message_that_cannot_be_returned_is_returned_at_the_next_tick(worker: Worker) -> None:
    """Its lease is renewed for as long as this worker lives, so nobody else would have it."""
    hold(worker)
    worker.observer("hold").most = 0
    back, consumer = worker.observer("hold"), Consumer(worker.said)
    request = dispatch(worker)
    qos = request.message.channel = Mock()
    qos.qos.put_first.side_effect = [ConnectionError("full"), True]
    with pytest.raises(ConnectionError):
        back.in_loop(consumer)
    assert request.dlq_state is DeliveryState.NEW
    back.in_loop(consumer)
    assert request.dlq_state is DeliveryState.DONE
    assert (request.acknowledged, worker.said) == (True, ["stop orders"])


def test_a_queue_is_consumed_again_once_its_full_hold_has_ended(worker: Worker) -> None:
    """Also if nothing was released."""
    one = hold(worker)
    holding, consumer = worker.observer("hold"), Consumer(worker.said)
    holding.most = 0
    back = worker.observer("hold")
    dispatch(worker)
    back.in_loop(consumer)
    holding.instructed([], one.since)
    back.in_loop(consumer)
    assert worker.said == ["stop orders", "reject True", "consume orders"]


def test_a_hold_of_another_broker_is_ignored(worker: Worker) -> None:
    """Two apps may share a store; a release would send the message to the wrong one."""
    one = hold(worker)
    worker.observer("hold").instructed([replace(one, broker="amqp /other")], one.since)
    assert dispatch(worker).dlq_state is DeliveryState.DISPATCHED


def test_a_message_that_cannot_be_read_runs_and_is_counted_once(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread pool asks before it queues the task and when it starts; another hold is another."""
    first = hold(worker, conditions=["kwargs.tenant=42"])
    hold(worker, conditions=["headers.x-tenant=7", "args[0]=1"])  # readable, and does not match
    request = worker.receive()
    request.message.body = b"\x80\x04N."
    for _ in range(2):
        assert worker.guard.verdict_before_start(request) is None
    other = worker.receive()
    other.message.body = b"\x80\x04N."
    assert worker.guard.verdict_before_start(other) is None
    worker.guard.tick()
    poll(lambda: {one.hold.id: one.unread for one in worker.dlq.holds()}[first.id] == 2)
    assert sum(one.unread for one in worker.dlq.holds()) == 2
    assert caplog.text.count("its arguments cannot be read") == 1


def test_the_count_of_a_hold_that_is_gone_is_forgotten(worker: Worker) -> None:
    """Nobody asks for it again."""
    one = hold(worker, conditions=["kwargs.tenant=42"])
    counts = worker.dlq.assembly.backend.part(Unread)
    counts.add_message(one.id)
    counts.add_message("hold-of-before")
    counts.send_counts()
    poll(lambda: counts.counts_by_hold() == {one.id: 1, "hold-of-before": 1})
    hold(worker)  # tidies
    assert counts.counts_by_hold() == {one.id: 1}
