"""When the letters of a cause came, with a line where each release began: bars for its page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from celery_dlq.letters.packed import codes_of, fields_of
from celery_dlq.store.keys import text_of
from celery_dlq.store.part import Part
from celery_dlq.store.records import Group, ordered, position_at
from celery_dlq.store.scripts import script_text
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.pages.queues import Columns, columns_of_day

LEAST_HOURS = 6
"""Bars of a cause that is some hours old."""

_MOST_BYTES = 1024 * 1024
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
    backend, queue = call.dlq.assembly.backend, call.parts["queue"]
    newest = backend.letters.last_position(queue)
    begun = backend.part(Firsts).begun(queue, starts, newest) if newest else ()
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


class Firsts(Part):
    """Reads single letters of a queue, each for its release."""

    def begun(self, queue: str, starts: Sequence[datetime], newest: str) -> Iterator[Begun]:
        """Yield the releases of which letters came after the first one since the first bar.

        The first letter from the beginning of each bar on says which release died then. If the
        letter before it is of the same release, that began in the bar before. The newest letter
        says it for the last bar.
        """
        bounds, seen, new = [*map(position_at, starts)], set[str](), dict[str, tuple[str, str]]()
        asked = [*bounds, newest]
        # All values but the releases stay in Redis.
        args = (1, _MOST_BYTES, codes_of(["release"]), "", "", "")
        found = self._letters(queue, "select", [(start, newest, *args) for start in asked])
        for start, (position, release) in zip(asked, found, strict=True):
            if release and seen and release not in seen:
                new[release] = start, position
            seen |= {release} - {""}
        back = [(f"({start}", "-", 1, 1, _MOST_BYTES) for start, _position in new.values()]
        earlier = self._letters(queue, "page", back)
        for (release, (start, position)), (_, before) in zip(new.items(), earlier, strict=True):
            at = bisect_right(bounds, ordered(position), key=ordered)
            if before == release:
                at = bisect_left(bounds, ordered(start), key=ordered)
            place = max(0, at - 1)
            yield Begun(place, starts[place], release)

    def _letters(
        self, queue: str, script: str, asked: Sequence[Sequence[Any]]
    ) -> list[tuple[str, str]]:
        """Return position and release of the one letter that each call of a script finds."""
        lua, pipe = script_text(script), self._client.pipeline(transaction=False)
        self._client.script_load(lua.text)
        for args in asked:
            pipe.execute_command("EVALSHA", lua.digest, 1, self._keys.letters(queue), *args)
        return [_release_of(entries) for _more, entries, *_last in pipe.execute()]


def _release_of(entries: Sequence[Any]) -> tuple[str, str]:
    for position, parts in entries:
        return text_of(position), fields_of(parts).get(b"release", b"").decode("utf-8", "replace")
    return "0-0", ""
