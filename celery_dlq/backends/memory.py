"""Counters, letters and registry in memory: for tests, gone with the process."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any

from celery_dlq.backends.base import (
    Capabilities,
    ClaimState,
    Count,
    CountStatus,
    Glance,
    Group,
    LetterSummary,
    MessageKey,
    OutboxEntry,
    Override,
    QueueSummary,
    RawPage,
    RedriveOutcome,
    Restored,
    Stored,
    StoredLetter,
    WorkerInfo,
)
from celery_dlq.backends.reports import MOST_IDS, Report, Why
from celery_dlq.events import Change
from celery_dlq.metrics import Measured, Series, WorkerGauges
from celery_dlq.record import DeadLetter, Delivery, end_of, ended

_Run = tuple[str, str, int, int]
_MOST_ASIDE = 20
_MOST_DEAD = 10_000
_MOST_CHANGES = 10_000

_MOST_JOBS = 500
_HOUR = timedelta(hours=1)


def _now() -> datetime:
    return datetime.now(timezone.utc)


class MemoryCounter:
    """The `DeliveryCounter` in memory."""

    def __init__(self) -> None:
        self._runs: dict[_Run, dict[tuple[int, int], Delivery]] = {}
        self._counts: Counter[MessageKey] = Counter()
        self._dead: dict[MessageKey, None] = {}
        self.watched: set[MessageKey] = set()
        self.successes: Counter[str] = Counter()
        self._aside: dict[_Run, deque[Delivery]] = {}
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
        uncounted: int = 0,
        waited_seconds: float | None = None,  # noqa: ARG002 - one process: nothing is uncertain
        alone: bool = True,  # noqa: ARG002 - the same
        unless_dead: bool = False,
    ) -> Count:
        """Count a start, unless the limit was reached before."""
        with self._lock:
            if unless_dead and key in self._dead:
                return Count(CountStatus.DEAD, 0)
            self._dead.pop(key, None)
            number = self._counts[key] = self._counts[key] + uncounted
            if limit is not None and number >= limit:
                return Count(CountStatus.LIMIT_REACHED, number)
            number = self._counts[key] = number + 1
            place = (key.retries, number)
            self._runs.setdefault(_run(key), {})[place] = replace(delivery, number=number)
            return Count(CountStatus.COUNTED, number)

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record an end, unless the message is forgotten."""
        with self._lock:
            place, run = self._place(key, delivery), self._runs.get(_run(key), {})
            if place is None:
                return
            if charged:
                run[place] = replace(delivery, number=place[1])
                return
            self._take_back(key, place)
            if delivery.outcome is not None:  # its number is given out again; it moves aside
                self._aside.setdefault(_run(key), deque(maxlen=_MOST_ASIDE)).append(delivery)

    def _place(self, key: MessageKey, delivery: Delivery) -> tuple[int, int] | None:
        """Where the start of a delivery is on record: a copy may have got its number."""
        run = self._runs.get(_run(key), {})
        places = [
            place
            for place, known in run.items()
            if place[0] == key.retries and known.started_at == delivery.started_at
        ]
        own = (key.retries, delivery.number)
        return own if own in places else places[0] if places else None

    def _take_back(self, key: MessageKey, place: tuple[int, int]) -> None:
        run, last = self._runs[_run(key)], (key.retries, self._counts[key])
        del run[place]
        self._counts[key] -= 1
        if last in run:
            run[place] = replace(run.pop(last), number=place[1])

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Forget the message; another one under the same task id stays."""
        with self._lock:
            own, run = self._place(key, delivery), self._runs.get(_run(key), {})
            others = any(
                known.outcome is None
                and place != own
                and (
                    own is None
                    or place[0] > own[0]
                    or (place[0] == own[0] and (first or place[1] > own[1]))
                )
                for place, known in run.items()
            )
            if others and own is not None:
                self._take_back(key, own)
        if not others:
            self.forget(key)

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count it."""
        self.successes[redrive_id] += 1

    def died(self, key: MessageKey) -> None:
        """Forget the task, and remember that this message of it is dead; bounded."""
        self.forget(key)
        with self._lock:
            self._dead[key] = None
            while len(self._dead) > _MOST_DEAD:
                del self._dead[next(iter(self._dead))]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Count deliveries that a message had before it was redriven."""
        with self._lock:
            self._counts[key] = deliveries
            place = (key.retries, deliveries)
            self._runs.setdefault(_run(key), {})[place] = replace(last, number=deliveries)

    def is_dead(self, key: MessageKey) -> bool:
        """Whether this message, or a retry of it, was dead-lettered."""
        with self._lock:
            return any(_run(dead) == _run(key) for dead in self._dead)

    def knows(self, key: MessageKey) -> bool:
        """Whether the task is watched, or has deliveries on record."""
        return key in self.watched or _run(key) in self._runs

    def forget(self, key: MessageKey) -> None:
        """Forget the task over all its retries."""
        with self._lock:
            self._runs.pop(_run(key), None)
            self.watched = {other for other in self.watched if _run(other) != _run(key)}
            self._aside.pop(_run(key), None)
            for other in [k for k in self._counts if _run(k) == _run(key)]:
                del self._counts[other]

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """All deliveries of the task, oldest first."""
        with self._lock:
            known = [*self._runs.get(_run(key), {}).values(), *self._aside.get(_run(key), ())]
            return tuple(sorted(known, key=lambda d: (d.started_at, d.retries, d.number)))

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
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

    capabilities = Capabilities()

    def __init__(self, counter: MemoryCounter | None = None) -> None:
        self.counter = counter or MemoryCounter()
        self._queues: dict[str, dict[str, tuple[int, DeadLetter]]] = {}
        self._stored_at: dict[tuple[str, str], datetime] = {}
        self._claims: dict[tuple[str, str], tuple[str, str, float]] = {}
        self._lasts: dict[str, int] = {}
        self._exported: dict[str, str] = {}
        self._arrivals: dict[str, deque[datetime]] = {}
        self._bin: dict[tuple[str, str], tuple[float, DeadLetter]] = {}
        self._lock = threading.RLock()

    def check(self) -> None:
        """Memory always answers."""

    def now(self) -> datetime:
        """The clock of this process."""
        return _now()

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter, once."""
        with self._lock:
            self.counter.died(key)
            queue = self._queues.setdefault(letter.dead_letter_queue, {})
            if letter.id in queue:
                return Stored.ALREADY_THERE
            self._put(letter)
            arrivals = self._arrivals.setdefault(letter.dead_letter_queue, deque())
            arrivals.append(self.now())
            return Stored.NEW

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter by its id."""
        found = self._queues.get(dead_letter_queue, {}).get(letter_id)
        if found is None:
            return next(
                (
                    letter
                    for position, letter in self._entries(dead_letter_queue)
                    if position == letter_id
                ),
                None,
            )
        return found[1]

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Position and raw fields of one letter."""
        for position, letter in self._entries(dead_letter_queue):
            if letter_id in (letter.id, position):
                return position, _raw(letter)
        return None

    def position_at(self, moment: datetime) -> str:  # noqa: ARG002 - positions are numbers here
        """The beginning: nothing here says when a letter was stored."""
        return _position(0)

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """The first that has the letter."""
        return next((name for name in dead_letter_queues if self.entry(name, letter_id)), None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Ids that begin with a text."""
        known = ((name, i) for name in dead_letter_queues for i in self._queues.get(name, {}))
        return list(islice((pair for pair in known if pair[1].startswith(prefix)), most))

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """All letters that are there now."""
        found = list(self._queues.get(dead_letter_queue, {}).values())
        for position, letter in reversed(found) if newest_first else found:
            yield StoredLetter(position=_position(position), letter=letter)

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None,
        until: str | None,
        page_size: int,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Raw pages."""
        entries = [
            (stored.position, _raw(stored.letter))
            for stored in self.letters(dead_letter_queue, newest_first=newest_first)
            if (after or "") < stored.position and (until is None or stored.position <= until)
        ]
        for start in range(0, len(entries), page_size):
            yield entries[start : start + page_size]

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The newest position ever given."""
        last = self._lasts.get(dead_letter_queue)
        return None if last is None else _position(last)

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """The same: a letter is stored in one step."""
        return self.last_position(dead_letter_queue)

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """The letters stored first."""
        summaries = self._letter_summaries(dead_letter_queue)
        return list(islice((h for h, _ in summaries if after is None or h.position > after), most))

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Letters whose messages have expired since they were stored."""
        now, summaries = self.now(), self._letter_summaries(dead_letter_queue)
        over = (h for h, letter in summaries if ended(letter, h.stored_at, now))
        return list(islice(over, most))

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

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """What retention asks first."""
        return [self._glance(name) for name in dead_letter_queues]

    def groups(self, dead_letter_queue: str, *, most: int | None = None) -> list[Group]:
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
        return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))[:most]

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters for one operation."""
        with self._lock:
            return [
                self._claim_one(
                    dead_letter_queue, letter_id, owner, lease_seconds, previous_run_prefix
                )
                for letter_id in letter_ids
            ]

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Note that these are on the broker."""
        with self._lock:
            for letter_id in letter_ids:
                if self._owner(dead_letter_queue, letter_id) == owner:
                    self._claims[dead_letter_queue, letter_id] = ("published", owner, 0.0)

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give unused claims back."""
        with self._lock:
            for letter_id in letter_ids:
                place = (dead_letter_queue, letter_id)
                what, who, _till = self._claims.get(place, ("", "", 0.0))
                if who != owner or what == "published":
                    continue
                if what == "claimed" and not doubtful:
                    del self._claims[place]
                else:
                    self._claims[place] = ("reclaimed", owner, 0.0)

    def remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], *, owner: str | None = None
    ) -> int:
        """Remove letters and their claims."""
        with self._lock:
            return sum(
                self._take(dead_letter_queue, letter_id, owner) is not None
                for letter_id in letter_ids
            )

    def discard(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str,
        keep_seconds: float,
    ) -> int:
        """Remove letters into the bin."""
        with self._lock:
            taken = [self._take(dead_letter_queue, i, owner) for i in letter_ids]
            ends = time.monotonic() + keep_seconds
            kept = {
                (dead_letter_queue, letter.id): (ends, letter)
                for letter in taken
                if letter is not None
            }
            self._bin.update(kept)
            return len(kept)

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Put a letter back."""
        with self._lock:
            self._empty_bin()
            if (dead_letter_queue, letter_id) not in self._bin:
                return Restored.NOT_THERE
            if letter_id in self._queues.get(dead_letter_queue, {}):
                return Restored.TAKEN
            self._put(self._bin.pop((dead_letter_queue, letter_id))[1])
            return Restored.RESTORED

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those whose bin has something."""
        full = {name for name, _id in self._bin}
        return [name for name in dead_letter_queues if name in full]

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """The bin, newest first."""
        with self._lock:
            self._empty_bin()
            kept = [
                letter
                for (name, _id), (_till, letter) in self._bin.items()
                if name == dead_letter_queue
            ]
        for letter in reversed(kept):
            yield [("0-0", {b"~key": letter.id.encode(), **_raw(letter)})]

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Remember messages."""
        self.counter.watched.update(keys)

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """What became of them."""
        return [self._outcome(key) for key in keys]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Count deliveries that the message had before."""
        self.counter.seed(key, deliveries, last)

    def done(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _glance(self, name: str) -> Glance:
        summaries = list(self._letter_summaries(name))
        ends = (end_of(letter) for _, letter in summaries)
        return Glance(
            name=name,
            at=self.now(),
            letters=len(summaries),
            oldest_stored_at=summaries[0][0].stored_at if summaries else None,
            first_end_at=min((end for end in ends if end is not None), default=None),
        )

    def _summary(self, name: str) -> QueueSummary:
        letters = [letter for _, letter in self._queues[name].values()]
        return QueueSummary(
            name=name,
            letters=len(letters),
            oldest_at=letters[0].dead_lettered_at if letters else None,
            newest_at=letters[-1].dead_lettered_at if letters else None,
            reasons=dict(sorted(Counter(letter.reason.value for letter in letters).items())),
            last_hour=self._last_hour(name),
        )

    def _last_hour(self, name: str) -> int:
        arrivals = self._arrivals.get(name, deque())
        while arrivals and arrivals[0] <= self.now() - _HOUR:
            arrivals.popleft()
        return len(arrivals)

    def _put(self, letter: DeadLetter) -> None:
        name = letter.dead_letter_queue
        last = self._lasts[name] = self._lasts.get(name, 0) + 1
        self._queues.setdefault(name, {})[letter.id] = (last, letter)
        self._stored_at[name, letter.id] = self.now()

    def _letter_summaries(self, name: str) -> Iterator[tuple[LetterSummary, DeadLetter]]:
        for stored in self.letters(name, newest_first=False):
            letter = stored.letter
            yield (
                LetterSummary(
                    position=stored.position,
                    letter_id=letter.id,
                    dead_lettered_at=letter.dead_lettered_at,
                    stored_at=self._stored_at[name, letter.id],
                ),
                letter,
            )

    def _take(self, name: str, letter_id: str, owner: str | None) -> DeadLetter | None:
        if owner is not None and self._owner(name, letter_id) != owner:
            return None
        self._claims.pop((name, letter_id), None)
        found = self._queues.get(name, {}).pop(letter_id, None)
        self._stored_at.pop((name, letter_id), None)
        return None if found is None else found[1]

    def _owner(self, name: str, letter_id: str) -> str | None:
        claim = self._claims.get((name, letter_id))
        return None if claim is None else claim[1]

    def _entries(self, name: str) -> list[tuple[str, DeadLetter]]:
        return [(_position(p), letter) for p, letter in self._queues.get(name, {}).values()]

    def _empty_bin(self) -> None:
        now = time.monotonic()
        for place in [place for place, (ends, _) in self._bin.items() if ends <= now]:
            del self._bin[place]

    def _outcome(self, key: MessageKey) -> RedriveOutcome:
        if self.counter.is_dead(key):
            return RedriveOutcome.DIED
        return RedriveOutcome.OPEN if self.counter.knows(key) else RedriveOutcome.SUCCEEDED

    def _claim_one(
        self,
        dead_letter_queue: str,
        letter_id: str,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str,
    ) -> ClaimState:
        if self.get(dead_letter_queue, letter_id) is None:
            return ClaimState.GONE
        place, now = (dead_letter_queue, letter_id), time.monotonic()
        what, who, till = self._claims.get(place, ("", "", 0.0))
        dead = bool(previous_run_prefix) and who.startswith(previous_run_prefix)
        if what and who != owner and till > now and not dead:
            return ClaimState.HELD
        note, state = ("reclaimed", ClaimState.RECLAIMED)
        if what == "published":
            note, state = ("published", ClaimState.PUBLISHED)
        elif not what or (who == owner and what == "claimed"):
            note, state = ("claimed", ClaimState.CLAIMED)
        self._claims[place] = (note, owner, now + lease_seconds)
        return state


class MemoryOutbox:
    """The `Outbox` in memory."""

    def __init__(self) -> None:
        self._notices: dict[str, dict[OutboxEntry, float]] = {}
        self._lock = threading.Lock()

    def add(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Keep a entry."""
        with self._lock:
            self._notices.setdefault(dead_letter_queue, {})[entry] = 0.0

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Notices that nobody tried lately."""
        with self._lock:
            kept, now = self._notices.get(dead_letter_queue, {}), time.monotonic()
            found = [entry for entry, at in kept.items() if at <= now][:most]
            kept.update(dict.fromkeys(found, now + lease_seconds))
            return found

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Forget entries."""
        with self._lock:
            for entry in entries:
                self._notices.get(dead_letter_queue, {}).pop(entry, None)

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those that have entries."""
        return [name for name in dead_letter_queues if self._notices.get(name)]

    def waiting(self, dead_letter_queue: str) -> int:
        """How many are kept."""
        return len(self._notices.get(dead_letter_queue, {}))

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryWorkerRegistry:
    """The `WorkerRegistry` in memory: the processes of one app are one process here."""

    def __init__(self) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self._overrides: dict[tuple[str, str], Override] = {}
        self._revision = 0
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """The clock of this process."""
        return _now()

    def register(self, info: WorkerInfo) -> None:
        """Put up a info."""
        self._infos[info.hostname] = info

    def heartbeat(self, hostname: str) -> tuple[bool, int]:
        """Send a heartbeat."""
        return hostname in self._infos, self._revision

    def deregister(self, hostname: str) -> None:
        """Take a info down."""
        self._infos.pop(hostname, None)

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """All infos."""
        infos = [info for _, info in sorted(self._infos.items())]
        return infos if with_tasks else [replace(info, tasks=()) for info in infos]

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

    def overrides(self) -> list[Override]:
        """The overrides in force."""
        now = self.now()
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


class MemoryJobStore:
    """The `JobStore` in memory."""

    def __init__(self) -> None:
        self._states: dict[str, Mapping[str, Any]] = {}
        self._cancelled: set[str] = set()
        self._taken: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """The clock of this process."""
        return _now()

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Keep a state."""
        self._states[job_id] = dict(state)
        for old in sorted(self._states)[:-_MOST_JOBS]:
            del self._states[old]
            self._cancelled.discard(old)
        return job_id in self._cancelled

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """One state."""
        return self._states.get(job_id)

    def all(self) -> list[Mapping[str, Any]]:
        """All states, newest first."""
        return [state for _, state in sorted(self._states.items(), reverse=True)]

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Want a job cancelled, or no more."""
        if wanted:
            self._cancelled.add(job_id)
        else:
            self._cancelled.discard(job_id)

    def succeeded(self, job_id: str) -> int:  # noqa: ARG002 - workers in memory have no book
        """Nothing here tells."""
        return 0

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Become the one that does this run."""
        with self._lock:
            free = (job_id, run) not in self._taken
            self._taken.add((job_id, run))
            return free

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


def _raw(letter: DeadLetter) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in letter.to_fields().items()}


def _run(key: MessageKey) -> _Run:
    return (key.dead_letter_queue, key.task_id, key.redrives, key.nesting)


def _position(number: int) -> str:
    """As in Redis: ordered as text too."""
    return f"{number:020d}-0"
