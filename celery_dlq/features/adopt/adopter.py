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

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kombu.utils.functional import LRUCache

from celery_dlq.features.adopt.settings import consumed_already
from celery_dlq.features.adopt.sources import TakenMessage, source_of
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter
from celery_dlq.registry import features
from celery_dlq.store.metrics import Counts
from celery_dlq.store.worker_records import MessageKey, Stored
from celery_dlq.worker.housekeeping import LongTask, Stopping
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.letter import LetterMaker
from celery_dlq.writing.writer import LetterStore

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.features.adopt.letter import Adoption, Identity

logger = get_logger("celery_dlq.worker")

MAX_EQUAL = 10_000
_MESSAGES_PER_LOOK = 200  # at the memory of the store

Progress = Callable[[int], object]


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
        return {**asdict(self), "by_queue": dict(sorted(self.by_queue.items()))}


class Adopter:
    """Adopts the messages of one queue, on the connections of an assembly."""

    def __init__(
        self,
        assembly: Assembly,
        queue: str,
        target: str | None,
        make: LetterMaker,
        *,
        counts: Counts | None = None,
        progress: Progress | None = None,
        adopted: Callable[[str], object] = lambda _queue: None,
    ) -> None:
        app, backend = assembly.app, assembly.backend
        self.report = AdoptReport(queue)
        self._source = source_of(app, queue)
        self._letters, self._counter = backend.new_letters, backend.counter
        self._parts = app, assembly.settings.policies, queue, target, self._counter, make
        made = (one.load(one.outbox)(assembly) for one in features() if one.outbox)
        self._outboxes = [one for one in made if one is not None]
        self._limit = assembly.memory_limit()
        self._store = LetterStore(
            self._letters,
            limit=self._limit,
            change=self._recorded,
            events=assembly.events,
            counts=counts or assembly.measuring.counts,
        )
        self._progress = progress or (lambda _new: None)
        self._adopted = adopted  # called with the queue of each new letter
        # By the hash of messages without an id: the next number, and if there were letters before.
        self._equal: MutableMapping[str, tuple[int, bool]] = LRUCache(MAX_EQUAL)  # type: ignore[no-untyped-call]

    @cached_property
    def _adoption(self) -> Adoption:
        """What makes the letters; most queues have no message most of the time."""
        from celery_dlq.features.adopt.letter import Adoption  # noqa: PLC0415 - when one is there

        return Adoption(*self._parts)

    @property
    def task(self) -> LongTask:
        """The work of whoever follows the queue."""
        return LongTask(name=f"adopt {self.report.queue}", work=self.adopt_all, close=self.close)

    def adopt_all(self, stopping: Stopping) -> None:
        """Adopt until the queue is empty; after a failure, taken messages return to it."""
        try:
            self.drain(stopping=stopping)
        except Exception:
            self.close()
            raise

    def drain(self, most: int | None = None, stopping: Stopping = lambda: False) -> None:
        """Adopt until the queue is empty, or ``most`` messages were adopted."""
        count = 0
        while (most is None or count < most) and not stopping():
            if count % _MESSAGES_PER_LOOK == 0:
                self._limit.tick()
            found = self._source.take_message()
            if found is None:
                break
            self._adopt_message(found)
            self._source.remove_message(found)
            count += 1

    def close(self) -> None:
        """Disconnect; the next `drain` connects again. Never raises."""
        self._source.close()
        for outbox in self._outboxes:
            outbox.close()
        self._equal.clear()  # what was taken comes back and looks like the next one

    def _adopt_message(self, found: TakenMessage) -> None:
        copied = self._adoption.copied(found.message)
        if copied is not None:  # not published again: it would come back to this queue
            self.report.known += not self._read_back(*copied)
            return
        identity = self._adoption.identity(found.message)
        if identity.certain:
            self.report.known += not self._store_letter(found, identity)
            return
        number, doubtful = self._equal.get(identity.task_id, (0, False))
        while not self._store_letter(found, identity.numbered(number)):
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
        return self._counted(letter, self._letters.dead_letter(self._limit.fitted(letter), key))

    def _store_letter(self, found: TakenMessage, identity: Identity) -> bool:
        letter, key, counted = self._adoption.letter(found.message, identity)
        stored = self._store.store(letter, key)
        if counted != key:
            self._counter.record_death(counted)  # storing the letter did that beside the letter
        return self._counted(letter, stored)

    def _recorded(self, letter: DeadLetter) -> DeadLetter:
        for outbox in self._outboxes:
            letter = outbox.before_store(letter)
        return letter

    def _counted(self, letter: DeadLetter, stored: Stored) -> bool:
        """Report a new letter; False if it was there."""
        if stored is Stored.ALREADY_THERE:
            return False
        self.report.adopted += 1
        self.report.by_queue[letter.dead_letter_queue] += 1
        self._adopted(letter.dead_letter_queue)
        self._progress(1)
        return True


class AdoptObserver(Observer):
    """Empties the queues of the setting ``dlq_adopt``, each in a thread of its own."""

    def __init__(self, parts: WorkerParts, orders: Mapping[str, str | None]) -> None:
        self._own = [parts.dlq.separated() for _ in orders]
        self._adopters = [
            Adopter(own, queue, target, parts.make, counts=parts.counts)
            for own, (queue, target) in zip(self._own, orders.items(), strict=True)
        ]

    @property
    def tasks(self) -> Sequence[LongTask]:
        """A long queue or a slow broker must not delay the tasks."""
        return [adopter.task for adopter in self._adopters]

    def close(self) -> None:
        """Close the connections to the store."""
        for own in self._own:
            own.backend.close()


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker that adopts."""
    orders = parts.settings.of("adopt")
    if not orders:
        return None
    for queue in sorted(orders.keys() & parts.app.amqp.queues.consume_from.keys()):
        raise consumed_already(queue, parts.hostname, by="dlq_adopt")
    logger.info("Adopting dead messages from %s", ", ".join(orders))
    return AdoptObserver(parts, orders)
