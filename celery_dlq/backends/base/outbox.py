"""What dead-letter exchanges must still get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from celery_dlq.record import DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A letter that a dead-letter exchange must still get.

    Attributes:
        letter_id: The letter.
        exchange: The name of the exchange.
        routing_key: For the exchange.
    """

    letter_id: str
    exchange: str
    routing_key: str


class Outbox(Protocol):
    """Keeps entries until they are published. Every method may raise `StoreUnavailable`."""

    def add(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Keep a entry, due at once; the same one twice is one."""

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Notices that nobody tried to publish in the last ``lease_seconds``; tried now."""

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Forget entries: they are published."""

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those of some queues that have entries."""

    def waiting(self, dead_letter_queue: str) -> int:
        """How many entries are kept."""


class LetterOutbox(Protocol):
    """Keeps for a dead-letter exchange what it must get of a letter."""

    def add(self, letter: DeadLetter) -> None:
        """Keep it, if the letter's policy names an exchange. Called before the letter is stored.

        So whatever is killed between the two, the exchange still gets the letter.

        Raises:
            StoreUnavailable: The store does not answer.
        """
