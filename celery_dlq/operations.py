"""What operators do with letters: redrive and discard, safe against crashes and each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import uuid4

from kombu.exceptions import KombuError

from celery_dlq.errors import DLQError, RedriveError
from celery_dlq.events import Event, Redriven
from celery_dlq.filters import LetterFilter
from celery_dlq.headers import LETTER_HEADER, REDRIVE_HEADER, REDRIVES_HEADER
from celery_dlq.ports import ClaimState, Clock, DeadLetterStore
from celery_dlq.record import DeadLetter

_BATCH = 100
_LEASE_SECONDS = 120.0

# Set by a broker or by us on an earlier journey; they would be wrong or harmful on the next.
# x-death: https://github.com/celery/celery/issues/10111
_STALE_HEADERS = (
    "redelivered",
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
    "x-delivery-count",
    "x-acquired-count",
)
# Given anew by kombu for each publish.
_TRANSPORT_PROPERTIES = (
    "delivery_info",
    "delivery_tag",
    "body_encoding",
    "content_type",
    "content_encoding",
    "application_headers",
)


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did.

    Attributes:
        redrive_id: Its id, also in the header ``dlq_redrive`` of every message.
        published: Letters whose message the broker took, removed afterwards.
        finished: Letters that an interrupted redrive had published; now only removed.
        maybe_twice: Of those published, how many an interrupted redrive may have published
            before; their header ``dlq_letter`` makes the second copy visible.
        skipped: Letters that another redrive holds, or that were gone.
        failed: Letters whose message the broker did not take, with the error; they stay.
    """

    redrive_id: str
    published: int = 0
    finished: int = 0
    maybe_twice: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {name: getattr(self, name) for name in self.__slots__}


class Redriver:
    """Publishes letters' original messages again and removes the letters.

    Claim, publish, note, remove, in batches: killed at any line, the next redrive
    finishes the work, and no letter is lost.

    Args:
        app: The Celery app; its broker gets the messages.
        store: Where the letters are.
        clock: The present, aware UTC.
        emit: Told of every letter whose message the broker took.
    """

    def __init__(
        self,
        app: Any,
        store: DeadLetterStore,
        clock: Clock,
        emit: Callable[[Event], object] = lambda _event: None,
    ) -> None:
        self._app = app
        self._store = store
        self._clock = clock
        self._emit = emit

    def redrive(
        self,
        dead_letter_queue: str,
        where: LetterFilter,
        *,
        rate: float | None = None,
        limit: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> RedriveReport:
        """Redrive the letters of a queue that match; see `DeadLetters.redrive`."""
        _check(rate, limit)
        report = RedriveReport(redrive_id=str(uuid4()))
        owner = f"{report.redrive_id}@{socket.gethostname()}:{os.getpid()}"
        pace = _Pace(rate)
        size = _BATCH if rate is None else max(1, min(_BATCH, int(rate)))
        letters = islice(self._matching(dead_letter_queue, where), limit)
        with self._app.producer_pool.acquire(block=True) as producer:
            for batch in _batches(letters, size):
                self._batch(producer, dead_letter_queue, batch, owner, report, pace)
                if progress is not None:
                    progress(len(batch))
        return report

    def _matching(self, dead_letter_queue: str, where: LetterFilter) -> Iterator[DeadLetter]:
        if where.ids is not None:
            found = (self._store.get(dead_letter_queue, i) for i in sorted(where.ids))
            return (letter for letter in found if letter is not None and where.matches(letter))
        stored = self._store.letters(dead_letter_queue, newest_first=False)
        return (s.letter for s in stored if where.matches(s.letter))

    def _batch(
        self,
        producer: Any,
        dead_letter_queue: str,
        batch: list[DeadLetter],
        owner: str,
        report: RedriveReport,
        pace: _Pace,
    ) -> None:
        ids = [letter.id for letter in batch]
        states = self._store.claim(
            dead_letter_queue, ids, owner=owner, lease_seconds=_LEASE_SECONDS
        )
        over: list[str] = []
        unused = [
            letter.id
            for letter, state in zip(batch, states, strict=True)
            if state in (ClaimState.CLAIMED, ClaimState.RECLAIMED)
        ]
        try:
            for letter, state in zip(batch, states, strict=True):
                if state is ClaimState.PUBLISHED:
                    report.finished += 1
                    over.append(letter.id)
                elif letter.id not in unused:
                    report.skipped += 1
                elif self._publish(producer, letter, report, pace):
                    report.maybe_twice += state is ClaimState.RECLAIMED
                    over.append(letter.id)
                    unused.remove(letter.id)
        finally:  # also on Ctrl-C
            # Noted first, removed second: killed in between, only removal is left to do.
            self._store.mark_published(dead_letter_queue, over, owner=owner)
            self._store.remove(dead_letter_queue, over)
            self._store.release(dead_letter_queue, unused, owner=owner)

    def _publish(
        self,
        producer: Any,
        letter: DeadLetter,
        report: RedriveReport,
        pace: _Pace,
    ) -> bool:
        pace.wait()
        try:
            publish(self._app, producer, letter, redrive_id=report.redrive_id, now=self._clock())
        except RedriveError as exc:
            report.failed[letter.id] = str(exc)
            return False
        report.published += 1
        self._emit(Redriven(at=self._clock(), letter=letter, redrive_id=report.redrive_id))
        return True


def publish(
    app: Any,
    producer: Any,
    letter: DeadLetter,
    *,
    redrive_id: str,
    now: datetime,
) -> None:
    """Publish a letter's original message to its source queue.

    Body bytes, id, callbacks, chain, chord and group are the original's. Counts of
    deliveries and retries start anew; marker headers name the redrive and the letter.

    Raises:
        RedriveError: The broker did not take the message.
    """
    if not letter.source_queue:
        message = (
            f"expected letter {letter.id} to name the queue it came from, got none: whoever put "
            f"its message into the queue it was adopted from did not say; the letter stays"
        )
        raise RedriveError(message)
    headers = redriven_headers(letter, redrive_id=redrive_id, now=now)
    properties = {
        name: value
        for name, value in letter.decoded("properties").items()
        if name not in _TRANSPORT_PROPERTIES and value is not None
    }
    properties.pop("expiration", None)  # the time it had was the first journey's
    known = app.amqp.queues.get(letter.source_queue)
    try:
        # To the queue itself: its exchange could hand copies to other queues.
        producer.publish(
            letter.body,
            exchange="",
            routing_key=letter.source_queue,
            content_type=letter.content_type or "application/octet-stream",
            content_encoding=letter.content_encoding or "binary",
            headers=headers,
            declare=[known] if known is not None else None,
            retry=True,
            retry_policy={"max_retries": 3, "interval_start": 0, "interval_step": 0.2},
            **properties,
        )
    except (KombuError, OSError, *producer.connection.connection_errors,
            *producer.connection.channel_errors) as exc:  # fmt: skip
        message = (
            f"expected the broker to take letter {letter.id} for queue {letter.source_queue!r}, "
            f"got {type(exc).__name__}: {exc}; the letter stays where it is"
        )
        raise RedriveError(message) from exc


def redriven_headers(letter: DeadLetter, *, redrive_id: str, now: datetime) -> dict[str, Any]:
    """The headers of a redriven message."""
    headers = dict(letter.decoded("headers") or {})
    for name in _STALE_HEADERS:
        headers.pop(name, None)
    if "retries" in headers:
        headers["retries"] = 0
    if "eta" in headers:
        headers["eta"] = None
    if letter.expires is not None and letter.expires <= now and "expires" in headers:
        headers["expires"] = None  # else the worker would drop it unseen
    headers[REDRIVES_HEADER] = letter.redrives + 1
    headers[REDRIVE_HEADER] = redrive_id
    headers[LETTER_HEADER] = letter.id
    return headers


class _Pace:
    """Lets at most ``rate`` things pass a second."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 0.0 if rate is None else 1.0 / rate
        self._next = time.monotonic()

    def wait(self) -> None:
        if not self._gap:
            return
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._gap


def _check(rate: float | None, limit: int | None) -> None:
    if rate is not None and rate <= 0:
        message = f"expected rate to be more than 0 letters a second, got {rate}"
        raise DLQError(message)
    if limit is not None and limit < 1:
        message = f"expected limit to be 1 or more, got {limit}"
        raise DLQError(message)


def _batches(letters: Iterable[DeadLetter], size: int) -> Iterator[list[DeadLetter]]:
    iterator = iter(letters)
    while batch := list(islice(iterator, size)):
        yield batch
