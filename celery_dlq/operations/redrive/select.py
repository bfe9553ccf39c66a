"""Select letters by a filter: streamed, raw, in bounded batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

from celery_dlq import registry
from celery_dlq.errors import CorruptLetter
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.packed import PackedFields, letter_from
from celery_dlq.letters.record import REQUIRED_FIELDS, DeadLetter, Reason
from celery_dlq.policies.policy import Policy
from celery_dlq.store.keys import text_of
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import RawPage, ordered, position_at

if TYPE_CHECKING:
    from celery_dlq.store.claims import Claims

_ENTRIES_PER_PAGE = 500
_CHOSEN_PER_PAGE = 125  # of those that are all worked on: they stay in the processor's cache
MAX_BATCH_BYTES = 8 * 1024 * 1024
MOST_SEARCHED = 200_000
"""Letters in which those that died again after a redrive are looked for."""


CLOCK_SKEW = timedelta(minutes=15)
"""Allowed difference between the clocks of worker and store; a letter is stored after its death."""

_REASONS = frozenset(reason.value.encode() for reason in Reason)

Progress = Callable[[int], object]
"""Called with a number of letters, or of entries read."""


class Source(Protocol):
    """Where letters are read: Redis, or the files of an export."""

    @property
    def claims(self) -> Claims:
        """Their claims, which Redis keeps."""

    def narrowed(self, _where: LetterFilter, _reads: set[str] | None = None, /) -> Source:
        """What reads at least the letters that match a filter, and those fields of them."""

    def length(self, dead_letter_queue: str, /) -> int:
        """The number of entries of a queue."""

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None = None,
        until: str | None = None,
        page_size: int = 0,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Bounded pages of entries."""

    def named(
        self, dead_letter_queue: str, letter_ids: Iterable[str]
    ) -> Iterator[tuple[str, Mapping[bytes, bytes]]]:
        """Those of the given entries that are there."""

    def remove(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str | None = None,
        operation: str = "",
    ) -> int:
        """Remove claimed letters."""


class RawEntry:
    """One entry of the store, not decoded."""

    __slots__ = ("fields", "is_letter", "key", "position")

    def __init__(self, position: str, fields: Mapping[bytes, bytes]) -> None:
        self.position = position
        self.fields = fields
        # The keys of packed fields are known without unpacking them.
        names = fields.names() if isinstance(fields, PackedFields) else fields.keys()
        self.is_letter = names >= REQUIRED_FIELDS and fields.get(b"reason") in _REASONS
        self.key = fields[b"id"].decode("utf-8", "replace") if self.is_letter else position

    @property
    def size(self) -> int:
        """Approximate size in bytes; the other fields of a letter are capped."""
        fields = self.fields
        return len(fields.get(b"body", b"")) + len(fields.get(b"headers", b"")) + 4000

    def text(self, name: str) -> str:
        """One field as text."""
        return self.fields.get(name.encode(), b"").decode("utf-8", "replace")

    def letter(self) -> DeadLetter:
        """The decoded letter."""
        try:
            return letter_from(self.fields)
        except CorruptLetter as exc:
            raise CorruptLetter(f"{exc}; it is at {self.position}") from exc


def select_entries(
    store: Source,
    queue: str,
    where: LetterFilter,
    *,
    after: str | None = None,
    until: str | None = None,
    newest_first: bool = False,
    scanned: Progress | None = None,
    unread: Progress | None = None,
) -> Iterator[RawEntry]:
    """The entries that match a filter, behind one position and up to another.

    Entries that are no letters match only an empty filter, or a filter with their position as
    an id. ``unread`` is called for a letter whose arguments decide and cannot be read.
    """
    store = store.narrowed(where)
    if where.ids is not None:
        yield from _entries_by_id(store, queue, where, unread)
        return
    if where.since is not None:
        after = later_position(after, position_at(where.since - CLOCK_SKEW))
    matching, size = matcher(where, unread), _ENTRIES_PER_PAGE if where else _CHOSEN_PER_PAGE
    for page in store.fields(
        queue, after=after, until=until, page_size=size, newest_first=newest_first
    ):
        for position, fields in page:
            found = matching(position, fields)
            if found is not None:
                yield found
        if scanned is not None:
            scanned(len(page))


def matcher(
    where: LetterFilter, unread: Progress | None = None
) -> Callable[[str, Mapping[bytes, bytes]], RawEntry | None]:
    """Make what returns an entry if it matches a filter without ids; see `select_entries`."""
    if not where:
        return RawEntry

    def matching(position: str, fields: Mapping[bytes, bytes]) -> RawEntry | None:
        judged = where.judged(fields)
        if judged is not False:
            found = RawEntry(position, fields)
            if found.is_letter and judged:
                return found
            if found.is_letter and unread is not None:
                unread(1)
        return None

    return matching


def without(
    entries: Iterable[RawEntry],
    known: Callable[[list[str]], Collection[str]],
    left_out: Progress = id,
) -> Iterator[RawEntry]:
    """The entries but those of which something is known, which is asked for many at once."""
    for batch in batches(entries, _CHOSEN_PER_PAGE):
        found = known([one.key for one in batch])
        left_out(len(found))
        yield from (one for one in batch if one.key not in found)


def batches(
    entries: Iterable[RawEntry], size: int, max_bytes: int = MAX_BATCH_BYTES
) -> Iterator[list[RawEntry]]:
    """Split entries into batches, bounded in letters and in bytes."""
    batch: list[RawEntry] = []
    batch_bytes = 0
    for entry in entries:
        entry_bytes = entry.size
        if batch and batch_bytes + entry_bytes > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(entry)
        batch_bytes += entry_bytes
        if len(batch) >= size:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def died_again(
    store: Letters, queue: str, job_id: str, after: str | None, most: int = MOST_SEARCHED
) -> Iterator[tuple[str, str]]:
    """Ids of new letters whose headers name a redrive, empty for others; their fingerprints."""
    marker = f'"{job_id}"'.encode()
    pages = store.fields(queue, after=after, until=None, page_size=_ENTRIES_PER_PAGE)
    for _position, raw in islice(chain.from_iterable(pages), most):
        letter_id = raw.get(b"id", b"") if marker in raw.get(b"headers", b"") else b""
        yield text_of(letter_id), text_of(raw.get(b"fingerprint", b""))


def later_position(one: str | None, other: str) -> str:
    """The later of two positions."""
    return other if one is None or ordered(other) > ordered(one) else one


def _entries_by_id(
    store: Source, queue: str, where: LetterFilter, unread: Progress | None
) -> Iterator[RawEntry]:
    others, wanted = replace(where, ids=None), where.ids or frozenset()
    for entry in store.named(queue, sorted(wanted)):
        found = RawEntry(*entry)
        judged = others.judged(found.fields)
        if found.key in wanted and judged:
            yield found
        elif found.key in wanted and judged is None and found.is_letter and unread is not None:
            unread(1)


def redriven(
    policy: Policy, keys: Collection[str], due: Mapping[str, Any] | None = None
) -> Iterator[Callable[[Any], bool]]:
    """What tells the letters that some keys of a policy redrive, or a job that they made."""
    for key, (feature, found) in registry.policy_keys().items():
        value = policy.of(key) if found.redrives and key in keys else None
        if value and (takes := feature.load(found.redrives)(value, due)):
            yield takes
