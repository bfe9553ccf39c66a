"""Stores letters, and keeps them while the store is down or has no room.

A message that was acknowledged early is no longer at the broker: its letter waits in the spool.
One that is not acknowledged yet stays so while the store is down: its letter waits in memory, for
an outage is short. Unacknowledged messages fill the worker's prefetch window and its broker, and
RabbitMQ closes the channel of one that waits for long, which ends the worker. So after a minute, or
at once if the store has no room, the letter waits in the spool too, and the message is
acknowledged, if ``dlq_spool_dir`` names a folder: temporary files may vanish with the host. Where
there is none, a message of RabbitMQ goes back to its queue after some minutes, and its letter is
dropped: it dies again. How often that happens is bounded by the same minutes.

Source: https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout

An error of ours on the way of a letter is treated as a store that is away: it settles no message.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_dlq import timing
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import DeadLettered, Events
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import ANY_NAME, DeadLetter
from celery_dlq.store.metrics import (
    DEAD_LETTERS,
    DIED_AGAIN,
    INTERNAL_ERRORS,
    OTHER,
    REGRESSED,
    STORE_ERRORS,
    Counts,
)
from celery_dlq.store.new_letters import NewLetters
from celery_dlq.store.worker_records import MessageKey, Stored
from celery_dlq.writing.letter import stripped_letter
from celery_dlq.writing.lifecycle import DeliveryState, WaitsForStore, is_held
from celery_dlq.writing.memory_limit import MemoryLimit, MemoryLimitReached
from celery_dlq.writing.spool import Spool

logger = get_logger("celery_dlq.worker")

_MAX_WAITING = 10_000
_MOST_SECONDS = 0.25  # a quarter of the time between two ticks: each file is synced


@dataclass(frozen=True, slots=True)
class PendingLetter:
    """A letter that must be stored."""

    letter: DeadLetter
    key: MessageKey  # The message's identity
    waits: WaitsForStore  # The message's owner; called when a letter that had to wait is stored
    acknowledged: bool = False  # True if the broker no longer has the message
    ran_seconds: float = 0.0  # How long the message was held while its task ran


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """A death that waits in memory."""

    task: str  # The name and the id of its task, for the log
    again: Callable[[], object]  # Another attempt; raises whatever keeps it from succeeding
    waits: WaitsForStore
    acknowledged: bool
    spool: Callable[[], object] | None = None  # The same, with the spool instead of the store
    ran_seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)


class LetterStore:
    """Stores a letter: the one way, of workers and of whoever adopts."""

    def __init__(
        self,
        letters: NewLetters,
        *,
        limit: MemoryLimit | None = None,
        change: Callable[[DeadLetter], DeadLetter] = lambda letter: letter,
        events: Events | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._letters = letters
        self._limit = limit
        self._change = change
        self._events = events or Events()
        self._counts = Counts() if counts is None else counts

    def store(self, letter: DeadLetter, key: MessageKey, *, whole: bool = False) -> Stored:
        """Store a letter; if that fails by an internal error, store it without details."""
        if self._limit is not None:
            letter = self._limit.fitted(letter, whole=whole)
        try:
            return self._store_and_emit(letter, key)
        except StoreUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - an error of ours
            problem = exc
        stored = self._store_and_emit(stripped_letter(letter), key)
        self._counts.count(INTERNAL_ERRORS, "letter")
        logger.error(
            "The letter of task %s is stored without details of its death",
            letter.task_id,
            exc_info=problem,
        )
        return stored

    def _store_and_emit(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Let observers record the letter, store it, emit the event; the caller settles.

        The order matters when the worker is killed in between: every stored letter reaches its
        dead-letter exchange, and no message is acknowledged before its letter is stored.
        """
        try:
            letter = self._change(letter)
            stored = self._letters.dead_letter(letter, key)
        except StoreUnavailable:
            self._counts.count(STORE_ERRORS, "dead_letter")
            raise
        if stored is Stored.ALREADY_THERE:
            return stored
        regressed = stored is Stored.REGRESSED
        logger.warning(
            "Task %s[%s] dead-lettered to %s: %s (%s)%s",
            letter.task_name,
            letter.task_id,
            letter.dead_letter_queue,
            letter.reason,
            letter.description,
            f"; group {letter.fingerprint} was resolved" if regressed else "",
        )
        queues = (letter.source_queue, letter.dead_letter_queue)
        task = OTHER if ANY_NAME in letter.reason.about else letter.task_name
        self._counts.count(DEAD_LETTERS, *queues, letter.reason.value, task)
        if letter.redrives:
            self._counts.count(DIED_AGAIN, *queues, task)
        if regressed:
            self._counts.count(REGRESSED, *queues, task)
        self._events.emit(
            DeadLettered(at=letter.dead_lettered_at, letter=letter, regressed=regressed)
        )
        return stored


class LetterWriter(LetterStore):
    """Stores letters, and retries those that wait."""

    def __init__(
        self,
        letters: NewLetters,
        spool: Spool,
        *,
        durable_spool: bool = False,
        gives_back: bool = False,
        forget: Callable[[MessageKey], None] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(letters, **how)
        self._spool = spool
        self._durable_spool = durable_spool
        self._gives_back = gives_back  # the broker closes the channel of what waits for long
        self._forget = forget
        self._spooled_now: list[MessageKey] = []
        self._spooled_before: list[MessageKey] = []
        self._waiting: deque[Waiting] = deque()

    def store_or_wait(self, pending: PendingLetter) -> DeliveryState:
        """Store a letter, or let it wait."""
        try:
            self._store_or_spool(pending)
        except Exception as exc:  # noqa: BLE001 - the store is away, or an error of ours
            letter = pending.letter
            if not isinstance(exc, StoreUnavailable):
                self._counts.count(INTERNAL_ERRORS, "letter")
            waiting = Waiting(
                task=f"{letter.task_name}[{letter.task_id}]",
                again=partial(self._retry_write, pending, self._store_or_spool),
                spool=partial(self._retry_write, pending, self._spool_after_all),
                waits=pending.waits,
                acknowledged=pending.acknowledged,
                ran_seconds=pending.ran_seconds,
            )
            self.keep_waiting(waiting, exc)
            return DeliveryState.WAITING_FOR_STORE
        return DeliveryState.STORED

    def _store_or_spool(self, pending: PendingLetter) -> None:
        """Store a letter, in the spool if it may wait there; raises if it must wait in memory."""
        try:
            self.store(pending.letter, pending.key)
        except Exception as exc:
            if not self._spooled(pending, exc):
                raise

    def _spool_after_all(self, pending: PendingLetter) -> None:
        self._to_spool(pending, StoreUnavailable("it has waited for the store for a while"))

    def _retry_write(self, pending: PendingLetter, keep: Callable[[PendingLetter], None]) -> None:
        keep(pending)
        try:
            pending.waits.dlq_wait_is_over(DeliveryState.STORED)
        except Exception:
            logger.exception("Task %s was dead-lettered, but not settled", pending.letter.task_id)

    def tick(self) -> None:
        """Retry waiting letters until one fails."""
        self._forget_spooled()
        self._end_long_waits()
        for _ in range(len(self._waiting)):
            waiting = self._waiting[0]
            if waiting.acknowledged or is_held(waiting.waits.message):
                try:
                    waiting.again()
                except StoreUnavailable:
                    return
                except Exception:  # noqa: BLE001 - it is in the log, once
                    self._waiting.rotate(-1)  # it may be of this letter alone
                    break
            else:
                self._drop_letter(waiting)
            self._waiting.popleft()
        # The text of a letter on disk takes no memory: it waits until all of it may be stored.
        self._spool.store_waiting(partial(self.store, whole=True))

    def patience(self, ran_seconds: float = 0.0) -> float:
        """Seconds that a message may wait unacknowledged, after it was held for so long already.

        A third of what its broker leaves: it may have been prefetched long before it ran.
        """
        left = timing.current.consumer_timeout - ran_seconds
        return max(0.0, left / 3) if self._gives_back else float("inf")

    def _end_long_waits(self) -> None:
        """Put letters into the spool, or messages back into their queues, that wait for long."""
        now, takes = time.monotonic(), self._durable_spool
        for waiting in tuple(self._waiting):
            waits = now - waiting.since
            if waiting.acknowledged or time.monotonic() - now > _MOST_SECONDS:
                continue
            kept = takes and waits >= timing.current.spool_after
            if kept and waiting.spool is not None and is_held(waiting.waits.message):
                try:
                    waiting.spool()
                except Exception as exc:  # noqa: BLE001 - it is full, or an error of ours
                    logger.debug("The spool takes nothing: %s", exc)
                    takes = kept = False
            else:
                kept = False
            if not kept and waits < self.patience(waiting.ran_seconds):
                continue
            if not kept:
                self._drop_letter(waiting)
            self._waiting.remove(waiting)

    def _drop_letter(self, waiting: Waiting) -> None:
        """Drop a letter: the next delivery decides. It may succeed; a letter would be redriven."""
        went = "goes" if is_held(waiting.waits.message) else "went"
        logger.warning(
            "The letter of task %s is dropped: it waited for the store, and its message %s back to "
            "its queue meanwhile",
            waiting.task,
            went,
        )
        waiting.waits.dlq_wait_is_over(DeliveryState.DONE)

    def __len__(self) -> int:
        """The number of letters in memory."""
        return len(self._waiting)

    @property
    def spooled(self) -> int:
        """The number of letters on disk."""
        return len(self._spool)

    def _spooled(self, pending: PendingLetter, exc: Exception) -> bool:
        """Put a letter into the spool, if it may wait there; raises if the spool is full."""
        no_room = isinstance(exc, MemoryLimitReached)
        if not (pending.acknowledged or (no_room and self._durable_spool)):
            return False
        self._to_spool(pending, exc, forgets=no_room)
        return True

    def _to_spool(self, pending: PendingLetter, exc: Exception, *, forgets: bool = False) -> None:
        try:
            self._spool.write_letter(pending.letter, pending.key)
        except OSError as problem:
            raise StoreUnavailable(f"{exc}; the spool takes nothing: {problem}") from problem
        if forgets and not pending.key.redrives:  # a redrive may watch the counts
            self._spooled_now.append(pending.key)
        logger.error(
            "Task %s[%s] is dead-lettered to the spool %s for now: %s",
            pending.letter.task_name,
            pending.letter.task_id,
            self._spool.folder,
            exc,
        )

    def _forget_spooled(self) -> None:
        """Delete the counts of messages that are acknowledged: many would fill the store, too.

        Those of the last second may not be acknowledged yet. If this worker is killed before
        that, the message comes back, and its counts must still be there.
        """
        done, self._spooled_before, self._spooled_now = self._spooled_before, self._spooled_now, []
        if self._forget is not None:
            for key in done:
                self._forget(key)

    def keep_waiting(self, waiting: Waiting, exc: Exception) -> None:
        """Keep a death in memory until it is settled; the broker keeps its message."""
        if len(self._waiting) >= _MAX_WAITING:
            # Not acknowledged, the broker redelivers it, and it dies again.
            logger.critical(
                "Task %s %s: too many letters wait in memory, and the spool takes none: %s",
                waiting.task,
                "was acknowledged and has no letter"
                if waiting.acknowledged
                else "stays unacknowledged without a letter",
                exc,
            )
            return
        self._waiting.append(waiting)
        ours = None if isinstance(exc, StoreUnavailable) else exc
        logger.log(
            logging.ERROR if ours is None else logging.CRITICAL,
            "Task %s is not dead-lettered yet%s and %s: %s (%d wait)",
            waiting.task,
            "" if ours is None else ", by an error of celery_dlq,",
            "kept in memory" if waiting.acknowledged else "not acknowledged",
            exc,
            len(self._waiting),
            exc_info=ours,
        )
