"""Messages that wait after a crash, in a worker, as Celery's own wait for their ETA.

They are unacknowledged, so a shutdown, a kill or a lost connection gives them back. While one waits
the prefetch count is one higher, so it takes no healthy message's place. Where the count of a
consumer is fixed (quorum queues), the queue is consumed anew: what the former consumer has does not
count any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import VERSION
from celery.worker import state

from celery_dlq.letters.printable import get_logger
from celery_dlq.writing.lifecycle import DeliveryState, GuardedRequest

logger = get_logger("celery_dlq.worker")

_PRIORITY = 6  # in the timer, as Celery's own


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message in the timer."""

    queue: str
    timer: Any
    entry: Any = None
    takes_place: bool = True  # in the prefetch window of a consumer whose count is fixed


class Delayed:
    """The messages of one worker that wait."""

    def __init__(self, start_again: Callable[[Any, Any], None]) -> None:
        self._start_again = start_again  # lets the consumer apply a request
        # Those that the timer does not have yet. A deque: thread pools add while the loop takes
        self._new: deque[tuple[float, GuardedRequest]] = deque()
        self._waiting: set[_Waiting] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._waiting)

    def delay(self, seconds: float, request: GuardedRequest) -> None:
        """Let a message wait; the loop gives it to the timer within a second."""
        self._new.append((time.monotonic() + seconds, request))
        logger.info(
            "Task %s starts again in %.0f s: its last delivery crashed (crash_delay)",
            request.id,
            seconds,
        )

    def give_to_timer(self, consumer: Any) -> None:
        """Give the new ones to the consumer's timer; called in its loop, once a second."""
        for one in list(self._waiting):  # an operator may have wanted it dead
            if getattr(one.entry, "canceled", False):
                self._waiting.discard(one)
        while self._new:
            due, request = self._new[0]
            self._schedule(consumer, request, max(0.0, due - time.monotonic()))
            self._new.popleft()
        if self._waiting and not raises_prefetch(consumer):
            self._free_places(consumer)

    def forget_all(self) -> None:
        """Forget all: the broker redelivers them."""
        self._new.clear()
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            one.timer.cancel(one.entry)

    def _schedule(self, consumer: Any, request: GuardedRequest, seconds: float) -> None:
        in_flight = request.dlq_in_flight
        one = _Waiting(in_flight.resolved.queue if in_flight else "", consumer.timer)
        before = consumer.qos.value
        raised = consumer.qos.increment_eventually() > before  # `worker_eta_task_limit` may forbid

        def start(request: Any) -> None:
            self._waiting.discard(one)
            if raised:
                consumer.qos.decrement_eventually()
            if request.dlq_state is DeliveryState.NEW:
                self._start_again(consumer, request)

        # It is no reserved one any more: with `worker_disable_prefetch`, Celery counts these.
        state.task_ready(request)
        self._waiting.add(one)
        one.entry = consumer.timer.call_after(seconds, start, (request,), priority=_PRIORITY)

    def _free_places(self, consumer: Any) -> None:
        """Consume a queue anew when those that wait have half of its places."""
        queues: dict[str, list[_Waiting]] = {}
        for one in list(self._waiting):
            if one.takes_place:
                queues.setdefault(one.queue, []).append(one)
        for queue, taken in queues.items():
            if 0 < consumer.qos.value - len(self._waiting) <= 2 * len(taken):
                consumer.cancel_task_queue(queue)
                consumer.add_task_queue(queue)
                for one in taken:
                    one.takes_place = False


def raises_prefetch(consumer: Any) -> bool:
    """False if the prefetch count of a consumer is fixed: since Celery 5.5, with a quorum queue.

    Source: https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/rabbitmq.html
    """
    if VERSION < (5, 5) or consumer.connection.transport.driver_type != "amqp":
        return True
    queues = consumer.app.amqp.queues.values()
    return all((one.queue_arguments or {}).get("x-queue-type") != "quorum" for one in queues)
