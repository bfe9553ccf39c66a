"""Takes messages that a broker dead-lettered itself, and stores them as letters.

The letter first, the acknowledgement second: killed in between, the message comes back
and finds its letter there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu.utils.functional import LRUCache

from celery_dlq.adopt.letter import Adoption, Identity
from celery_dlq.adopt.sources import Source, TakenMessage
from celery_dlq.backends.base import Clock, DeadLetterStore, LetterOutbox, Stored
from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger
from celery_dlq.record import DeadLetter

logger = get_logger("celery_dlq.worker")

IDLE_SECONDS = 1.0
MAX_REST_SECONDS = 30.0
LETTERS_PER_ROUND = 200
MAX_TWINS = 10_000


@dataclass(slots=True)
class AdoptReport:
    """What adopting did.

    Attributes:
        queue: The queue that was emptied.
        adopted: New letters.
        known: Messages whose letter was there already; removed from the queue only.
        by_queue: New letters by dead-letter queue.
    """

    queue: str
    adopted: int = 0
    known: int = 0
    by_queue: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {
            "queue": self.queue,
            "adopted": self.adopted,
            "known": self.known,
            "by_queue": dict(sorted(self.by_queue.items())),
        }


class Adopter:
    """Adopts the messages of one queue.

    Args:
        queue: Its name.
        source: Gives its messages.
        adoption: Makes their letters.
        store: Where letters go.
        outbox: Keeps what a dead-letter exchange must get of them; ``None`` if there is none.
        clock: The present, aware UTC.
        adopted: Told of every new letter.
    """

    def __init__(
        self,
        queue: str,
        source: Source,
        adoption: Adoption,
        store: DeadLetterStore,
        outbox: LetterOutbox | None,
        clock: Clock,
        adopted: Callable[[DeadLetter], None],
    ) -> None:
        self.report = AdoptReport(queue)
        self._source = source
        self._adoption = adoption
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._adopted = adopted
        self._twins: MutableMapping[str, int] = LRUCache(MAX_TWINS)  # type: ignore[no-untyped-call]

    def drain(self, most: int | None = None) -> int:
        """Adopt until the queue is empty, or ``most`` messages were adopted.

        Returns:
            How many messages left the queue.

        Raises:
            NotFound: There is no such queue.
            BrokerUnavailable: The broker does not answer.
            StoreUnavailable: The store does not; the message stays in its queue.
        """
        count = 0
        while most is None or count < most:
            found = self._source.take()
            if found is None:
                break
            self._adopt(found)
            self._source.let_go(found)
            count += 1
        return count

    def close(self) -> None:
        """Let go of the connection; the next `drain` connects again. Never raises."""
        self._source.close()

    def _adopt(self, found: TakenMessage) -> None:
        identity = self._adoption.identity(found.message)
        number = 0 if identity.certain else self._twins.get(identity.task_id, 0)
        if number and not found.fresh:
            number -= 1  # the last that was stored may be this one
        while not self._stored(found, identity.numbered(number)):
            if identity.certain or not found.fresh:
                self.report.known += 1
                return
            # Never delivered before, so that letter is of another message with equal content.
            number += 1
        if not identity.certain:
            self._remember(identity, number + 1)

    def _stored(self, found: TakenMessage, identity: Identity) -> bool:
        letter, key = self._adoption.letter(found.message, identity, self._clock())
        if self._outbox is not None:
            self._outbox.add(letter)
        if self._store.dead_letter(letter, key) is not Stored.NEW:
            return False
        self.report.adopted += 1
        self.report.by_queue[letter.dead_letter_queue] += 1
        logger.info(
            "Message %s adopted into %s: %s",
            letter.task_id,
            letter.dead_letter_queue,
            letter.description,
        )
        self._adopted(letter)
        return True

    def _remember(self, identity: Identity, number: int) -> None:
        """Where to look for the next equal message; bounded."""
        self._twins[identity.task_id] = number


def follow(adopters: Sequence[Adopter], stop: threading.Event) -> None:
    """Adopt for ever: what a queue, the broker or the store refuses is logged and tried again.

    Args:
        adopters: One a queue; they take turns.
        stop: Ends it.
    """
    rests = [_Rest() for _ in adopters]
    while not stop.is_set():
        busy = False
        for adopter, rest in zip(adopters, rests, strict=True):
            busy |= _turn(adopter, rest)
        if not busy:
            stop.wait(IDLE_SECONDS)
    for adopter in adopters:
        adopter.close()


class _Rest:
    """Leaves a queue alone for a while after a failure; longer after each one in a row."""

    def __init__(self) -> None:
        self._turns_left = 0
        self._length = 1

    def over(self) -> bool:
        """Whether it is time for a try; to be asked once a turn."""
        self._turns_left = max(0, self._turns_left - 1)
        return self._turns_left == 0

    def failed(self) -> None:
        """Rest."""
        self._turns_left = self._length
        self._length = min(2 * self._length, int(MAX_REST_SECONDS / IDLE_SECONDS))

    def worked(self) -> None:
        """No more rest."""
        self._length = 1


def _turn(adopter: Adopter, rest: _Rest) -> bool:
    """A bounded round; whether there may be more to do at once."""
    if not rest.over():
        return False
    try:
        count = adopter.drain(LETTERS_PER_ROUND)
    except DLQError as exc:
        logger.error("Nothing is adopted from %s for now: %s", adopter.report.queue, exc)  # noqa: TRY400 - the line says it all
    except Exception:
        logger.exception("Nothing is adopted from %s for now", adopter.report.queue)
    else:
        rest.worked()
        return count == LETTERS_PER_ROUND
    rest.failed()
    adopter.close()  # what was taken goes back to its queue
    return False
