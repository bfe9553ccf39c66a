"""Charts of a triage, as SVG for the page.

Drawing needs no display, and leaves the state and style of a program that uses
matplotlib itself alone.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING

from celery_dlq.errors import MissingExtra
from celery_dlq.letters.printable import one_line
from celery_dlq.letters.record import Reason
from celery_dlq.spark.triage.rows import EARLIEST, LATEST
from celery_dlq.spark.triage.trends import bucket_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from celery_dlq.spark.triage.rows import Triage

MAX_ROWS = 10
"""Groups and tasks with a row of their own; all others share one row."""

# One colour per reason in all charts: messages that kill in warm tones, tasks that fail in
# blues, unreadable messages in violets, the others in greens and browns.
COLOURS: Mapping[str, str] = {
    Reason.MAX_DELIVERIES_EXCEEDED.value: "#c8553d",
    Reason.WORKER_LOST.value: "#8c2f39",
    Reason.TIME_LIMIT_EXCEEDED.value: "#e6a15c",
    Reason.FAILED.value: "#3d6b99",
    Reason.MAX_RETRIES_EXCEEDED.value: "#7fa8cc",
    Reason.REJECTED.value: "#27465f",
    Reason.UNKNOWN_TASK.value: "#7b5e99",
    Reason.INVALID_MESSAGE.value: "#b79bcf",
    Reason.UNDECODABLE_MESSAGE.value: "#523a68",
    Reason.EXPIRED.value: "#7d9f6b",
    Reason.RETRY_NOT_PUBLISHED.value: "#3f7d74",
    Reason.ADOPTED.value: "#a68a64",
    Reason.OPERATOR.value: "#5c6b3c",
}
OTHER = "#b9bec4"
INK, FAINT, GRID = "#22282e", "#5d6872", "#8b95a055"
"""Colours of names, numbers and lines; the page replaces the first two in dark mode."""

_CELLS = ("#dfe7ee", "#4a6f8f")
_DARK_CELL = 0.55

# Inches
_ROW, _LABEL = 0.31, 2.1
_TIMELINE, _DELIVERIES = (10.4, 2.6), 4.9

_MIN_BUCKETS = 12
_MAX_FULL_COUNT = 10_000
_MAX_BARS = 600  # a bar is at least this fraction of the axis, to be visible
_FONT_POINTS, _POINTS_PER_INCH = 9.5, 72
# Columns of deliveries: the first number of each.
_DELIVERY_BINS = {0: "0", 1: "1", 2: "2", 3: "3", 4: "4", 5: "5-9", 10: "10-19", 20: "20+"}

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": _FONT_POINTS,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a task's name begins no formula
    "axes.edgecolor": GRID,
    "axes.grid": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "svg.hashsalt": "celery_dlq",
}


def timeline_svg(triage: Triage) -> str:
    """Draw letters over time as SVG; the legend is on the page."""
    return _svg(_timeline, triage, *_TIMELINE)


def deliveries_svg(triage: Triage) -> str:
    """Draw deliveries before death as SVG."""
    tasks = len({row.task_name for row in triage.deliveries})
    return _svg(_deliveries, triage, _DELIVERIES, min(tasks, MAX_ROWS + 1) * _ROW + 0.4)


def elided(text: str, longest: int) -> str:
    """Put a text on one line and cut its middle: both ends of a dotted name matter."""
    line = one_line(text)
    if len(line) <= longest:
        return line
    tail = (longest - 1) * 2 // 3  # the end of a dotted name matters more
    return f"{line[: longest - 1 - tail]}…{line[-tail:]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 letter``, ``1,200 letters``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(part: int, whole: int) -> str:
    """A share as a percentage; a tiny one is not rounded to zero."""
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"  # noqa: PLR2004 - one per cent


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


@contextmanager
def styled() -> Iterator[None]:
    """Draw in our style, without warnings of letters that the font lacks."""
    try:
        from matplotlib import style  # noqa: PLC0415 - imported when used
    except ImportError as exc:
        feature = "the report of a triage"
        raise MissingExtra(feature, "matplotlib", "spark") from exc
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Scripts that the font lacks are drawn as boxes; the warning does not help a user.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph", category=UserWarning)
        yield


def _svg(chart: Callable[[Axes, Triage], None], triage: Triage, width: float, height: float) -> str:
    """Draw one chart as an ``<svg>`` element, without the XML header and metadata."""
    buffer = BytesIO()
    with styled():
        from matplotlib.figure import Figure as NewFigure  # noqa: PLC0415 - imported when used

        figure = NewFigure(figsize=(width, height), layout="constrained")
        chart(figure.subplots(), triage)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :].strip()


def _fitted(text: str, inches: float) -> str:
    """Cut a name to a width in inches; characters differ in width."""
    from matplotlib.textpath import TextPath  # noqa: PLC0415 - imported when used

    room = inches * _POINTS_PER_INCH
    longest = min(len(text), int(room))  # no character is narrower than a point
    while True:
        line = elided(text, longest)
        width = TextPath((0, 0), line, size=_FONT_POINTS).get_extents().width
        if width <= room or longest <= 1:
            return line
        longest = min(longest - 1, int(longest * room / width))


def _timeline(axes: Axes, triage: Triage) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter  # noqa: PLC0415

    if not triage.timeline:
        axes.set_axis_off()
        return
    dates = import_module("matplotlib.dates")  # untyped
    days = bucket_width(triage.bucket) / timedelta(days=1)
    starts = [float(dates.date2num(row.bucket_start)) for row in triage.timeline]
    # A margin keeps a single bar from filling the axis; matplotlib fails beyond the calendar.
    first, last = min(starts), max(starts) + days
    margin = max((_MIN_BUCKETS * days - (last - first)) / 2, days / 2)
    width = max(0.94 * days, (last - first) / _MAX_BARS)
    floor: Counter[float] = Counter()
    for reason in [row.reason for row in triage.reasons]:  # the most frequent at the bottom
        bars = {
            start: row.letters
            for start, row in zip(starts, triage.timeline, strict=True)
            if row.reason == reason
        }
        axes.bar(
            list(bars),
            list(bars.values()),
            width=width,
            bottom=[floor[start] for start in bars],
            align="edge",
            color=COLOURS.get(reason, OTHER),
            clip_on=False,
        )
        floor.update(bars)
    earliest, latest = (float(dates.date2num(end)) for end in (EARLIEST, LATEST))
    axes.set_xlim(max(first - margin, earliest), min(last + margin, latest))
    locator = dates.AutoDateLocator(tz=timezone.utc, minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=timezone.utc))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="y", colors=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.8, clip_on=False)
    axes.set_axisbelow(True)


def _deliveries(axes: Axes, triage: Triage) -> None:
    """Draw cells by task and deliveries, shaded by their share of the task's letters."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - imported when used

    if not triage.deliveries:
        axes.set_axis_off()
        return
    shade = LinearSegmentedColormap.from_list("letters", _CELLS)
    rows = _delivery_rows(triage)
    for place, (_name, cells) in enumerate(rows):
        for column, count in enumerate(cells):
            if count:
                share = count / sum(cells)
                axes.barh(
                    place, 0.94, left=column - 0.47, height=0.88, color=shade(share), clip_on=False
                )
                colour = "white" if share > _DARK_CELL else "black"
                axes.text(
                    column, place, short(count), ha="center", va="center", color=colour, size=8.5
                )
    axes.set_xticks(range(len(_DELIVERY_BINS)), list(_DELIVERY_BINS.values()))
    axes.set_xlim(-0.5, len(_DELIVERY_BINS) - 0.5)
    axes.set_yticks(range(len(rows)), [name for name, _cells in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_ticks_position("top")
    axes.spines["bottom"].set_visible(False)


def _delivery_rows(triage: Triage) -> list[tuple[str, list[int]]]:
    """Labels and counts by bin: the tasks with most letters, and one row for all others."""
    totals: Counter[str] = Counter()
    for row in triage.deliveries:
        totals[row.task_name] += row.letters
    shown = [name for name, _letters in totals.most_common(MAX_ROWS)]
    labels = [_fitted(name, _LABEL) for name in shown]
    if others := len(totals) - len(shown):
        labels.append(counted(others, "other task"))
    rows = [(label, [0] * len(_DELIVERY_BINS)) for label in labels]
    place = {name: index for index, name in enumerate(shown)}
    for row in triage.deliveries:
        cells = rows[place.get(row.task_name, len(shown))][1]
        cells[sum(start <= row.deliveries for start in _DELIVERY_BINS) - 1] += row.letters
    return rows


def short(number: int) -> str:
    """A count, abbreviated to fit a cell."""
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415 - imported when used

    return f"{number:,}" if number < _MAX_FULL_COUNT else EngFormatter(places=0, sep="")(number)
