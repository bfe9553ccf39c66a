"""The `DeadLetterStore` in real queues of the user's broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal, NoReturn

from celery_dlq.errors import CorruptLetter, NotSupported
from celery_dlq.letters.record import DeadLetter, Delivery, ended, from_micros, letter_from
from celery_dlq.logs import get_logger
from celery_dlq.store.base import (
    Capabilities,
    ClaimState,
    ExportLease,
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
    position_at,
    stored_at,
)
from celery_dlq.store.broker.message import letter_message
from celery_dlq.store.broker.queue import MAX_LETTERS, HeldQueue, QueueDriver
from celery_dlq.store.broker.snapshot import Snapshot
from celery_dlq.store.grouping import groups_of

if TYPE_CHECKING:  # passed in: at run time the backends do not import each other
    from celery_dlq.store.positions import PositionIndex

logger = get_logger("celery_dlq.store")

_PAGE_SIZE = 200
_FRESH_SECONDS = 10.0
_READ_ONLY_SECONDS = 60.0


class BrokerStore:
    """The `DeadLetterStore` on a broker."""

    capabilities = Capabilities(
        random_access=False,
        overviews=False,
        bin=False,
        tells_twins=False,
        most_letters=MAX_LETTERS,
    )

    def __init__(
        self, driver: QueueDriver, index: PositionIndex, expected: Iterable[str] = ()
    ) -> None:
        self._driver = driver
        self._index = index
        self._expected = frozenset(expected)
        self._held: dict[str, HeldQueue] = {}
        self._read_only: set[str] = set()
        self._seen: tuple[str, object, float, Snapshot] | None = None
        self._lock = threading.RLock()

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check Redis and the broker."""
        self._index.check(dead_letter_queues)
        self._driver.check()

    def now(self) -> datetime:
        """Return the time of Redis, which assigns the positions."""
        return self._index.now()

    # -- storing ------------------------------------------------------------------

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Publish a letter; the counters are deleted once the broker has confirmed it."""
        name = letter.dead_letter_queue
        position = self._index.place(name, letter.id)
        self._driver.put(name, letter_message(letter, position))
        return Stored.REGRESSED if self._index.placed(letter, key) else Stored.NEW

    # -- reading ------------------------------------------------------------------

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """Return one letter; reads the queue."""
        found = self.entry(dead_letter_queue, letter_id)
        return None if found is None else letter_from(found[1])

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Return the position and raw fields of one entry; reads the queue."""
        snapshot = self._snapshot(dead_letter_queue)
        entry = snapshot.find(letter_id)
        return None if entry is None else (entry.position, snapshot.fields(entry))

    def position_at(self, moment: datetime) -> str:
        """Return the first position of a millisecond."""
        return position_at(moment)

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """Read queue after queue until the letter is found."""
        having = (name for name in dead_letter_queues if self._snapshot(name).find(letter_id))
        return next(having, None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Find letters by the prefix of their ids; reads the queues."""
        found = (
            (name, entry.key)
            for name in dead_letter_queues
            for entry in self._snapshot(name).ordered()
            if entry.key.startswith(prefix)
        )
        return list(islice(found, most))

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """Iterate over all letters."""
        pages = self.fields(
            dead_letter_queue,
            after=None,
            until=None,
            page_size=_PAGE_SIZE,
            newest_first=newest_first,
        )
        for page in pages:
            for position, fields in page:
                try:
                    yield StoredLetter(position=position, letter=letter_from(fields))
                except CorruptLetter as exc:  # skip it
                    logger.warning("%s, entry %s: %s", dead_letter_queue, position, exc)

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None,
        until: str | None,
        page_size: int,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Iterate over raw pages, in the order of storing, not of the broker."""
        snapshot = self._snapshot(dead_letter_queue)
        yield from snapshot.pages(
            after=after, until=until, page_size=page_size, newest_first=newest_first
        )

    def last_position(self, dead_letter_queue: str) -> str | None:
        """Return the newest position assigned."""
        return self._index.last(dead_letter_queue) or self._found_end(dead_letter_queue)

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """Return the position up to which no letter is still being put."""
        return self._index.settled(dead_letter_queue) or self._found_end(dead_letter_queue)

    def stored_ever(self, dead_letter_queue: str) -> None:
        """Return ``None``: nobody counts them."""

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """Return the letters stored first; reads the queue."""
        pages = self.fields(dead_letter_queue, after=after, until=None, page_size=_PAGE_SIZE)
        summaries = (_letter_summary(position, f) for page in pages for position, f in page)
        return list(islice(summaries, most))

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Return letters whose messages have expired; reads the queue."""
        now = self.now()
        found = (
            LetterSummary(
                position=s.position,
                letter_id=s.letter.id,
                dead_lettered_at=None,
                stored_at=stored_at(s.position),
            )
            for s in self.letters(dead_letter_queue, newest_first=False)
            if ended(s.letter, stored_at(s.position), now)
        )
        return list(islice(found, most))

    def length(self, dead_letter_queue: str) -> int:
        """Return the number of messages, held ones included."""
        with self._lock:
            held = self._held.get(dead_letter_queue)
            return self._driver.length(dead_letter_queue) + (0 if held is None else len(held))

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Record how far the queue is exported."""
        self._index.exports.note(dead_letter_queue, position)

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """Return how far the queue is exported."""
        return self._index.exports.until(dead_letter_queue, self.last_position)

    def identity(self) -> str:
        """Return the random id of the Redis that gives the positions."""
        return self._index.exports.identity()

    def export_lease(
        self,
        dead_letter_queue: str,
        what: Literal["take", "keep", "note", "end"],
        place: str,
        *,
        owner: str,
        lease_seconds: float,
        state: str = "",
    ) -> ExportLease:
        """Acquire, renew, annotate or end a lease; see `ExportLeaseStore.export_lease`."""
        return self._index.exports.export_lease(
            dead_letter_queue, what, place, owner=owner, lease_seconds=lease_seconds, state=state
        )

    def names(self) -> list[str]:
        """Return the queues that Redis knows, and configured ones with letters that it lost."""
        known = self._index.overviews.names()
        lost = (name for name in self._expected.difference(known) if self._driver.length(name))
        return sorted({*known, *lost})

    def queues(self) -> list[QueueSummary]:
        """Return all dead-letter queues with their lengths; no queue is read."""
        return [
            QueueSummary(
                name=name,
                letters=self.length(name),
                last_hour=sum(map(sum, arrivals.values())),
                arrivals=arrivals,
            )
            for name, arrivals in self._index.overviews.arrivals(self.names())
        ]

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """Raise: this would read every queue."""
        raise NotSupported(
            f"the ages of letters on the broker are not known without reading all of them: "
            f"{', '.join(dead_letter_queues)}"
        )

    def groups(
        self, dead_letter_queue: str, *, most: int | None = None, by: GroupOrder = "letters"
    ) -> list[Group]:
        """Return the groups; reads the queue."""
        letters = self.letters(dead_letter_queue, newest_first=False)
        found = ((stored.letter, stored_at(stored.position)) for stored in letters)
        return groups_of(found, self.now(), most, by)

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group | None:
        """Return one group; reads the queue."""
        groups = self.groups(dead_letter_queue)
        return next((group for group in groups if group.fingerprint == fingerprint), None)

    # -- changing -----------------------------------------------------------------

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters; the queue is locked until `done`."""
        with self._lock:
            snapshot = self._hold(dead_letter_queue, letter_ids).snapshot
            there = [letter_id for letter_id in letter_ids if letter_id in snapshot]
            claimed = self._index.claims.claim(
                dead_letter_queue,
                there,
                owner=owner,
                lease_seconds=lease_seconds,
                previous_run_prefix=previous_run_prefix,
                elsewhere=True,
            )
        states = dict(zip(there, claimed, strict=True))
        return [states.get(letter_id, ClaimState.GONE) for letter_id in letter_ids]

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Record that these were published."""
        self._index.claims.mark_published(dead_letter_queue, letter_ids, owner=owner)

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give unused claims back."""
        self._index.claims.release(dead_letter_queue, letter_ids, owner=owner, doubtful=doubtful)

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
        """Acknowledge letters, then delete their claims."""
        wanted = list(dict.fromkeys(letter_ids))
        if owner is not None:
            wanted = self._index.claims.owned(dead_letter_queue, wanted, owner)
        if not wanted:
            return 0
        with self._lock:
            held = self._hold(dead_letter_queue, wanted)
            entries = [entry for i in wanted if (entry := held.snapshot.find(i)) is not None]
            try:
                held.remove(entries)
            except BaseException:
                self._let_go(dead_letter_queue)  # the next call reads it again
                raise
        self._index.claims.forget(dead_letter_queue, wanted)
        return len(entries)

    def discard(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str,
        keep_seconds: float,
    ) -> int:
        """Raise: there is no bin."""
        del letter_ids, owner, keep_seconds
        _no_bin(dead_letter_queue)

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Raise: there is no bin."""
        del letter_id
        _no_bin(dead_letter_queue)

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return an empty list: there is no bin."""
        del dead_letter_queues
        return []

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """Raise: there is no bin."""
        _no_bin(dead_letter_queue)

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Mark messages that are about to be redriven."""
        self._index.redriven.watch(keys)

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Return the outcomes of watched messages."""
        return self._index.redriven.outcomes(keys)

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Set the count with which a redriven message begins."""
        self._index.redriven.seed(key, deliveries, last)

    def done(self) -> None:
        """Release all held queues."""
        with self._lock:
            while self._held:
                self._held.popitem()[1].give_back()

    def close(self) -> None:
        """Release all held queues and disconnect."""
        self.done()
        self._seen = None
        self._driver.close()
        self._index.close()

    # -- inside --------------------------------------------------------------------

    def _snapshot(self, name: str) -> Snapshot:
        """Read a queue, or return the last snapshot if it is fresh and no letter was stored."""
        with self._lock:
            held = self._present(name)
            if held is not None:
                self._refresh(name, held)
                return self._warned(name, held.snapshot)
            state = self._index.state(name)  # first: a letter put meanwhile makes this stale
            if self._seen is not None:
                queue, before, at, snapshot = self._seen
                if (queue, before) == (name, state) and time.monotonic() - at < _FRESH_SECONDS:
                    return snapshot
            self._seen = None
            snapshot, held = self._driver.read(name)
            if held is None:
                self._seen = (name, state, time.monotonic(), snapshot)
            else:
                self._held[name] = held
                self._expire(name, held)
            return self._warned(name, snapshot)

    def _found_end(self, name: str) -> str | None:
        """Return the newest position in a queue of which Redis lost the state."""
        entries = self._snapshot(name).ordered() if self._driver.length(name) else []
        return entries[-1].position if entries else None

    def _expire(self, name: str, held: HeldQueue) -> None:
        """Release a queue that was only read, unless an operation begins within a minute."""

        def over() -> None:
            with self._lock:
                if self._held.get(name) is held and name in self._read_only:
                    self._let_go(name)

        self._read_only.add(name)
        timer = threading.Timer(_READ_ONLY_SECONDS, over)
        timer.daemon = True
        timer.start()

    def _hold(self, name: str, letter_ids: Sequence[str]) -> HeldQueue:
        """Hold a queue, and make sure that it includes these letters if they exist."""
        self._seen = None
        held = self._present(name)
        self._read_only.discard(name)
        if held is None:
            held = self._held[name] = self._driver.hold(name)
            self._warned(name, held.snapshot)
        elif not all(held.snapshot.find(letter_id) for letter_id in letter_ids):
            self._refresh(name, held)
        return held

    def _present(self, name: str) -> HeldQueue | None:
        held = self._held.get(name)
        if held is not None and not held.present:  # it may exist by now
            self._let_go(name)
            return None
        return held

    def _refresh(self, name: str, held: HeldQueue) -> None:
        try:
            held.refresh()
        except BaseException:
            self._let_go(name)  # the next call reads it again
            raise

    def _let_go(self, name: str) -> None:
        with suppress(KeyError):
            self._held.pop(name).give_back()

    def _warned(self, name: str, snapshot: Snapshot) -> Snapshot:
        if not snapshot.complete:
            logger.warning(
                "%s has more letters than are read at once: only the first %s are visible. "
                "Redrive, purge or trim some of them",
                name,
                f"{len(snapshot):,}",
            )
        return snapshot


def _no_bin(name: str) -> NoReturn:
    raise NotSupported(f"the dead-letter queue {name!r} is on the broker, which has no bin")


def _letter_summary(position: str, fields: Mapping[bytes, bytes]) -> LetterSummary:
    died = None
    with suppress(KeyError, ValueError, OverflowError):
        died = from_micros(int(fields[b"dead_lettered_at"]))
    letter_id = fields.get(b"id", b"").decode("utf-8", "replace") or position
    return LetterSummary(
        position=position,
        letter_id=letter_id,
        dead_lettered_at=died,
        stored_at=stored_at(position),
    )
