"""Which letters of an exported folder a triage reads, and in which of its files they are.

An export puts letters into folders by queue and day of death, ``dlq=orders-DLQ/day=2026-01-31``.
So a question about a day of a year lists and opens the files of that day. Folders of this machine
are listed by Python; of other paths Spark gets a pattern and lists what matches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.export.partition import queue_folder
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import from_micros, to_micros

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|/Volumes/")
_PATTERN = re.compile(r"([\\*?\[\]{},^])")
_DAY_DIGITS = 8
_LAST_INSTANT = timedelta(microseconds=1)
_SECOND_INSTANT = datetime.min.replace(tzinfo=timezone.utc) + _LAST_INSTANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The letters to read; what is not set is not asked.

    Attributes:
        since: Died at or after this aware time.
        until: Died before this aware time.
        queue: The dead-letter queue.
        task: Registered task name.
        release: Version of the code that saw the death.
        fingerprint: The fingerprint, or the first digits of it.
    """

    since: datetime | None = None
    until: datetime | None = None
    queue: str | None = None
    task: str | None = None
    release: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        LetterFilter(since=self.since, until=self.until)  # checks them
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment is not None:  # in UTC, in which an offset may lead out of the calendar
                object.__setattr__(self, name, from_micros(to_micros(moment)))

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) is not None for one in fields(self))

    @property
    def chooses_folders(self) -> bool:
        """True if not all folders of an export have such letters."""
        return not (self.since is None and self.until is None and self.queue is None)

    @property
    def in_time(self) -> bool:
        """True if letters of some time only are selected."""
        return self.since is not None or self.until is not None

    def select_from(self, letters: DataFrame) -> DataFrame:
        """The selected ones of letters."""
        if self.since is not None:
            letters = letters.where(letters["dead_lettered_at"] >= self.since)
        if self.until is not None:
            letters = letters.where(letters["dead_lettered_at"] < self.until)
        if self.fingerprint is not None:
            letters = letters.where(letters["fingerprint"].startswith(self.fingerprint))
        for column, value in (
            ("dead_letter_queue", self.queue),
            ("task_name", self.task),
            ("release", self.release),
        ):
            if value is not None:
                letters = letters.where(letters[column] == value)
        return letters

    def may_have(self, folder: str) -> bool:
        """True if a folder of an export, ``dlq=…`` or ``day=…``, may have such letters."""
        name, _, value = folder.partition("=")
        if name == "dlq":
            return self.queue is None or folder == queue_folder(self.queue)
        if name == "day" and (self.since, self.until) != (None, None):
            first, last = self._day_bounds
            return first <= value.replace("-", "") <= last
        return True

    def pattern(self, path: str) -> str:
        """A pattern for the folders of these letters below a path that is no folder of here."""
        base = path.rstrip("/")
        levels = ("dlq=", "day=")
        last = base.rpartition("/")[2]
        done = next((place for place, level in enumerate(levels, 1) if last.startswith(level)), 0)
        queue = "dlq=*" if self.queue is None else _literal(queue_folder(self.queue))
        parts = ((one[:4], one[4:6], one[6:]) for one in _covering(*self._day_bounds))
        days = f"day={{{','.join('-'.join(filter(None, one)) for one in parts)}}}"
        return "/".join([_literal(base), *(queue, days)[done:]])

    def places(self, folder: Path) -> Iterator[Path]:
        """The folders and files of these letters in a folder of this machine."""
        if not self.chooses_folders or folder.name.startswith("day="):
            yield folder
            return
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            place = Path(entry.path)
            if entry.name.startswith((".", "_")) or not self.may_have(entry.name):
                continue
            if entry.name.startswith("dlq=") and entry.is_dir():
                yield from self.places(place)
            elif entry.is_dir() or entry.name.endswith(".parquet"):
                yield place

    @property
    def _day_bounds(self) -> tuple[str, str]:
        """The first and the last day, as eight digits."""
        first, last = "0" * _DAY_DIGITS, "9" * _DAY_DIGITS
        if self.since is not None:
            first = _day_digits(self.since)
        if self.until is not None:
            # Before year 1 there is no day, and no letter either.
            last = _day_digits(max(self.until, _SECOND_INSTANT) - _LAST_INSTANT)
        return first, last


EVERYTHING = Selection()
"""All letters of a folder."""


def is_remote(path: Path | str) -> bool:
    """True for a URL, and for a path that Spark knows better than Python does."""
    return _REMOTE.match(str(path)) is not None


def _day_digits(moment: datetime) -> str:
    return moment.date().isoformat().replace("-", "")


def _literal(text: str) -> str:
    """A text in a pattern of Hadoop, where it means itself."""
    return _PATTERN.sub(r"\\\1", text)


def _covering(first: str, last: str) -> Iterator[str]:
    """The fewest patterns for all numbers from the first to the last, of equally many digits."""
    if first == last:
        yield first
    elif not (first.strip("0") or last.strip("9")):
        yield "*"
    elif first[0] == last[0]:
        yield from (first[0] + rest for rest in _covering(first[1:], last[1:]))
    else:
        zeros, nines = "0" * (len(first) - 1), "9" * (len(first) - 1)
        yield from (first[0] + rest for rest in _covering(first[1:], nines))
        yield from (f"{digit}*" for digit in range(int(first[0]) + 1, int(last[0])))
        yield from (last[0] + rest for rest in _covering(zeros, last[1:]))
