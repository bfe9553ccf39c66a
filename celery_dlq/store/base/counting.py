"""Counting deliveries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery_dlq.letters.record import Delivery, letter_id


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKey:
    """Identifies one message; the task id alone does not, since ``Task.retry()`` re-uses it."""

    dead_letter_queue: str  # Where its letter would go; counters are kept beside the letters
    task_id: str  # The task's id
    retries: int = 0  # The message's `retries` header
    redrives: int = 0  # Number of times the message was redriven
    nesting: int = 0  # Number of times `Task.replace` passed the id on before

    @property
    def letter_id(self) -> str:
        """The id of its letter; see `celery_dlq.letters.record.letter_id`."""
        return letter_id(
            self.dead_letter_queue, self.task_id, self.retries, self.redrives, self.nesting
        )


class CountStatus(Enum):
    """Result of counting a delivery; only with ``COUNTED`` was it counted."""

    COUNTED = "counted"
    LIMIT_REACHED = "limit_reached"  # the limit of deliveries was reached before
    RUNNING = "running"  # an earlier delivery runs on a live worker
    UNCERTAIN = "uncertain"  # the worker of an earlier delivery may just have died; ask again
    SUSPECT = "suspect"  # its last delivery vanished, and ``alone`` was false
    DEAD = "dead"  # its letter was stored before


@dataclass(frozen=True, slots=True)
class Count:
    """Reply to `DeliveryCounter.count`."""

    status: CountStatus  # The result
    number: int  # The number of this delivery, or of the last one counted
    # True if the last delivery vanished: it may have killed its worker
    suspect: bool = field(default=False, compare=False)


class DeliveryCounter(Protocol):
    """Counts the deliveries of messages and records how each ended."""

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Count a first delivery without waiting for the store. Never raises."""

    def count(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        known: int = 0,
        here: bool = False,
        waited_seconds: float | None = None,
        alone: bool = True,
        unless_dead: bool = False,
    ) -> Count:
        """Count a delivery and wait for the reply."""

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record how a delivery ended; with ``charged=False`` take its count back.

        An uncharged delivery without an outcome never started: no record of it is kept.
        A start that is not on record, and was charged, is recorded now, unless the message was
        retried or is dead: nobody will ask for it again. Never raises.
        """

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Delete the counts of a message that is done; may be postponed until `flush`.

        Another message that runs under the same task id keeps its count. Never raises.
        """

    def forget(self, key: MessageKey) -> None:
        """Delete the counts of the task over all its retries. Never raises."""

    def died(self, key: MessageKey) -> None:
        """Delete the counts of the task and record that this message is dead. Never raises.

        For a message whose letter is in another dead-letter queue than its counts.
        """

    def is_dead(self, key: MessageKey) -> bool:
        """True if a letter of this message was stored beside these counts, not long ago."""

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count a success for a redrive; may be postponed until `flush`. Never raises."""

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """Return all recorded deliveries of the task, over its retries, oldest first."""

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
        """Record with the next `flush` that this worker is alive, for the counters of these queues.

        Never raises.
        """

    def flush(self) -> None:
        """Send postponed writes and check that the store accepts them. Never raises."""

    def close(self) -> None:
        """Flush and close the connection. Never raises."""
