"""Pages of letters, newest first, that stay as they are while letters arrive."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.fingerprint import DIGITS
from celery_dlq.operations.redrive.select import CLOCK_SKEW, RawEntry, later, matcher, select
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import Group, RawPage, ordered, position_at

_SCANNED_PER_PAGE = 500
_MAX_PAGE_BYTES = 8 * 1024 * 1024
_MAX_CLOCK_ERROR = timedelta(days=1)  # of a worker; more than `CLOCK_SKEW`, to miss no letter
_MAX_NUMBER = 2**64
_POSITION = r"\d{1,20}-\d{1,20}"
_CURSOR = re.compile(rf"([on])({_POSITION})_({_POSITION})_(\d{{0,20}})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """Some letters of a queue that match a filter.

    Attributes:
        entries: The letters, newest first, and entries that are no letters.
        newer: Cursor of the page with newer letters; ``None`` on the first page.
        older: Cursor of the page with older letters; ``None`` if there are none.
        complete: False if the deadline ended the search before the page was full. ``older`` (or
            ``newer``, on the way back) goes on from there.
        scanned: Number of entries read.
        arrived: Number of letters that were stored since the first page was read and are on none
            of its pages; ``None`` if there are some, and the store does not know how many.
    """

    entries: tuple[RawEntry, ...] = ()
    newer: str | None = None
    older: str | None = None
    complete: bool = True
    scanned: int = 0
    arrived: int | None = 0


class LetterCount(NamedTuple):
    """A number of letters.

    Attributes:
        number: How many were found.
        exact: False if there may be more.
    """

    number: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    """Where a page begins."""

    older: bool  # True for the letters before the position, False for those after it
    position: str  # The position
    newest: str  # The newest position when the first page was read; later ones are left out
    stored: int | None  # Number of letters ever stored at that time; `None` if unknown

    def __str__(self) -> str:
        stored = "" if self.stored is None else self.stored
        return f"{'o' if self.older else 'n'}{self.position}_{self.newest}_{stored}"

    @classmethod
    def read(cls, text: str) -> _Cursor:
        """Read a cursor that came from outside."""
        found = _CURSOR.fullmatch(text)
        if found is None or max(map(int, re.findall(r"\d+", text))) >= _MAX_NUMBER:
            raise DLQError(
                f"expected cursor to be one that a page gave as newer or older, got {text[:80]!r}"
            )
        direction, position, newest, stored = found.groups()
        return cls(
            older=direction == "o",
            position=position,
            newest=newest,
            stored=int(stored) if stored else None,
        )

    def at(self, position: str, *, older: bool) -> str:
        """Return the cursor of a neighbour."""
        return str(replace(self, older=older, position=position))


@dataclass(slots=True)
class _Search:
    """A search for letters, in one direction, until a page is full or time is over."""

    where: LetterFilter
    size: int
    ends: float
    total: int | None = None  # of the letters that match, if known
    entries: list[RawEntry] = field(default_factory=list)
    last: str | None = None  # the position up to which all was seen
    full: bool = False
    complete: bool = True
    scanned: int = 0

    def run(self, pages: Iterable[RawPage], skipped: str | None = None) -> None:
        """Search pages; at least one entry, so that a repeated search gets on."""
        matching, page_bytes = matcher(_remaining(self.where)), 0
        for page in pages:
            for position, fields in page:
                if position == skipped:
                    continue
                self.scanned += 1
                entry = matching(position, fields)
                if entry is not None:
                    page_bytes += entry.size
                    too_large = bool(self.entries) and page_bytes > _MAX_PAGE_BYTES
                    if len(self.entries) == self.size or too_large:
                        self.full = True
                        return
                    self.entries.append(entry)
                self.last = position
                if len(self.entries) == self.total:
                    return
            if self.scanned and time.monotonic() >= self.ends:
                self.complete = False
                return


def page(
    store: Letters,
    queue: str,
    where: LetterFilter,
    *,
    cursor: str | None,
    size: int,
    deadline_seconds: float,
) -> LetterPage:
    """Return one page; see `celery_dlq.operations.reading.Reading.page`."""
    if size < 1:
        raise DLQError(f"expected size to be 1 or more, got {size}")
    ends = time.monotonic() + deadline_seconds
    start = None if cursor is None else _Cursor.read(cursor)
    if start is None:
        newest = store.last_position(queue)
        if newest is None:
            return LetterPage()
        stored = store.stored_ever(queue)
        start = _Cursor(older=True, position=newest, newest=newest, stored=stored)
    elif not start.older:
        found = _newer(store, queue, start, _Search(where, size, ends))
        if found is not None:
            return found
        start, cursor = replace(start, older=True, position=start.newest), None
    total = _total(store, queue, where) if cursor is None else None
    search = _Search(where, size, ends, total)
    pages = _pages(store, queue, where, None, start.position, size, newest_first=True)
    search.run(pages, skipped=None if cursor is None else start.position)
    goes_on = search.last is not None and (search.full or not search.complete)
    top = search.entries[0].position if search.entries else start.position
    return LetterPage(
        entries=tuple(search.entries),
        newer=None if cursor is None else start.at(top, older=False),
        older=start.at(search.last, older=True) if goes_on and search.last else None,
        complete=search.complete,
        scanned=search.scanned,
        arrived=_arrived(store, queue, start),
    )


def count(
    store: Letters, queue: str, where: LetterFilter, *, most: int, deadline_seconds: float
) -> LetterCount:
    """Count letters; see `celery_dlq.operations.reading.Reading.count`."""
    if not where:
        return LetterCount(store.length(queue), exact=True)
    total = _total(store, queue, where)
    if total is not None:
        return LetterCount(total, exact=True)
    ends, number, matching = time.monotonic() + deadline_seconds, 0, matcher(_remaining(where))
    for some in _pages(store, queue, where, None, None, _SCANNED_PER_PAGE, newest_first=True):
        number += sum(matching(*entry) is not None for entry in some)
        if number > most:
            return LetterCount(most, exact=False)
        if time.monotonic() >= ends:
            return LetterCount(number, exact=False)
    return LetterCount(number, exact=True)


def _newer(store: Letters, queue: str, start: _Cursor, search: _Search) -> LetterPage | None:
    """Return the page before a position; ``None`` if that is the first one."""
    pages = _pages(
        store,
        queue,
        search.where,
        start.position,
        start.newest,
        search.size,
        newest_first=False,
    )
    search.run(pages)
    if search.last is None or (search.complete and not search.full):
        return None
    bottom = search.entries[0].position if search.entries else search.last
    return LetterPage(
        entries=tuple(reversed(search.entries)),
        newer=start.at(search.last, older=False),
        older=start.at(bottom, older=True),
        complete=search.complete,
        scanned=search.scanned,
        arrived=_arrived(store, queue, start),
    )


def _pages(
    store: Letters,
    queue: str,
    where: LetterFilter,
    after: str | None,
    until: str | None,
    size: int,
    *,
    newest_first: bool,
) -> Iterable[RawPage]:
    """Return the entries of a range among which the letters are."""
    if where.ids is not None:
        low, high = ordered(after) if after else (-1, 0), ordered(until) if until else None
        found = [(entry.position, entry.fields) for entry in select(store, queue, where)]
        found.sort(key=lambda entry: ordered(entry[0]), reverse=newest_first)
        return [[e for e in found if low < ordered(e[0]) and (not high or ordered(e[0]) <= high)]]
    if where.since is not None:
        after = later(after, position_at(where.since - CLOCK_SKEW))
    group = _group(store, queue, where)
    if group is not None:
        after = later(after, position_at(group.first_seen_at - _MAX_CLOCK_ERROR))
        example = store.entry(queue, group.example_id) if group.example_id else None
        if example is not None and (until is None or ordered(example[0]) < ordered(until)):
            until = example[0]  # nothing newer is of this group
    return store.fields(
        queue,
        after=after,
        until=until,
        page_size=_SCANNED_PER_PAGE if where else size + 1,
        newest_first=newest_first,
    )


def _group(store: Letters, queue: str, where: LetterFilter) -> Group | None:
    """Return the group if a filter has a whole fingerprint and the store finds it at once."""
    if where.fingerprint is None or len(where.fingerprint) < DIGITS:
        return None
    return store.overviews.group(queue, where.fingerprint)


def _total(store: Letters, queue: str, where: LetterFilter) -> int | None:
    """Return how many letters match if the store knows."""
    if where != LetterFilter(fingerprint=where.fingerprint):
        return None
    group = _group(store, queue, where)
    return None if group is None else group.letters


def _remaining(where: LetterFilter) -> LetterFilter:
    """Return what is still to be asked of the entries of `_pages`."""
    return where if where.ids is None else LetterFilter()


def _arrived(store: Letters, queue: str, start: _Cursor) -> int | None:
    """Return how many letters were stored since the first page."""
    last = store.last_position(queue)
    if last is None or ordered(last) <= ordered(start.newest):
        return 0
    stored = store.stored_ever(queue)
    return None if stored is None or start.stored is None else max(0, stored - start.stored)
