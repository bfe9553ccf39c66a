"""Pages of letters, newest first, that stay as they are while letters arrive."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.fingerprint import DIGITS
from celery_dlq.operations.redrive.select import (
    CLOCK_SKEW,
    RawEntry,
    later_position,
    matcher,
    select_entries,
)
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import Group, RawPage, ordered, position_at

_SCANNED_PER_PAGE, _LEAST_SCANNED = 500, 25  # Redis sends so many at first
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
        unread: Of these, how many match but for a condition on arguments, which cannot be read.
        arrived: Number of letters that were stored since the first page was read and are on none
            of its pages; ``None`` if there are some, and the store does not know how many.
    """

    entries: tuple[RawEntry, ...] = ()
    newer: str | None = None
    older: str | None = None
    complete: bool = True
    scanned: int = 0
    unread: int = 0
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
    def parse(cls, text: str) -> _Cursor:
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


class Search:
    """A search for letters of a queue, until a page is full or time is over."""

    def __init__(self, store: Letters, queue: str, where: LetterFilter, seconds: float) -> None:
        self._store = store
        self._queue = queue
        self._where = where
        # Without a filter, a page is what is read first.
        self._ends = time.monotonic() + (seconds if where else float("inf"))
        # `_raw_pages` has looked at the ids
        self._matching = matcher(where if where.ids is None else LetterFilter(), self._pass_over)
        self._unread = 0
        self._entries: list[RawEntry] = []
        self._last: str | None = None  # the position up to which all was seen
        self._full, self._complete, self._scanned = False, True, 0

    def page(self, cursor: str | None, size: int) -> LetterPage:
        """One page; see `celery_dlq.operations.reading.Reading.page`."""
        if size < 1:
            raise DLQError(f"expected size to be 1 or more, got {size}")
        start = None if cursor is None else _Cursor.parse(cursor)
        if start is None:
            newest = self._store.last_position(self._queue)
            if newest is None:
                return LetterPage()
            stored = self._store.stored_ever(self._queue)
            start = _Cursor(older=True, position=newest, newest=newest, stored=stored)
        elif not start.older:
            pages = self._raw_pages(start.position, start.newest, size, newest_first=False)
            self._search_pages(pages, size)
            if self._last is not None and (self._full or not self._complete):
                self._entries.reverse()
                bottom = self._entries[-1].position if self._entries else self._last
                return self._result_page(start, newer=self._last, older=bottom)
            self._entries, self._last, self._full, self._complete = [], None, False, True
            start, cursor = replace(start, older=True, position=start.newest), None
        first, position = cursor is None, start.position
        pages = self._raw_pages(None, position, size, newest_first=True)
        self._search_pages(
            pages, size, self.known_total() if first else None, None if first else position
        )
        goes_on = self._last is not None and (self._full or not self._complete)
        top = self._entries[0].position if self._entries else position
        return self._result_page(
            start, newer=None if first else top, older=self._last if goes_on else None
        )

    def count(self, most: int) -> LetterCount:
        """Count letters; see `celery_dlq.operations.reading.Reading.count`."""
        if not self._where:
            return LetterCount(self._store.length(self._queue), exact=True)
        number = self.known_total()
        if number is not None:
            return LetterCount(number, exact=True)
        number = 0
        pages = self._raw_pages(None, None, _SCANNED_PER_PAGE, newest_first=True)
        for entry in chain.from_iterable(pages):
            number += self._matching(*entry) is not None
            if number > most:
                return LetterCount(most, exact=False)
            if time.monotonic() >= self._ends:
                return LetterCount(number, exact=False)
        return LetterCount(number, exact=True)

    def known_total(self) -> int | None:
        """How many letters match if the store knows."""
        if self._where != LetterFilter(fingerprint=self._where.fingerprint):
            return None
        group = self._whole_group()
        return None if group is None else group.letters

    def _search_pages(
        self,
        pages: Iterable[RawPage],
        size: int,
        total: int | None = None,
        skipped: str | None = None,
    ) -> None:
        """Search pages; some entries at least, so that a repeated search gets on."""
        page_bytes = 0
        for position, fields in chain.from_iterable(pages):
            if position == skipped:
                continue
            self._scanned += 1
            entry = self._matching(position, fields)
            if entry is not None:
                page_bytes += entry.size
                too_large = bool(self._entries) and page_bytes > _MAX_PAGE_BYTES
                if len(self._entries) == size or too_large:
                    self._full = True
                    return
                self._entries.append(entry)
            self._last = position
            if len(self._entries) == total:
                return
            if self._scanned >= _LEAST_SCANNED and time.monotonic() >= self._ends:
                self._complete = False
                return

    def _pass_over(self, letters: int) -> None:
        self._unread += letters

    def _result_page(self, start: _Cursor, *, newer: str | None, older: str | None) -> LetterPage:
        return LetterPage(
            entries=tuple(self._entries),
            newer=newer and str(replace(start, older=False, position=newer)),
            older=older and str(replace(start, older=True, position=older)),
            complete=self._complete,
            scanned=self._scanned,
            unread=self._unread,
            arrived=self._arrived(start),
        )

    def _raw_pages(
        self, after: str | None, until: str | None, size: int, *, newest_first: bool
    ) -> Iterable[RawPage]:
        """The entries of a range among which the letters are."""
        store, queue, where = self._store, self._queue, self._where
        if where.ids is not None:
            low, high = ordered(after) if after else (-1, 0), ordered(until) if until else None
            named = select_entries(store, queue, where, unread=self._pass_over)
            found = [(entry.position, entry.fields) for entry in named]
            found.sort(key=lambda entry: ordered(entry[0]), reverse=newest_first)
            places = [(ordered(entry[0]), entry) for entry in found]
            return [[entry for at, entry in places if low < at and (not high or at <= high)]]
        if where.since is not None:
            after = later_position(after, position_at(where.since - CLOCK_SKEW))
        group = self._whole_group()
        if group is not None:
            after = later_position(after, position_at(group.first_seen_at - _MAX_CLOCK_ERROR))
            example = store.entry(queue, group.example_id) if group.example_id else None
            if example is not None and (until is None or ordered(example[0]) < ordered(until)):
                until = example[0]  # nothing newer is of this group
        page_size = _SCANNED_PER_PAGE if where else size + 1
        return store.fields(
            queue, after=after, until=until, page_size=page_size, newest_first=newest_first
        )

    def _whole_group(self) -> Group | None:
        """The group if a filter has a whole fingerprint and the store finds it at once."""
        fingerprint = self._where.fingerprint
        if fingerprint is None or len(fingerprint) < DIGITS:
            return None
        return self._store.overviews.group(self._queue, fingerprint)

    def _arrived(self, start: _Cursor) -> int | None:
        """How many letters were stored since the first page."""
        last = self._store.last_position(self._queue)
        if last is None or ordered(last) <= ordered(start.newest):
            return 0
        stored = self._store.stored_ever(self._queue)
        return None if stored is None or start.stored is None else max(0, stored - start.stored)
