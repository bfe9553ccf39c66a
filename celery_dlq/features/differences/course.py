"""When the letters of a cause came, with a line where each release began: bars for its page."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from celery_dlq.letters.packed import codes_of
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import Choice, Group, ordered, position_at
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.pages.queues import Columns, columns_of_day

LEAST_HOURS = 6
"""Bars of a cause that is some hours old."""

SECONDS = 0.01
"""How long the first letters of bars are read for their releases; one takes 0.3 ms."""

_SPAN, _HOUR = timedelta(minutes=5), timedelta(hours=1)


class Begun(NamedTuple):
    """A release of which the queue had no letter before."""

    place: int  # The bar in which its first letter came
    at: datetime  # When that bar begins
    release: str


def course(call: Call, group: Group) -> Panel:
    """Bars that fit the age of a cause, and the releases that began meanwhile."""
    now = datetime.now(timezone.utc)
    columns, width = _columns_of_age(group, now)
    seconds = width.total_seconds()
    last = datetime.fromtimestamp(now.timestamp() // seconds * seconds, timezone.utc)
    starts = [last - width * before for before in range(len(columns) - 1, -1, -1)]
    begun = _begun(call.dlq.assembly.backend.letters, call.parts["queue"], starts)
    return "course.html", {
        "columns": columns,
        "span": "hour" if width == _SPAN else f"{len(columns)} hours",
        "begun": [*begun],
    }


def _columns_of_age(group: Group, now: datetime) -> tuple[Columns, timedelta]:
    """Bars of five minutes in the first hour of a cause, then of hours."""
    age = now - group.first_seen_at
    if age < _HOUR and group.recent:
        last = len(group.recent)
        names = (f"{5 * (last - n)} to {5 * (last - n - 1)} minutes ago" for n in range(last))
        pairs = zip(names, group.recent, strict=True)
        return [(name, {group.reason: count}) for name, count in pairs], _SPAN
    hours = max(LEAST_HOURS, int(age / _HOUR) + 2)
    return columns_of_day(group)[-hours:], _HOUR


def _begun(letters: Letters, queue: str, starts: Sequence[datetime]) -> Iterator[Begun]:
    """The releases of which letters came after the first one since the first bar.

    The first letter from the beginning of each bar on says which release died then. If the letter
    before it is of the same release, that began in the bar before. The newest letter says it for
    the last bar.
    """
    until, newest = time.monotonic() + SECONDS, letters.last_position(queue)
    seen, bounds = set[str](), [*map(position_at, starts)]
    for start in [*bounds, newest] if newest else ():
        position, release = _letter_at(letters, queue, after=_before(start), until=newest)
        if release and seen and release not in seen:
            _, same = _letter_at(letters, queue, until=_before(start), newest_first=True)
            at = _before(start) if same == release else position
            place = max(0, bisect_right(bounds, ordered(at), key=ordered) - 1)
            yield Begun(place, starts[place], release)
        seen |= {release} - {""}
        if time.monotonic() >= until:
            return


def _letter_at(letters: Letters, queue: str, **bounds: Any) -> tuple[str, str]:
    """The position and the release of the first letter of a range; its body stays in Redis."""
    if not bounds.get("newest_first"):
        bounds["choice"] = Choice(codes=codes_of(["release"]))
    with closing(letters.fields(queue, page_size=1, **bounds)) as pages:  # type: ignore[type-var]
        for position, fields in next(pages, ()):
            return position, fields.get(b"release", b"").decode("utf-8", "replace")
    return "0-0", ""


def _before(position: str) -> str:
    """The position before another."""
    millis, number = ordered(position)
    return f"{millis}-{number - 1}" if number else f"{millis - 1}-{2**64 - 1}"
