"""Bars of letters over time as SVG, and numbers, names and times as the page shows them.

The bars have no text and no colours of their own: they fit any screen, and the page's style gives
them the colour of their state, in light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dlq.spark.triage.rows import Triage

COLOURS: Mapping[str, str] = {
    "new": "#b3422c",
    "known": "#3d6b99",
    "over": "#76818c",
    "smaller": "#c3c9cf",
}
"""The colours of causes by their state, from the bottom of a bar to its top."""

MAX_TASKS = 10
"""Tasks with a row of their own; all others share one row."""

DELIVERY_BINS = {0: "0", 1: "1", 2: "2", 3: "3", 4: "4", 5: "5–9", 10: "10–19", 20: "20+"}
"""Columns of deliveries: the first number of each."""

_HEIGHT = 100.0
_MAX_BARS = 600  # a bar is at least this fraction of the axis, to be visible
_MAX_FULL_COUNT = 10_000
_SIZES = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


def draw_bars(
    counts: Mapping[int, Mapping[str, int]], first: int, last: int, marks: Iterable[float] = ()
) -> str:
    """Draw letters by bucket and state, from one bucket to another; lines at ``marks``."""
    buckets = max(last - first + 1, 1)
    most = max((sum(parts.values()) for parts in counts.values()), default=0) or 1
    wide = max(0.92, buckets / _MAX_BARS)
    shapes = []
    for bucket, parts in sorted(counts.items()):
        floor = _HEIGHT
        for state in COLOURS:
            # A single letter among thousands is a line that can be seen.
            tall = max(_HEIGHT * parts.get(state, 0) / most, 2.0) if parts.get(state) else 0.0
            floor -= tall
            if tall:
                shapes.append(
                    f'<rect class="{state}" x="{bucket - first + 0.04:.2f}" y="{floor:.1f}" '
                    f'width="{wide:.2f}" height="{tall:.1f}"/>'
                )
    shapes += (
        f'<line x1="{at - first:.2f}" x2="{at - first:.2f}" y1="0" y2="{_HEIGHT:.0f}"/>'
        for at in marks
        if first <= at <= last + 1
    )
    box = f"0 0 {buckets} {_HEIGHT:.0f}"
    return f'<svg viewBox="{box}" preserveAspectRatio="none">{"".join(shapes)}</svg>'


def delivery_rows(triage: Triage) -> list[tuple[str, list[int]]]:
    """Names and counts by `DELIVERY_BINS`: the tasks with most letters, one row for all others."""
    totals: Counter[str] = Counter()
    for row in triage.deliveries:
        totals[row.task_name] += row.letters
    shown = [name for name, _letters in totals.most_common(MAX_TASKS)]
    names = [*shown]
    if others := len(totals) - len(shown):
        names.append(counted(others, "other task"))
    rows = [(name, [0] * len(DELIVERY_BINS)) for name in names]
    place = {name: index for index, name in enumerate(shown)}
    for row in triage.deliveries:
        cells = rows[place.get(row.task_name, len(shown))][1]
        cells[sum(start <= row.deliveries for start in DELIVERY_BINS) - 1] += row.letters
    return rows


def parts_of(name: str) -> Iterator[str]:
    """The parts of a dotted name, which may stand on lines of their own."""
    part = ""
    for letter in name:
        part += letter
        if letter in "._-/@: ":
            yield part
            part = ""
    yield part


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 letter``, ``1,200 letters``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(part: float, whole: int) -> str:
    """A share as a percentage; a tiny one is not rounded to zero."""
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"  # noqa: PLR2004 - one per cent


def short_number(number: int) -> str:
    """A count in at most five characters."""
    for size, name in _SIZES:
        if number >= max(_MAX_FULL_COUNT, 0.9995 * size):
            return f"{number / size:.0f}{name}"
    return f"{number:,}"


def span_text(first: datetime | None, last: datetime | None) -> str:
    """A time span as short text."""
    if first is None or last is None:
        return "at unknown times"
    start, end = (time.astimezone(timezone.utc) for time in (first, last))
    if start == end:
        return f"{start:%Y-%m-%d %H:%M:%S} UTC"
    if end - start < timedelta(hours=1):
        day = "" if start.date() == end.date() else "%Y-%m-%d "
        return f"{start:%Y-%m-%d %H:%M:%S} to {end:{day}%H:%M:%S} UTC"
    return f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
