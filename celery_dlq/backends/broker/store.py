"""The `DeadLetterStore` whose letters are in real queues of the user's broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from celery_dlq.backends.base import (
    Capabilities,
    ClaimState,
    Glance,
    Group,
    LetterSummary,
    MessageKey,
    QueueSummary,
    RawPage,
    RedriveOutcome,
    Restored,
    Stored,
    StoredLetter,
    position_at,
    stored_at,
)
from celery_dlq.backends.broker.message import letter_message
from celery_dlq.backends.broker.queue import MOST_LETTERS, HeldQueue, QueueDriver
from celery_dlq.backends.broker.snapshot import Snapshot
from celery_dlq.backends.grouping import groups_of
from celery_dlq.errors import CorruptLetter, NotSupported
from celery_dlq.logs import get_logger
from celery_dlq.record import DeadLetter, Delivery, ended, from_micros, letter_from

if TYPE_CHECKING:  # it is given one: at run time the backends never meet
    from celery_dlq.backends.redis.positions import PositionIndex

logger = get_logger("celery_dlq.store")

_PAGE = 200
_FRESH_SECONDS = 10.0
_READ_ONLY_SECONDS = 60.0


class BrokerStore:
    """Letters in real queues of a broker.

    Args:
        driver: The queues.
        index: What Redis keeps of them: positions, claims, how far they are exported.
        expected: Names of queues that there may be, whether Redis knows them or not.
    """

    capabilities = Capabilities(
        random_access=False,
        overviews=False,
        bin=False,
        tells_twins=False,
        most_letters=MOST_LETTERS,
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

    def check(self) -> None:
        """Ask both for a heartbeat."""
        self._index.check()
        self._driver.check()

    def now(self) -> datetime:
        """The clock of Redis, which gives the letters their positions."""
        return self._index.now()

    # -- storing ------------------------------------------------------------------

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Put a letter into its queue; confirmed before the message's counters are forgotten."""
        name = letter.dead_letter_queue
        position = self._index.place(name, letter.id)
        self._driver.put(name, letter_message(letter, position))
        self._index.placed(name, letter.id, key)
        return Stored.NEW

    # -- reading ------------------------------------------------------------------

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter; reads the queue."""
        found = self.entry(dead_letter_queue, letter_id)
        return None if found is None else letter_from(found[1])

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Position and raw fields of one letter; reads the queue."""
        snapshot = self._snapshot(dead_letter_queue)
        entry = snapshot.find(letter_id)
        return None if entry is None else (entry.position, snapshot.fields(entry))

    def position_at(self, moment: datetime) -> str:
        """Positions begin with the time of storing in milliseconds."""
        return position_at(moment)

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """The first that has the letter; reads queue after queue."""
        having = (name for name in dead_letter_queues if self._snapshot(name).find(letter_id))
        return next(having, None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Ids that begin with a text; reads the queues."""
        found = (
            (name, entry.key)
            for name in dead_letter_queues
            for entry in self._snapshot(name).ordered()
            if entry.key.startswith(prefix)
        )
        return list(islice(found, most))

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """All letters that are there now."""
        pages = self.fields(
            dead_letter_queue, after=None, until=None, page_size=_PAGE, newest_first=newest_first
        )
        for page in pages:
            for position, fields in page:
                try:
                    yield StoredLetter(position=position, letter=letter_from(fields))
                except CorruptLetter as exc:  # it stops nothing
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
        """Raw pages, in the order of storing whatever the broker made of it."""
        snapshot = self._snapshot(dead_letter_queue)
        yield from snapshot.pages(
            after=after, until=until, page_size=page_size, newest_first=newest_first
        )

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The newest position that was given to a letter."""
        return self._index.last(dead_letter_queue) or self._found_end(dead_letter_queue)

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """Up to where the queue has all its letters."""
        return self._index.settled(dead_letter_queue) or self._found_end(dead_letter_queue)

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """The letters stored first; reads the queue."""
        pages = self.fields(dead_letter_queue, after=after, until=None, page_size=_PAGE)
        summaries = (_letter_summary(position, f) for page in pages for position, f in page)
        return list(islice(summaries, most))

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Letters whose messages have expired since they were stored; reads the queue."""
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
        """How many messages the broker says that there are."""
        with self._lock:
            held = self._held.get(dead_letter_queue)
            return self._driver.length(dead_letter_queue) + (0 if held is None else len(held))

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Note how far the queue is exported."""
        self._index.exports.note(dead_letter_queue, position)

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """How far the queue is exported."""
        return self._index.exports.until(dead_letter_queue, self.last_position)

    def names(self) -> list[str]:
        """The names of all dead-letter queues that workers made.

        If Redis has forgotten them: those that are configured and have letters.
        """
        made = self._index.overviews.names()
        forgotten = {name for name in self._expected if name not in made}
        return sorted({*made, *(name for name in forgotten if self._driver.length(name))})

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues with their lengths; nothing is read for it."""
        return [
            QueueSummary(name=name, letters=self.length(name), last_hour=last_hour)
            for name, last_hour in self._index.overviews.last_hours(self.names())
        ]

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """Refuse: this would read every queue."""
        raise NotSupported(
            f"expected a store that knows ages, got queues on the broker: {dead_letter_queues}"
        )

    def groups(self, dead_letter_queue: str, *, most: int | None = None) -> list[Group]:
        """The groups, largest first; reads the queue."""
        letters = self.letters(dead_letter_queue, newest_first=False)
        return groups_of((stored.letter for stored in letters), most)

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
        """Claim letters; the queue is ours alone until `done`."""
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
        """Note that these were published."""
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

    def remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], *, owner: str | None = None
    ) -> int:
        """Acknowledge letters; then their claims are forgotten."""
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
                self._let_go(dead_letter_queue)  # read anew by the next one who asks
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
        """Refuse: there is no bin."""
        del letter_ids, owner, keep_seconds
        _no_bin(dead_letter_queue)

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Refuse: there is no bin."""
        del letter_id
        _no_bin(dead_letter_queue)

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """None: there is no bin."""
        del dead_letter_queues
        return []

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """Refuse: there is no bin."""
        _no_bin(dead_letter_queue)

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Remember messages."""
        self._index.redriven.watch(keys)

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """What became of them."""
        return self._index.redriven.outcomes(keys)

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Count deliveries that the message had before."""
        self._index.redriven.seed(key, deliveries, last)

    def done(self) -> None:
        """Give back what is held."""
        with self._lock:
            while self._held:
                self._held.popitem()[1].give_back()

    def close(self) -> None:
        """Give back what is held, and disconnect."""
        self.done()
        self._seen = None
        self._driver.close()
        self._index.close()

    # -- how ----------------------------------------------------------------------

    def _snapshot(self, name: str) -> Snapshot:
        """What is in a queue; the same as a moment ago, if no letter was stored since."""
        with self._lock:
            held = self._present(name)
            if held is not None:
                self._refresh(name, held)
                return self._told(name, held.snapshot)
            state = self._index.state(name)  # before: what comes meanwhile is asked for again
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
            return self._told(name, snapshot)

    def _found_end(self, name: str) -> str | None:
        """The newest position in a queue that Redis has forgotten."""
        entries = self._snapshot(name).ordered() if self._driver.length(name) else []
        return entries[-1].position if entries else None

    def _expire(self, name: str, held: HeldQueue) -> None:
        """Give a queue back that was only read, if no operation has begun within a minute."""

        def over() -> None:
            with self._lock:
                if self._held.get(name) is held and name in self._read_only:
                    self._let_go(name)

        self._read_only.add(name)
        timer = threading.Timer(_READ_ONLY_SECONDS, over)
        timer.daemon = True
        timer.start()

    def _hold(self, name: str, letter_ids: Sequence[str]) -> HeldQueue:
        """Hold a queue, with these letters if they are there."""
        self._seen = None
        held = self._present(name)
        self._read_only.discard(name)
        if held is None:
            held = self._held[name] = self._driver.hold(name)
            self._told(name, held.snapshot)
        elif not all(held.snapshot.find(letter_id) for letter_id in letter_ids):
            self._refresh(name, held)
        return held

    def _present(self, name: str) -> HeldQueue | None:
        held = self._held.get(name)
        if held is not None and not held.present:  # it may have been made meanwhile
            self._let_go(name)
            return None
        return held

    def _refresh(self, name: str, held: HeldQueue) -> None:
        try:
            held.refresh()
        except BaseException:
            self._let_go(name)  # read anew by the next one who asks
            raise

    def _let_go(self, name: str) -> None:
        with suppress(KeyError):
            self._held.pop(name).give_back()

    def _told(self, name: str, snapshot: Snapshot) -> Snapshot:
        if not snapshot.complete:
            logger.warning(
                "%s has more letters than are read at once: the first %s are seen. Redrive, "
                "purge or trim some of them",
                name,
                f"{len(snapshot):,}",
            )
        return snapshot


def _no_bin(name: str) -> NoReturn:
    raise NotSupported(f"expected a store with a bin, got a queue on the broker, {name!r}")


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
