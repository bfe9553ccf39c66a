"""Dead letters in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import islice

from celery_dlq.letters.record import DeadLetter, Delivery, end_of, ended
from celery_dlq.store.base import (
    Capabilities,
    ClaimState,
    Glance,
    Group,
    GroupOrder,
    LetterSummary,
    MessageKey,
    QueueEntry,
    QueueSummary,
    RawPage,
    RedriveOutcome,
    Restored,
    Stored,
    StoredLetter,
)
from celery_dlq.store.grouping import by_minute, groups_of
from celery_dlq.store.in_memory.counter import MemoryCounter
from celery_dlq.store.in_memory.notes import MemoryNotes

_HOUR = timedelta(hours=1)
_MOST_GONE = 1000


class MemoryStore:
    """The `DeadLetterStore` in memory."""

    capabilities = Capabilities()

    def __init__(self, counter: MemoryCounter | None = None) -> None:
        self.counter = counter or MemoryCounter()
        self.notes = MemoryNotes()
        self._queues: dict[str, dict[str, tuple[int, DeadLetter]]] = {}
        self._stored_at: dict[tuple[str, str], datetime] = {}
        self._claims: dict[tuple[str, str], tuple[str, str, float]] = {}
        self._lasts: dict[str, int] = {}
        self._exported: dict[str, str] = {}
        self._arrivals: dict[str, deque[tuple[datetime, str]]] = {}
        self._bin: dict[tuple[str, str], tuple[float, DeadLetter]] = {}
        # The first and the last letter that left, of each group.
        self._gone: dict[tuple[str, str], list[DeadLetter]] = {}
        self._lock = threading.RLock()

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Do nothing: memory always answers."""

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter unless its id is there."""
        with self._lock:
            self.counter.died(key)
            queue = self._queues.setdefault(letter.dead_letter_queue, {})
            if letter.id in queue:
                return Stored.ALREADY_THERE
            self._put(letter)
            arrivals = self._arrivals.setdefault(letter.dead_letter_queue, deque())
            arrivals.append((self.now(), letter.reason.value))
            return Stored.REGRESSED if self.notes.stored(letter) else Stored.NEW

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """Return one letter by its id or position."""
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
        """Return the position and raw fields of one letter."""
        for position, letter in self._entries(dead_letter_queue):
            if letter_id in (letter.id, position):
                return position, _raw(letter)
        return None

    def position_at(self, moment: datetime) -> str:  # noqa: ARG002 - positions are numbers here
        """Return the beginning: positions have no times here."""
        return _position(0)

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """Return the first queue that has the letter."""
        return next((name for name in dead_letter_queues if self.entry(name, letter_id)), None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Find letters by the prefix of their ids."""
        known = ((name, i) for name in dead_letter_queues for i in self._queues.get(name, {}))
        return list(islice((pair for pair in known if pair[1].startswith(prefix)), most))

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """Iterate over all letters."""
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
        """Iterate over raw pages."""
        entries = [
            (stored.position, _raw(stored.letter))
            for stored in self.letters(dead_letter_queue, newest_first=newest_first)
            if (after or "") < stored.position and (until is None or stored.position <= until)
        ]
        for start in range(0, len(entries), page_size):
            yield entries[start : start + page_size]

    def last_position(self, dead_letter_queue: str) -> str | None:
        """Return the newest position assigned."""
        last = self._lasts.get(dead_letter_queue)
        return None if last is None else _position(last)

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """Return `last_position`: a letter is stored in one step."""
        return self.last_position(dead_letter_queue)

    def stored_ever(self, dead_letter_queue: str) -> int | None:
        """Return the newest position, which is a count."""
        return self._lasts.get(dead_letter_queue, 0)

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """Return the letters stored first."""
        summaries = self._letter_summaries(dead_letter_queue)
        return list(islice((s for s, _ in summaries if after is None or s.position > after), most))

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Return letters whose messages have expired since they were stored."""
        now, summaries = self.now(), self._letter_summaries(dead_letter_queue)
        over = (s for s, letter in summaries if ended(letter, s.stored_at, now))
        return list(islice(over, most))

    def length(self, dead_letter_queue: str) -> int:
        """Return the number of letters."""
        return len(self._queues.get(dead_letter_queue, {}))

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Record how far the queue is exported."""
        with self._lock:
            before = self._exported.get(dead_letter_queue, "")
            self._exported[dead_letter_queue] = max(before, position)

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """Return how far the queue is exported."""
        noted, last = self._exported.get(dead_letter_queue), self.last_position(dead_letter_queue)
        return None if noted is None or last is None or last < noted else noted

    def names(self) -> list[str]:
        """Return the names of all dead-letter queues."""
        return sorted(self._queues)

    def queues(self) -> list[QueueSummary]:
        """Return a summary of every queue, by name."""
        return [self._summary(name) for name in self.names()]

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """Return a `Glance` at each queue."""
        return [self._glance(name) for name in dead_letter_queues]

    def groups(
        self, dead_letter_queue: str, *, most: int | None = None, by: GroupOrder = "letters"
    ) -> list[Group]:
        """Return the groups."""
        summaries = self._letter_summaries(dead_letter_queue)
        found = ((letter, summary.stored_at) for summary, letter in summaries)
        return groups_of(found, self.now(), most, by)

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group | None:
        """Return one group."""
        groups = self.groups(dead_letter_queue)
        found = next((group for group in groups if group.fingerprint == fingerprint), None)
        gone = self._gone.get((dead_letter_queue, fingerprint))
        if found is None and gone is not None:
            (last,) = groups_of(((one, None) for one in gone), self.now(), None, "letters")
            found = replace(last, letters=0, example_id="")
        return found

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
        """Record that these are on the broker."""
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

    def marker(self) -> None:
        """Return ``None``: letters here are never in a broker's database."""

    def redrive(
        self,
        dead_letter_queue: str,
        entries: Sequence[QueueEntry],
        *,
        job_id: str,
        owner: str,
        previous_run_prefix: str = "",
    ) -> None:
        """Return ``None``: see `marker`."""

    def redriven(self, dead_letter_queue: str, job_id: str) -> dict[ClaimState, int]:  # noqa: ARG002
        """Return nothing: see `marker`."""
        return {}

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
        """Move letters to the bin."""
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
        """Return those whose bin is not empty."""
        full = {name for name, _id in self._bin}
        return [name for name in dead_letter_queues if name in full]

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """Iterate over the bin, newest first."""
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
        """Mark messages that are about to be redriven."""
        self.counter.watched.update(keys)

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Return the outcomes of watched messages."""
        return [self._outcome(key) for key in keys]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Set the count with which a redriven message begins."""
        self.counter.seed(key, deliveries, last)

    def done(self) -> None:
        """Do nothing: no queue is held."""

    def close(self) -> None:
        """Do nothing."""

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
        arrivals = self._last_hour(name)
        return QueueSummary(
            name=name,
            letters=len(letters),
            oldest_at=letters[0].dead_lettered_at if letters else None,
            newest_at=letters[-1].dead_lettered_at if letters else None,
            reasons=dict(sorted(Counter(letter.reason.value for letter in letters).items())),
            last_hour=sum(map(sum, arrivals.values())),
            arrivals=arrivals,
        )

    def _last_hour(self, name: str) -> dict[str, tuple[int, ...]]:
        arrivals, now = self._arrivals.get(name, deque()), self.now()
        while arrivals and arrivals[0][0] <= now - _HOUR:
            arrivals.popleft()
        found = Counter((reason, int(at.timestamp()) // 60) for at, reason in arrivals)
        return by_minute(found, now)

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
        if found is None:
            return None
        gone = self._gone.pop((name, found[1].fingerprint), [])
        self._gone[name, found[1].fingerprint] = [*gone[:1], found[1]]
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        return found[1]

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


def _raw(letter: DeadLetter) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in letter.to_fields().items()}


def _position(number: int) -> str:
    """Return a position that, unlike one of Redis, also sorts as text."""
    return f"{number:020d}-0"
