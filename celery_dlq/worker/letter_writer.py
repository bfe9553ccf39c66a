"""Storing letters, and what happens to a death while the store does not answer.

A message that is not acknowledged yet stays so: its letter waits in memory, and
the broker has the message. A message that was acknowledged early exists nowhere
else: its letter waits in a file of the spool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from celery_dlq.backends.base import DeadLetterStore, LetterOutbox, MessageKey, Stored
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import DeadLettered, Events
from celery_dlq.logs import get_logger
from celery_dlq.metrics import DEAD_LETTERS, DIED_AGAIN, INTERNAL_ERRORS, STORE_ERRORS, Counts
from celery_dlq.record import DeadLetter
from celery_dlq.worker.letter import plain
from celery_dlq.worker.lifecycle import DeliveryState, WaitsForStore
from celery_dlq.worker.spool import Spool

logger = get_logger("celery_dlq.worker")

_MOST_HELD = 10_000


@dataclass(frozen=True, slots=True)
class PendingLetter:
    """A letter that must be stored.

    Attributes:
        letter: The letter.
        key: Its message.
        acknowledged: The broker has the message no more.
        waits: Whose message it is; told if the letter has to wait, once it is stored.
    """

    letter: DeadLetter
    key: MessageKey
    acknowledged: bool
    waits: WaitsForStore


class LetterWriter:
    """Stores letters, keeps those that wait, and tries them again.

    Args:
        store: Where letters go.
        spool: Where letters of acknowledged messages wait.
        outbox: Keeps an entry of each letter that a dead-letter exchange is to get; ``None`` if
            no policy names one.
        events: Carries the news of each letter that is stored.
        mark: Gives the letter as it is to be stored: with the id of the Sentry event that will
            tell of it, if one will.
        counts: Where letters and errors are counted.
    """

    def __init__(
        self,
        store: DeadLetterStore,
        spool: Spool,
        *,
        outbox: LetterOutbox | None = None,
        events: Events | None = None,
        mark: Callable[[DeadLetter], DeadLetter] | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._store = store
        self._spool = spool
        self._outbox = outbox
        self._events = events or Events()
        self._mark = mark
        self._counts = Counts() if counts is None else counts
        self._waiting: deque[PendingLetter] = deque()

    def write(self, pending: PendingLetter) -> DeliveryState:
        """Store a letter.

        Returns:
            ``STORED``: the letter is in the store or, if the broker has the message no more, in
            the spool. ``WAITING_FOR_STORE``: it is in memory; its message must not be let go.

        Raises:
            Exception: An error of our own; no letter of this message can be stored.
        """
        try:
            self._save_or_plain(pending.letter, pending.key)
        except StoreUnavailable as exc:
            if pending.acknowledged and self._spooled(pending, exc):
                return DeliveryState.STORED
            self._wait(pending, exc)
            return DeliveryState.WAITING_FOR_STORE
        return DeliveryState.STORED

    def tick(self) -> None:
        """Try again what waits; one refusal of the store ends the attempt."""
        for _ in range(len(self._waiting)):
            pending = self._waiting[0]
            state = DeliveryState.STORED
            try:
                self._save_or_plain(pending.letter, pending.key)
            except StoreUnavailable:
                return
            except Exception:
                self._counts.count(INTERNAL_ERRORS, "letter")
                logger.critical(
                    "Task %s died and is left to Celery, without a letter",
                    pending.letter.task_id,
                    exc_info=True,
                )
                state = DeliveryState.DONE
            self._waiting.popleft()
            _finish(pending, state)
        self._spool.flush(self._save_or_plain)

    def __len__(self) -> int:
        """How many letters wait in memory."""
        return len(self._waiting)

    @property
    def spooled(self) -> int:
        """How many letters wait on disk."""
        return len(self._spool)

    def _save_or_plain(self, letter: DeadLetter, key: MessageKey) -> None:
        """Store a letter; one that an error of our own stops, as plainly as it can be made."""
        try:
            self._save(letter, key)
        except StoreUnavailable:
            raise
        except Exception:
            self._counts.count(INTERNAL_ERRORS, "letter")
            logger.exception(
                "The letter of task %s is stored without what is told of its death", letter.task_id
            )
            self._save(plain(letter), key)

    def _save(self, letter: DeadLetter, key: MessageKey) -> None:
        """The outbox entry, the letter, the news of it; who called settles the message then.

        In this order: whatever is killed in between, no letter is stored that a dead-letter
        exchange does not get, and no message is acknowledged whose letter is not stored.
        """
        letter = _marked(letter, self._mark)
        try:
            if self._outbox is not None:
                self._outbox.add(letter)
            stored = self._store.dead_letter(letter, key)
        except StoreUnavailable:
            self._counts.count(STORE_ERRORS, "dead_letter")
            raise
        if stored is Stored.NEW:
            logger.warning(
                "Task %s[%s] dead-lettered to %s: %s (%s)",
                letter.task_name,
                letter.task_id,
                letter.dead_letter_queue,
                letter.reason,
                letter.description,
            )
            self._tell(letter)

    def _tell(self, letter: DeadLetter) -> None:
        queues = (letter.source_queue, letter.dead_letter_queue)
        self._counts.count(DEAD_LETTERS, *queues, letter.reason.value)
        if letter.redrives:
            self._counts.count(DIED_AGAIN, *queues)
        self._events.emit(DeadLettered(at=letter.dead_lettered_at, letter=letter))

    def _spooled(self, pending: PendingLetter, exc: StoreUnavailable) -> bool:
        try:
            self._spool.add(pending.letter, pending.key)
        except OSError as problem:
            logger.critical(
                "Task %s[%s] is acknowledged, and its letter is only in memory: the spool says "
                "%s, the store says %s",
                pending.letter.task_name,
                pending.letter.task_id,
                problem,
                exc,
            )
            return False
        logger.error(
            "Task %s[%s] is dead-lettered to the spool %s for now: %s",
            pending.letter.task_name,
            pending.letter.task_id,
            self._spool.folder,
            exc,
        )
        return True

    def _wait(self, pending: PendingLetter, exc: StoreUnavailable) -> None:
        if len(self._waiting) >= _MOST_HELD:
            # Not acknowledged: the broker gives it out again, and it dies again.
            logger.critical(
                "Task %s waits for its letter only at the broker: too many wait here",
                pending.letter.task_id,
            )
            return
        self._waiting.append(pending)
        logger.error(
            "Task %s[%s] is not dead-lettered yet and %s: %s (%d wait)",
            pending.letter.task_name,
            pending.letter.task_id,
            "kept in memory" if pending.acknowledged else "not acknowledged",
            exc,
            len(self._waiting),
        )


def _marked(letter: DeadLetter, mark: Callable[[DeadLetter], DeadLetter] | None) -> DeadLetter:
    try:
        return letter if mark is None else mark(letter)
    except Exception:
        logger.exception("Letter %s is stored without the mark of an event", letter.id)
        return letter


def _finish(pending: PendingLetter, state: DeliveryState) -> None:
    try:
        pending.waits.dlq_wait_is_over(state)
    except Exception:
        logger.exception("Task %s was dead-lettered, but not settled", pending.letter.task_id)
