"""Queues that a worker does not consume for now, because a hold that takes their messages is full.

Unacknowledged messages would fill the worker's prefetch window, and so block its other queues.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.hold.holding import Held, Holding
from celery_dlq.logs import get_logger
from celery_dlq.store.instructions import Hold

logger = get_logger("celery_dlq.worker")


class GivesBack(Protocol):
    """Celery's request as it is needed here."""

    def dlq_give_back(self) -> None:
        """Return the message to its queue."""


class HeldBack:
    """Messages on their way back to their queues, and the queues that are not consumed."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        # A deque: thread pools add while the timer takes.
        self._requests: deque[tuple[GivesBack, Held]] = deque()
        self._stopped: dict[str, Hold] = {}

    def add(self, request: GivesBack, held: Held) -> None:
        """Keep a message until the next tick, in the thread that may talk to the broker."""
        self._requests.append((request, held))

    def empty(self) -> None:
        """Forget all messages: the connection is lost, and the broker redelivers them."""
        self._requests.clear()

    def tick(self, consumer: Any) -> None:
        """Stop consuming the queues of held messages, and return these; consume others again.

        Called in the consumer's loop: the broker answers there. What fails is done again.
        """
        waiting = list(self._requests)
        for _request, held in waiting:
            if held.queue not in self._stopped:
                self._stop(consumer, held)
        # The last one first: each goes to the head of its queue.
        for one in reversed(waiting):
            one[0].dlq_give_back()
            self._requests.remove(one)
        for queue, hold in list(self._stopped.items()):
            if not waiting and self._has_room(hold):
                consumer.add_task_queue(queue)
                del self._stopped[queue]
                logger.warning("Queue %s is consumed again", queue)

    def _has_room(self, hold: Hold) -> bool:
        try:
            return self._holding.has_room(hold)
        except StoreUnavailable:  # tasks go on, as in any outage
            return True

    def _stop(self, consumer: Any, held: Held) -> None:
        consumer.cancel_task_queue(held.queue)
        self._stopped[held.queue] = held.hold
        logger.error(
            "Queue %s is not consumed until %s has room or ends: it has 100,000 messages, or "
            "the store has no room",
            held.queue,
            held.hold.id,
        )
