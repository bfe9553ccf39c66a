"""Dead-letter exchanges in a worker: each letter has its entry in the outbox first."""

from __future__ import annotations

from celery_dlq.features.exchange.publisher import ExchangeOutbox
from celery_dlq.letters.record import DeadLetter
from celery_dlq.worker.observer import Observer, WorkerParts


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker whose policies name an exchange."""
    outbox = parts.dlq.letter_outbox(parts.backend)
    return None if outbox is None else ExchangeObserver(outbox)


class ExchangeObserver(Observer):
    """Adds the outbox entry of a letter before the letter is stored."""

    def __init__(self, outbox: ExchangeOutbox) -> None:
        self._outbox = outbox

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """Add the entry; if the worker is killed now, it is dropped after ten minutes."""
        self._outbox.add(letter)
        return letter

    def close(self) -> None:
        """Disconnect from the broker, if copies of letters are published there."""
        self._outbox.close()
