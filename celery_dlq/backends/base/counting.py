"""How deliveries are counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery_dlq.record import Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKey:
    """What makes one message of a task: ``Task.retry()`` re-uses the task id.

    Attributes:
        dead_letter_queue: Where its letter would go; counters live beside the letters.
        task_id: The task's id.
        retries: The message's ``retries`` header.
        redrives: How often the message was redriven.
        nesting: How often ``Task.replace`` gave the id to another task before.
    """

    dead_letter_queue: str
    task_id: str
    retries: int = 0
    redrives: int = 0
    nesting: int = 0


class CountStatus(Enum):
    """What counting a delivery found."""

    COUNTED = "counted"
    LIMIT_REACHED = "limit_reached"  # nothing was counted
    RUNNING = "running"  # an earlier delivery runs on a live worker; nothing was counted
    UNCERTAIN = "uncertain"  # its worker may have died this moment; nothing was counted
    SUSPECT = "suspect"  # its last delivery vanished, and it must not run now; nothing was counted
    DEAD = "dead"  # its letter was stored before; nothing was counted


@dataclass(frozen=True, slots=True)
class Count:
    """The answer to a count.

    Attributes:
        status: What was found.
        number: The number of this delivery, or of the last one counted.
        suspect: The message's last delivery vanished: it may have killed its worker.
    """

    status: CountStatus
    number: int
    suspect: bool = field(default=False, compare=False)


class DeliveryCounter(Protocol):
    """Counts the deliveries of messages and remembers how each ended."""

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Count a delivery without waiting for the store's answer.

        Returns:
            Whether the mark is on the wire. What the store says to it is logged later.
        """

    def count(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        uncounted: int = 0,
        waited_seconds: float | None = None,
        alone: bool = True,
        unless_dead: bool = False,
    ) -> Count:
        """Count a delivery and wait for the answer.

        Args:
            key: The message.
            delivery: The start; its ``number`` is not looked at.
            limit: Most deliveries; at the limit nothing is counted.
            uncounted: Deliveries that could not be counted before, and are now.
            waited_seconds: How long ago this delivery was first put off; ``None`` if never.
            alone: Whether a message whose last delivery vanished may be counted now.
            unless_dead: Count only if its letter was not stored before. Not for new messages
                that re-use a task id.

        Raises:
            StoreUnavailable: The store does not answer.
        """

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record how a delivery ended; with ``charged=False`` it no longer counts.

        A delivery without an outcome that is not charged never started: nothing is kept of it.
        Changes nothing if the start of this delivery is not on record. Never raises.
        """

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Forget a message that is done; may be put off to the next write.

        Another message that runs under the same task id keeps its count.

        Args:
            key: The message.
            delivery: Its last one.
            first: It was never delivered before, so earlier starts are another message's.
        """

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count that a message of a redrive succeeded; may be put off to the next write."""

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """All recorded deliveries of the task of this message, over its retries, oldest first.

        Raises:
            StoreUnavailable: The store does not answer.
        """

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
        """Send a heartbeat beside the counters of these queues; never raises."""

    def flush(self) -> None:
        """Send what was put off and read outstanding answers; never raises."""

    def close(self) -> None:
        """Flush and let go of connections; never raises."""
