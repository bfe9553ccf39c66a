"""Counters, letters and board in memory: for tests, gone with the process."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice

from celery_dlq.events import Change
from celery_dlq.metrics import Measured, Series, WorkerGauges
from celery_dlq.ports import (
    ClaimState,
    Count,
    Group,
    Heading,
    MessageKey,
    Notice,
    Override,
    QueueSummary,
    Standing,
    Stored,
    StoredLetter,
    WorkerCard,
)
from celery_dlq.record import DeadLetter, Delivery, end_of
from celery_dlq.reports import MOST_IDS, Report, Why

_MOST_ASIDE = 20
_MOST_DEAD = 10_000
_MOST_CHANGES = 10_000

RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]


class MemoryCounter:
    """The `DeliveryCounter` in memory."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str, int], dict[tuple[int, int], Delivery]] = {}
        self._counts: Counter[MessageKey] = Counter()
        self._dead: dict[MessageKey, None] = {}
        self._aside: dict[tuple[str, str, int], deque[Delivery]] = {}
        self._lock = threading.Lock()

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Count a start."""
        self.count(key, delivery, None)
        return True

    def count(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        missed: int = 0,
        waited_seconds: float | None = None,  # noqa: ARG002 - one process: nothing is uncertain
        alone: bool = True,  # noqa: ARG002 - the same
        unless_dead: bool = False,
    ) -> Count:
        """Count a start, unless the limit was reached before."""
        with self._lock:
            if unless_dead and key in self._dead:
                return Count(Standing.DEAD, 0)
            self._dead.pop(key, None)
            number = self._counts[key] = self._counts[key] + missed
            if limit is not None and number >= limit:
                return Count(Standing.LIMIT_REACHED, number)
            number = self._counts[key] = number + 1
            place = (key.retries, number)
            self._runs.setdefault(_run(key), {})[place] = replace(delivery, number=number)
            return Count(Standing.COUNTED, number)

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record an end, unless the message is forgotten."""
        with self._lock:
            place, run = (key.retries, delivery.number), self._runs.get(_run(key), {})
            if charged and run:
                run[place] = delivery
            elif place in run:  # the number is given out again; this delivery moves aside
                del run[place]
                self._counts[key] -= 1
                self._aside.setdefault(_run(key), deque(maxlen=_MOST_ASIDE)).append(delivery)

    def succeeded(self, key: MessageKey) -> None:
        """Forget the task."""
        self.forget(key)

    def died(self, key: MessageKey) -> None:
        """Forget the task, and remember that this message of it is dead; bounded."""
        self.forget(key)
        with self._lock:
            self._dead[key] = None
            while len(self._dead) > _MOST_DEAD:
                del self._dead[next(iter(self._dead))]

    def forget(self, key: MessageKey) -> None:
        """Forget the task over all its retries."""
        with self._lock:
            self._runs.pop(_run(key), None)
            self._aside.pop(_run(key), None)
            for other in [k for k in self._counts if _run(k) == _run(key)]:
                del self._counts[other]

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """All deliveries of the task, oldest first."""
        with self._lock:
            known = [*self._runs.get(_run(key), {}).values(), *self._aside.get(_run(key), ())]
            return tuple(sorted(known, key=lambda d: (d.started_at, d.retries, d.number)))

    def alive(self, dead_letter_queues: Iterable[str]) -> None:
        """One process: nobody else asks."""

    def flush(self) -> None:
        """Nothing is put off here."""

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryStore:
    """The `DeadLetterStore` in memory.

    Args:
        counter: Forgets the counters of messages whose letters are stored.
    """

    def __init__(self, counter: MemoryCounter | None = None) -> None:
        self.counter = counter or MemoryCounter()
        self._queues: dict[str, dict[str, tuple[int, DeadLetter]]] = {}
        self._claims: dict[tuple[str, str], tuple[str, str, float]] = {}
        self._lasts: dict[str, int] = {}
        self._exported: dict[str, str] = {}
        self._lock = threading.RLock()

    def check(self) -> None:
        """Memory always answers."""

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter, once."""
        with self._lock:
            self.counter.died(key)
            queue = self._queues.setdefault(letter.dead_letter_queue, {})
            if letter.id in queue:
                return Stored.ALREADY_THERE
            last = self._lasts[letter.dead_letter_queue] = (
                self._lasts.get(letter.dead_letter_queue, 0) + 1
            )
            queue[letter.id] = (last, letter)
            return Stored.NEW

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter by its id."""
        found = self._queues.get(dead_letter_queue, {}).get(letter_id)
        return found[1] if found else None

    def ids(self, dead_letter_queue: str, prefix: str, *, most: int) -> list[str]:
        """Ids that begin with a text."""
        known = self._queues.get(dead_letter_queue, {})
        return [letter_id for letter_id in known if letter_id.startswith(prefix)][:most]

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """All letters that are there now."""
        found = list(self._queues.get(dead_letter_queue, {}).values())
        for position, letter in reversed(found) if newest_first else found:
            yield StoredLetter(position=_position(position), letter=letter)

    def fields(
        self, dead_letter_queue: str, *, after: str | None, until: str, page_size: int
    ) -> Iterator[RawPage]:
        """Raw pages, oldest first."""
        entries = [
            (stored.position, {k.encode(): v for k, v in stored.letter.to_fields().items()})
            for stored in self.letters(dead_letter_queue, newest_first=False)
            if (after or "") < stored.position <= until
        ]
        for start in range(0, len(entries), page_size):
            yield entries[start : start + page_size]

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The newest position ever given."""
        last = self._lasts.get(dead_letter_queue)
        return None if last is None else _position(last)

    def oldest(self, dead_letter_queue: str, *, after: str | None, most: int) -> list[Heading]:
        """The oldest letters."""
        stored = self.letters(dead_letter_queue, newest_first=False)
        later = (s for s in stored if after is None or s.position > after)
        return [_heading(s) for s in islice(later, most)]

    def ended(self, dead_letter_queue: str, now: datetime, *, most: int) -> list[Heading]:
        """Letters whose messages would have expired by now."""
        stored = self.letters(dead_letter_queue, newest_first=False)
        over = (s for s in stored if (end := end_of(s.letter)) is not None and end <= now)
        return [_heading(s) for s in islice(over, most)]

    def length(self, dead_letter_queue: str) -> int:
        """How many letters are there."""
        return len(self._queues.get(dead_letter_queue, {}))

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Note how far the queue is exported."""
        with self._lock:
            before = self._exported.get(dead_letter_queue, "")
            self._exported[dead_letter_queue] = max(before, position)

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """How far the queue is exported."""
        noted, last = self._exported.get(dead_letter_queue), self.last_position(dead_letter_queue)
        return None if noted is None or last is None or last < noted else noted

    def names(self) -> list[str]:
        """The names of all dead-letter queues."""
        return sorted(self._queues)

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues at a glance, by name."""
        return [self._summary(name) for name in self.names()]

    def groups(self, dead_letter_queue: str) -> list[Group]:
        """The groups, largest first."""
        members: dict[str, list[DeadLetter]] = {}
        for stored in self.letters(dead_letter_queue, newest_first=False):
            members.setdefault(stored.letter.fingerprint, []).append(stored.letter)
        groups = [
            Group(
                fingerprint=fingerprint,
                letters=len(letters),
                task_name=letters[-1].task_name,
                reason=letters[-1].reason.value,
                exception_type=letters[-1].exception_type,
                first_seen_at=letters[0].dead_lettered_at,
                last_seen_at=letters[-1].dead_lettered_at,
                example_id=letters[-1].id,
            )
            for fingerprint, letters in members.items()
        ]
        return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))

    def claim(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str, lease_seconds: float
    ) -> list[ClaimState]:
        """Claim letters for one redrive."""
        with self._lock:
            return [
                self._claim_one(dead_letter_queue, letter_id, owner, lease_seconds)
                for letter_id in letter_ids
            ]

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Note that these are on the broker."""
        with self._lock:
            for letter_id in letter_ids:
                self._claims[dead_letter_queue, letter_id] = ("published", owner, 0.0)

    def release(self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str) -> None:
        """Give unused claims back."""
        with self._lock:
            for letter_id in letter_ids:
                if self._claims.get((dead_letter_queue, letter_id), ("",))[:2] == (
                    "claimed",
                    owner,
                ):
                    del self._claims[dead_letter_queue, letter_id]

    def remove(self, dead_letter_queue: str, letter_ids: Iterable[str]) -> int:
        """Remove letters and their claims."""
        with self._lock:
            queue = self._queues.get(dead_letter_queue, {})
            removed = 0
            for letter_id in letter_ids:
                removed += queue.pop(letter_id, None) is not None
                self._claims.pop((dead_letter_queue, letter_id), None)
            return removed

    def close(self) -> None:
        """Nothing to let go of."""

    def _summary(self, name: str) -> QueueSummary:
        letters = [letter for _, letter in self._queues[name].values()]
        return QueueSummary(
            name=name,
            letters=len(letters),
            oldest_at=letters[0].dead_lettered_at if letters else None,
            newest_at=letters[-1].dead_lettered_at if letters else None,
            reasons=dict(sorted(Counter(letter.reason.value for letter in letters).items())),
        )

    def _claim_one(
        self, dead_letter_queue: str, letter_id: str, owner: str, lease_seconds: float
    ) -> ClaimState:
        if self.get(dead_letter_queue, letter_id) is None:
            return ClaimState.GONE
        place, now = (dead_letter_queue, letter_id), time.monotonic()
        what, who, till = self._claims.get(place, ("", "", 0.0))
        if what and who != owner and till > now:
            return ClaimState.HELD
        state = {"": ClaimState.CLAIMED, "published": ClaimState.PUBLISHED}.get(
            what, ClaimState.RECLAIMED
        )
        kept = what if state is ClaimState.PUBLISHED else "claimed"
        self._claims[place] = (kept, owner, now + lease_seconds)
        return state


class MemoryOutbox:
    """The `Outbox` in memory."""

    def __init__(self) -> None:
        self._notices: dict[str, dict[Notice, float]] = {}
        self._lock = threading.Lock()

    def add(self, dead_letter_queue: str, notice: Notice) -> None:
        """Keep a notice."""
        with self._lock:
            self._notices.setdefault(dead_letter_queue, {})[notice] = 0.0

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[Notice]:
        """Notices that nobody tried lately."""
        with self._lock:
            kept, now = self._notices.get(dead_letter_queue, {}), time.monotonic()
            found = [notice for notice, at in kept.items() if at <= now][:most]
            kept.update(dict.fromkeys(found, now + lease_seconds))
            return found

    def done(self, dead_letter_queue: str, notices: Sequence[Notice]) -> None:
        """Forget notices."""
        with self._lock:
            for notice in notices:
                self._notices.get(dead_letter_queue, {}).pop(notice, None)

    def waiting(self, dead_letter_queue: str) -> int:
        """How many are kept."""
        return len(self._notices.get(dead_letter_queue, {}))

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryBoard:
    """The `Board` in memory: the processes of one app are one process here."""

    def __init__(self) -> None:
        self._cards: dict[str, WorkerCard] = {}
        self._changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self._overrides: dict[tuple[str, str], Override] = {}
        self._revision = 0
        self._lock = threading.Lock()

    def announce(self, card: WorkerCard) -> None:
        """Put up a card."""
        self._cards[card.hostname] = card

    def alive(self, hostname: str) -> tuple[bool, int]:
        """Give a sign of life."""
        return hostname in self._cards, self._revision

    def leave(self, hostname: str) -> None:
        """Take a card down."""
        self._cards.pop(hostname, None)

    def workers(self, *, with_tasks: bool = True) -> list[WorkerCard]:
        """All cards."""
        cards = [card for _, card in sorted(self._cards.items())]
        return cards if with_tasks else [replace(card, tasks=()) for card in cards]

    def record(self, change: Change) -> None:
        """Keep a change."""
        self._changes.append(change)

    def changes(self, *, limit: int) -> list[Change]:
        """The newest changes."""
        return list(reversed(self._changes))[:limit]

    def override(self, override: Override) -> None:
        """Put up an override."""
        with self._lock:
            self._overrides[override.queue, override.key] = override
            self._revision += 1

    def lift(self, queue: str, key: str) -> bool:
        """Take an override down."""
        with self._lock:
            self._revision += 1
            return self._overrides.pop((queue, key), None) is not None

    def overrides(self, now: datetime) -> list[Override]:
        """The overrides in force."""
        for place in [place for place, o in self._overrides.items() if o.until <= now]:
            self.lift(*place)
        return [override for _, override in sorted(self._overrides.items())]

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryMetrics:
    """The `MetricsStore` in memory: the processes of one app are one process here."""

    def __init__(self) -> None:
        self._counts: Counter[Series] = Counter()
        self._workers: dict[str, WorkerGauges] = {}

    def add(self, counts: Mapping[Series, int], gauges: WorkerGauges | None = None) -> bool:
        """Add counts."""
        self._counts.update(counts)
        if gauges is not None:
            self._workers[gauges.worker] = gauges
        return True

    def read(self) -> Measured:
        """All counts and gauges."""
        workers = tuple(gauges for _, gauges in sorted(self._workers.items()))
        return Measured(counts=dict(self._counts), workers=workers)

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryReports:
    """The `Reports` in memory; without returns and without an allowance."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], list[str]] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()

    def of(self, letter: DeadLetter) -> Report | None:
        """Report a group's first letter, its tenth, its hundredth and so on."""
        group = (letter.dead_letter_queue, letter.fingerprint)
        ids = self._ids.setdefault(group, [])
        if letter.id not in ids:
            ids.insert(0, letter.id)
            del ids[MOST_IDS:]
            self._numbers[group] += 1
        number = self._numbers[group]
        if str(number).rstrip("0") != "1" or ids[0] != letter.id:
            return None
        why = Why.NEW if number == 1 else Why.GREW
        return Report(why=why, number=number, letter_ids=tuple(ids))

    def close(self) -> None:
        """Nothing to let go of."""


def _run(key: MessageKey) -> tuple[str, str, int]:
    return (key.dead_letter_queue, key.task_id, key.redrives)


def _heading(stored: StoredLetter) -> Heading:
    return Heading(
        position=stored.position,
        letter_id=stored.letter.id,
        dead_lettered_at=stored.letter.dead_lettered_at,
    )


def _position(number: int) -> str:
    """As in Redis: ordered as text too."""
    return f"{number:020d}-0"
