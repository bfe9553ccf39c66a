"""Messages that wait after a crash: in the consumer's timer, beside the prefetch window."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import VERSION
from celery.worker import consumer as celerys
from celery.worker import state
from kombu import Queue
from kombu.asynchronous.timer import Timer
from kombu.common import QoS

from celery_dlq.worker.delayed import Delayed
from celery_dlq.worker.guard import start_again
from celery_dlq.writing.lifecycle import DeliveryState


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Celery remembers requests for the whole process."""
    yield
    state.reset_state()


class Request:
    """A request that waits."""

    def __init__(self, task_id: str, queue: str = "orders") -> None:
        self.id = task_id
        self.dlq_state = DeliveryState.NEW
        self.dlq_in_flight = SimpleNamespace(resolved=SimpleNamespace(queue=queue))


class Consumer:
    """A consumer with a real timer and a real prefetch count."""

    queue_arguments: dict[str, str] | None = None
    apply_eta_task = celerys.Consumer.apply_eta_task

    def __init__(self, prefetch: int = 4, most: int | None = None) -> None:
        self.timer = Timer()
        self.qos = QoS(lambda **_: None, prefetch)
        self.qos.max_prefetch = most
        self.started: list[str] = []
        self.said: list[str] = []
        queues = {"mails": Queue("mails"), "orders": Queue("orders")}
        queues["orders"].queue_arguments = self.queue_arguments
        self.app = SimpleNamespace(amqp=SimpleNamespace(queues=queues))
        self.connection = SimpleNamespace(transport=SimpleNamespace(driver_type="amqp"))

    def on_task_request(self, request: Any) -> None:
        self.started.append(request.id)

    def cancel_task_queue(self, queue: str) -> None:
        self.said.append(f"cancel {queue}")

    def add_task_queue(self, queue: str) -> None:
        self.said.append(f"consume {queue}")

    def fire(self) -> None:
        """Let all that waits be due."""
        for waiting in sorted(self.timer.queue):
            if not waiting.entry.canceled:
                waiting.entry()
        self.timer.clear()


@pytest.fixture
def quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefetch count of a consumer is fixed, since Celery 5.5."""
    if VERSION < (5, 5):
        pytest.skip("Celery 5.4 raises it also with quorum queues")
    monkeypatch.setattr(Consumer, "queue_arguments", {"x-queue-type": "quorum"})


def waiting(consumer: Consumer, *requests: Any) -> Delayed:
    """Let requests wait."""
    delayed = Delayed(start_again)
    for request in requests:
        state.task_reserved(request)
        delayed.delay(30, request)
    delayed.give_to_timer(consumer)
    return delayed


def test_one_that_waits_takes_no_place_and_starts_once() -> None:
    """Neither of the prefetch count, nor of those that Celery calls reserved."""
    consumer, request = Consumer(), Request("a")
    delayed = waiting(consumer, request)
    delayed.give_to_timer(consumer)
    assert (consumer.qos.value, len(delayed), consumer.started) == (5, 1, [])
    assert request not in state.reserved_requests
    consumer.fire()
    assert (consumer.qos.value, len(delayed), consumer.started) == (4, 0, ["a"])
    assert request in state.reserved_requests


@pytest.mark.parametrize(("prefetch", "most"), [(4, 4), (0, None)])
def test_a_prefetch_count_that_did_not_rise_does_not_fall(prefetch: int, most: int | None) -> None:
    """It is without limit, or Celery's `worker_eta_task_limit` is reached."""
    consumer = Consumer(prefetch, most)
    waiting(consumer, Request("a"), Request("b"))
    consumer.fire()
    start_again(consumer, Request("c"))
    assert (consumer.qos.value, sorted(consumer.started)) == (prefetch, ["a", "b", "c"])


def test_what_died_while_it_waited_does_not_start() -> None:
    """An operator wanted it dead-lettered, and freed its place in the prefetch count."""
    consumer, request = Consumer(), Request("a")
    delayed = waiting(consumer, request)
    (entry,) = (one.entry for one in consumer.timer.queue)
    request.dlq_state = DeliveryState.STORED
    entry.cancel()
    delayed.give_to_timer(consumer)
    assert len(delayed) == 0
    late = Request("b")
    waiting(consumer, late)
    late.dlq_state = DeliveryState.DONE
    consumer.fire()
    assert consumer.started == []


def test_a_lost_connection_ends_the_wait() -> None:
    """The broker redelivers the message; it would start twice."""
    consumer = Consumer()
    delayed = waiting(consumer, Request("a"))
    delayed.delay(30, Request("b"))  # type: ignore[arg-type]
    delayed.forget_all()
    delayed.give_to_timer(consumer)
    consumer.fire()
    assert (len(delayed), consumer.started) == (0, [])


@pytest.mark.usefixtures("quorum")
def test_a_quorum_queue_is_consumed_anew_when_half_of_its_places_are_taken() -> None:
    """Only then, only once for each, and not one whose places are free."""
    consumer = Consumer(4)
    delayed = waiting(consumer, Request("a"), Request("m", "mails"))
    assert consumer.said == []
    delayed.delay(30, Request("b"))  # type: ignore[arg-type]
    for _ in range(2):
        delayed.give_to_timer(consumer)
    assert consumer.said == ["cancel orders", "consume orders"]
