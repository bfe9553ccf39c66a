"""Letters that are still to be published to a dead-letter exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from celery_dlq.letters.record import DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A letter that is still to be published to a dead-letter exchange."""

    letter_id: str  # The letter's id
    exchange: str  # The name of the exchange
    routing_key: str  # The routing key to publish with
    tries: int = 0  # How often it was published without a confirmation


class Outbox(Protocol):
    """Keeps entries until they are published. Every method may raise `StoreUnavailable`."""

    def add(
        self, dead_letter_queue: str, entry: OutboxEntry, *, after_seconds: float = 0.0
    ) -> None:
        """Add an entry, due after so long; an equal entry that is there is due then, too."""

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Return at most ``most`` due entries; they are due again after ``lease_seconds``."""

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Remove entries: they are published."""

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those of the given queues that have entries."""

    def waiting(self, dead_letter_queue: str) -> int:
        """Return the number of entries of a queue."""


class LetterOutbox(Protocol):
    """Adds a letter to the outbox of the exchange that its policy names."""

    def add(self, letter: DeadLetter) -> None:
        """Add the letter if its policy names an exchange.

        Called before the letter is stored: if the process is killed in between, the exchange
        still gets the letter.
        """

    def close(self) -> None:
        """Disconnect; never raises."""
