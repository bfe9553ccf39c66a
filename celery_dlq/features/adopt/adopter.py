"""Stores messages that a broker dead-lettered itself as letters.

The letter is stored first, the message acknowledged second: if the process is killed in between,
the message is redelivered and its letter is recognized by the message's id.

Without an id nothing tells a message that came back from an equal one, whatever the broker marks:
a look into RabbitMQ's management page marks all it shows as redelivered. So each such message
becomes a letter: a copy at worst, which the report counts, never none.

A copy that a worker published before it acknowledged a message is read back as the letter that it
was, once: not if that is in the store, nor if it was there in the last days and left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu.utils.functional import LRUCache

from celery_dlq.errors import DLQError
from celery_dlq.events import DeadLettered, Events
from celery_dlq.features.adopt.letter import Adoption, Identity
from celery_dlq.features.adopt.sources import Source, TakenMessage
from celery_dlq.letters.record import DeadLetter
from celery_dlq.logs import get_logger
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import Clock, MessageKey, Stored
from celery_dlq.writing.memory_limit import MemoryLimit
from celery_dlq.writing.writer import LetterOutbox

logger = get_logger("celery_dlq.worker")

IDLE_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0
LETTERS_PER_ROUND = 200
MAX_EQUAL = 10_000


@dataclass(slots=True)
class AdoptReport:
    """Result of adopting the messages of one queue."""

    queue: str  # The queue that was emptied
    adopted: int = 0  # New letters
    known: int = 0  # Messages whose letter was already stored; only removed from the queue
    # Of the new letters, how many are of messages without an id that were delivered before and
    # equal an earlier letter: copies, if an adoption was killed
    maybe_twice: int = 0
    by_queue: Counter[str] = field(default_factory=Counter)  # New letters by dead-letter queue

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {
            "queue": self.queue,
            "adopted": self.adopted,
            "known": self.known,
            "maybe_twice": self.maybe_twice,
            "by_queue": dict(sorted(self.by_queue.items())),
        }


class Adopter:
    """Adopts the messages of one queue."""

    def __init__(
        self,
        queue: str,
        source: Source,
        adoption: Adoption,
        store: Letters,
        counter: DeliveryCounter,
        outbox: LetterOutbox | None,
        limit: MemoryLimit,
        clock: Clock,
        events: Events,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.report = AdoptReport(queue)
        self._source = source
        self._adoption = adoption
        self._store = store
        self._counter = counter
        self._outbox = outbox
        self._limit = limit
        self._clock = clock
        self._events = events
        self._progress = progress
        # By the hash of messages without an id: the next number, and if there were letters before.
        self._equal: MutableMapping[str, tuple[int, bool]] = LRUCache(MAX_EQUAL)  # type: ignore[no-untyped-call]

    def drain(self, most: int | None = None) -> int:
        """Adopt until the queue is empty, or ``most`` messages were adopted."""
        self._limit.tick()
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
        """Disconnect; the next `drain` connects again. Never raises."""
        self._source.close()
        if self._outbox is not None:
            self._outbox.close()
        self._equal.clear()  # what was taken comes back and looks like the next one

    def _adopt(self, found: TakenMessage) -> None:
        copied = self._adoption.copied(found.message)
        if copied is not None:  # not published again: it would come back to this queue
            self.report.known += not self._read_back(*copied)
            return
        identity = self._adoption.identity(found.message)
        if identity.certain:
            self.report.known += not self._stored(found, identity)
            return
        number, doubtful = self._equal.get(identity.task_id, (0, False))
        while not self._stored(found, identity.numbered(number)):
            number, doubtful = number + 1, True
        self._equal[identity.task_id] = (number + 1, doubtful)
        if doubtful and not found.fresh:
            self.report.maybe_twice += 1
            logger.warning(
                "Message %s has no id, was delivered before and equals an earlier letter: if an "
                "adoption was killed, it may be a copy of that",
                identity.numbered(number).task_id,
            )

    def _read_back(self, letter: DeadLetter, key: MessageKey) -> bool:
        if self._counter.is_dead(key):
            return False
        letter = self._limit.fit(letter)
        if self._store.dead_letter(letter, key) is Stored.ALREADY_THERE:
            return False
        self._count(letter)
        return True

    def _stored(self, found: TakenMessage, identity: Identity) -> bool:
        letter, key, counted = self._adoption.letter(found.message, identity, self._clock())
        letter = self._limit.fit(letter)
        if self._outbox is not None:
            self._outbox.add(letter)
        stored = self._store.dead_letter(letter, key)
        if counted != key:
            self._counter.died(counted)  # storing the letter did that beside the letter
        if stored is Stored.ALREADY_THERE:
            return False
        regressed = stored is Stored.REGRESSED
        self._events.emit(DeadLettered(at=self._clock(), letter=letter, regressed=regressed))
        self._count(letter)
        return True

    def _count(self, letter: DeadLetter) -> None:
        self.report.adopted += 1
        self.report.by_queue[letter.dead_letter_queue] += 1
        logger.info(
            "Message %s adopted into %s: %s",
            letter.task_id,
            letter.dead_letter_queue,
            letter.description,
        )
        if self._progress is not None:
            self._progress(1)


def follow(adopters: Sequence[Adopter], stop: threading.Event) -> None:
    """Adopt until stopped; errors of a queue, the broker or the store are logged and retried."""
    backoffs = [_Backoff() for _ in adopters]
    while not stop.is_set():
        busy = False
        for adopter, backoff in zip(adopters, backoffs, strict=True):
            busy |= _turn(adopter, backoff)
        if not busy:
            stop.wait(IDLE_SECONDS)
    for adopter in adopters:
        adopter.close()


class _Backoff:
    """Back-off of one queue: skips turns after a failure, more after each one in a row."""

    def __init__(self) -> None:
        self._turns_left = 0
        self._length = 1

    def over(self) -> bool:
        """True if it is time to try; call it once per turn."""
        self._turns_left = max(0, self._turns_left - 1)
        return self._turns_left == 0

    def failed(self) -> None:
        """Start a rest."""
        self._turns_left = self._length
        self._length = min(2 * self._length, int(MAX_BACKOFF_SECONDS / IDLE_SECONDS))

    def worked(self) -> None:
        """Reset the back-off."""
        self._length = 1


def _turn(adopter: Adopter, backoff: _Backoff) -> bool:
    """Adopt one bounded round; return True if there may be more at once."""
    if not backoff.over():
        return False
    try:
        count = adopter.drain(LETTERS_PER_ROUND)
    except DLQError as exc:
        logger.error("Adopting from %s is paused: %s", adopter.report.queue, exc)  # noqa: TRY400 - no traceback needed
    except Exception:
        logger.exception("Adopting from %s is paused", adopter.report.queue)
    else:
        backoff.worked()
        return count == LETTERS_PER_ROUND
    backoff.failed()
    adopter.close()  # taken messages return to their queue
    return False
