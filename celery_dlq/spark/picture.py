"""A triage as one picture: largest groups, reasons, letters over time, deliveries before death.

It is drawn straight to a PNG file: without a display, and without touching the
state or the style of a program that draws with matplotlib itself.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.errors import MissingExtra
from celery_dlq.export.wholefile import save
from celery_dlq.record import Reason
from celery_dlq.spark.triage import bucket_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from celery_dlq.spark.report import GroupRow, Triage

DOTS_PER_INCH = 120

EARLIEST = datetime(1, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
"""The ends of the calendar."""

MOST_ROWS = 10
"""Groups and tasks that are drawn one by one; the rest is one row."""

# One colour a reason in all pictures: messages that kill in warm tones, tasks that fail
# in blues, messages that nobody can read in violets, the rest in greens and browns.
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
}
OTHER = "#b9bec4"
INK = "#22282e"
FAINT = "#6b747d"
GRID = "#e4e7ea"
CELL_COLOURS = ("#eef2f5", "#4a6f8f")

# The page, in inches. Its height follows the number of rows, so that one letter does not
# get a wall of a bar, and every place is fixed, so that no label can push a panel aside.
_WIDTH = 15.0
_LEFT, _LEFT_WIDTH = 0.45, 8.0
_RIGHT, _RIGHT_WIDTH = 8.95, 5.6
_HEAD = 1.05
_TITLE = 0.55
_FOOT = 0.6
_BETWEEN = 0.35
_ROW = 0.31
_LOWEST_PANEL = 2.6
_FEWEST_ROWS = 3
_GROUP_LABELS, _REASON_LABELS, _TASK_LABELS, _COUNT_LABELS = 3.75, 1.95, 2.5, 0.6
_GAP = 0.1

_FEWEST_BUCKETS = 12
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TICK_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 4, 7, 14, 30, 60, 120, 360, 720)),
)
_MOST_TICKS = 7
_TICK_MARGIN = 0.04
_LONGEST_LABEL = 46
_LONGEST_CAUSE = 24
_LONGEST_NAME = 34
_LONGEST_QUEUES = 85
_DARK_CELL = 0.55
_THOUSAND = 1000
# Each number of deliveries has a column of its own while there are few.
_DELIVERY_BINS = (*((n, n) for n in range(5)), (5, 9), (10, 19), (20, None))
_MOST_COLUMNS = len(_DELIVERY_BINS)

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a task's name is no formula
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
}


def draw(triage: Triage, path: Path | str) -> Path:
    """Draw the dashboard of a triage.

    Args:
        triage: The rows, as `celery_dlq.spark.report.triage` returns them.
        path: The PNG file; replaced if it is there, its folder is made if it is not.

    Returns:
        The file.

    Raises:
        MissingExtra: matplotlib is not installed.
        ExportError: The file cannot be written.
    """
    return save(Path(path), _png(triage))


def elided(text: str, longest: int) -> str:
    """A text on one line, cut in its middle: both ends of a dotted name tell something."""
    line = "".join(c if c.isprintable() else " " for c in text)
    if len(line) <= longest:
        return line
    tail = (longest - 1) * 2 // 3  # the end of a dotted name tells more
    return f"{line[: longest - 1 - tail]}…{line[-tail:]}"


def _png(triage: Triage) -> bytes:
    try:
        from matplotlib import style  # noqa: PLC0415 - imported when used
        from matplotlib.figure import Figure as NewFigure  # noqa: PLC0415
    except ImportError as exc:
        feature = "the picture of a triage"
        raise MissingExtra(feature, "matplotlib", "spark") from exc
    buffer = BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Names in scripts that the font lacks are drawn as boxes; that is no news to a user.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph", category=UserWarning)
        figure = NewFigure(figsize=(_WIDTH, _page_height(triage)), dpi=DOTS_PER_INCH)
        _fill(figure, triage)
        figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _page_height(triage: Triage) -> float:
    upper, lower = _panel_heights(triage)
    return _HEAD + _TITLE + upper + _BETWEEN + _TITLE + lower + _FOOT


def _panel_heights(triage: Triage) -> tuple[float, float]:
    """Heights of the upper and the lower panels, in inches."""
    tasks = len({row.task_name for row in triage.deliveries})
    upper = max(_drawn(len(triage.groups)), len(triage.reasons), _FEWEST_ROWS)
    return upper * _ROW, max(_drawn(tasks) * _ROW, _LOWEST_PANEL)


def _drawn(rows: int) -> int:
    """Rows that are drawn: the first ones, and one for all others."""
    return min(rows, MOST_ROWS + 1)


def _fill(figure: Figure, triage: Triage) -> None:
    upper, lower = _panel_heights(triage)
    top = _FOOT + lower + _TITLE + _BETWEEN
    _headline(figure, triage)
    _groups(_panel(figure, (_LEFT, top, _LEFT_WIDTH, upper), _GROUP_LABELS), triage)
    _reasons(_panel(figure, (_RIGHT, top, _RIGHT_WIDTH, upper), _REASON_LABELS), triage)
    _timeline(_panel(figure, (_LEFT, _FOOT, _LEFT_WIDTH, lower), _COUNT_LABELS), triage)
    _deliveries(_panel(figure, (_RIGHT, _FOOT, _RIGHT_WIDTH, lower), _TASK_LABELS), triage)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Axes with a column for labels at their left; sizes in inches."""

    axes: Axes
    width: float
    height: float
    labels: float

    def title(self, text: str, note: str = "") -> None:
        """A title over the whole panel, and what its numbers are at its right."""
        left, above = -self.labels / self.width, 1 + 0.26 / self.height
        where = self.axes.transAxes
        self.axes.text(left, above, text, transform=where, fontsize=11.5, fontweight="bold")
        self.axes.text(1, above, note, transform=where, ha="right", fontsize=9, color=FAINT)

    def label(self, row: int, text: str) -> None:
        """The name of a row, left-aligned in the column, cut to its width."""
        left, where = -self.labels / self.width, self.axes.get_yaxis_transform()
        _fit(self.axes.text(left, row, text, transform=where, va="center"), self.labels - _GAP)


def _panel(figure: Figure, place: tuple[float, float, float, float], labels: float) -> _Panel:
    left, bottom, width, height = place
    page_width, page_height = figure.get_size_inches()
    axes = figure.add_axes(
        (
            (left + labels) / page_width,
            bottom / page_height,
            (width - labels) / page_width,
            height / page_height,
        )
    )
    return _Panel(axes, width - labels, height, labels)


def _fit(text: Text, room_inches: float) -> None:
    """Cut a text until it has room: letters differ in width, scripts even more."""
    whole = text.get_text()
    longest = len(whole)
    while text.get_window_extent().width > room_inches * DOTS_PER_INCH and longest > 1:
        longest -= 1
        text.set_text(elided(whole, longest))


def _headline(figure: Figure, triage: Triage) -> None:
    width, height = figure.get_size_inches()
    letters = _counted(triage.letters, "dead letter")
    queues = _counted(len(triage.queues), "dead-letter queue")
    about = f"{span_text(triage.first_seen_at, triage.last_seen_at)}  ·  {_listed(triage.queues)}"
    left = _LEFT / width
    title = f"{letters} in {queues}"
    figure.text(left, 1 - 0.55 / height, title, fontsize=17, fontweight="bold")
    line = figure.text(left, 1 - 0.85 / height, about, fontsize=10.5, color=FAINT)
    _fit(line, width - 2 * _LEFT)


def _groups(panel: _Panel, triage: Triage) -> None:
    shown, rest = triage.groups[:MOST_ROWS], triage.groups[MOST_ROWS:]
    bars = [
        _Bar(
            _group_label(group),
            group.letters,
            COLOURS.get(group.main_reason, OTHER),
            f" · {group.fingerprint[:8]}",
        )
        for group in shown
    ]
    if rest:
        letters = sum(group.letters for group in rest)
        bars.append(_Bar(_counted(len(rest), "smaller group"), letters, OTHER))
    title = f"Groups, {MOST_ROWS} largest of {len(triage.groups):,}" if rest else "Groups"
    panel.title(title, "letters · share · fingerprint")
    _bars(panel, bars, total=triage.letters, room_inches=2.1)


def _reasons(panel: _Panel, triage: Triage) -> None:
    panel.title("Reasons, in the colours of all panels", "letters · share")
    bars = [_Bar(r.reason, r.letters, COLOURS.get(r.reason, OTHER)) for r in triage.reasons]
    _bars(panel, bars, total=triage.letters, room_inches=1.3)


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    letters: int
    colour: str
    note: str = ""


def _bars(panel: _Panel, bars: Sequence[_Bar], *, total: int, room_inches: float) -> None:
    """Horizontal bars from the top, with counts and shares at their ends."""
    axes = panel.axes
    axes.barh(
        range(len(bars)),
        [bar.letters for bar in bars],
        height=0.66,
        color=[bar.colour for bar in bars],
    )
    longest = max((bar.letters for bar in bars), default=1)
    axes.set_xlim(0, longest * panel.width / (panel.width - room_inches))
    axes.set_ylim(panel.height / _ROW - 0.5, -0.5)
    axes.set_axis_off()
    for row, bar in enumerate(bars):
        panel.label(row, bar.label)
        axes.annotate(
            f"{bar.letters:,} · {percent(bar.letters, total)}{bar.note}",
            (bar.letters, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=FAINT,
        )


def _timeline(panel: _Panel, triage: Triage) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter  # noqa: PLC0415

    axes = panel.axes
    panel.title("Letters over time, UTC", f"letters per {triage.bucket.removeprefix('1 ')}")
    if not triage.timeline:
        axes.set_axis_off()
        return
    width = int(bucket_width(triage.bucket).total_seconds())
    starts = _stack(axes, triage, width)
    left, right = window(min(starts), max(starts) + width, width)
    marks = ticks(left, right)
    axes.set_xlim(left, right)
    axes.set_xticks(marks, [tick_label(mark, right - left) for mark in marks])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="y", colors=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _stack(axes: Axes, triage: Triage, width: int) -> list[float]:
    """Draw the bars, the most frequent reason at the bottom; returns where they start."""
    floor: Counter[float] = Counter()
    for reason in [row.reason for row in triage.reasons]:
        bars = {
            row.bucket_start.timestamp(): row.letters
            for row in triage.timeline
            if row.reason == reason
        }
        axes.bar(
            list(bars),
            list(bars.values()),
            width=width,
            bottom=[floor[start] for start in bars],
            align="edge",
            color=COLOURS.get(reason, OTHER),
            edgecolor="white",
            linewidth=0.4,
        )
        floor.update(bars)
    return list(floor)


def window(first: float, last: float, width: int) -> tuple[float, float]:
    """Give the ends of the time axis: never so near that one bar fills it."""
    missing = width * _FEWEST_BUCKETS - (last - first)
    margin = max(missing / 2, width / 2)
    return first - margin, last + margin


def ticks(left: float, right: float) -> list[float]:
    """Round times with room for their labels, away from the corners."""
    span = right - left
    step = next((step for step in _TICK_STEPS if span <= step * _MOST_TICKS), span / _MOST_TICKS)
    first, edge = math.ceil(left / step), span * _TICK_MARGIN
    marks = [number * step for number in range(first, math.floor(right / step) + 1)]
    return [mark for mark in marks if left + edge <= mark <= right - edge]


def tick_label(seconds: float, span: float) -> str:
    """As much of a time as tells two ticks apart; the date is in the headline."""
    # The margin of an axis may lie before the year 1, or after the year 9999.
    first, last = EARLIEST.timestamp(), LATEST.timestamp()
    time = datetime.fromtimestamp(min(max(seconds, first), last), timezone.utc)
    if span <= 10 * _MINUTE:
        return f"{time:%H:%M:%S}"
    if span <= _DAY:
        return f"{time:%H:%M}"
    return f"{time:%m-%d %H:%M}" if span <= 5 * _DAY else f"{time:%Y-%m-%d}"


def _deliveries(panel: _Panel, triage: Triage) -> None:
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - imported when used

    columns = bins([row.deliveries for row in triage.deliveries])
    rows = delivery_rows(triage, columns)
    shares = [[count / max(sum(cells), 1) for count in cells] for _label, cells in rows]
    colours = LinearSegmentedColormap.from_list("letters", CELL_COLOURS)
    axes = panel.axes
    panel.title("Deliveries before death", "letters by task and deliveries")
    axes.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for row, (label, cells) in enumerate(rows):
        panel.label(row, label)
        for column, count in enumerate(cells):
            shade = "white" if shares[row][column] > _DARK_CELL else INK
            text = _short(count) if count else ""
            axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8.5)
    axes.set_xticks(range(len(columns)), [bin_label(*bounds) for bounds in columns])
    axes.set_yticks([])
    axes.set_xlim(-0.5, _MOST_COLUMNS - 0.5)
    axes.set_ylim(panel.height / _ROW - 0.5, -0.5)
    axes.xaxis.set_ticks_position("top")
    axes.tick_params(axis="x", pad=0, labelsize=8.5)
    axes.spines["bottom"].set_visible(False)
    _white_lines(axes, len(columns), len(rows))


def _white_lines(axes: Axes, columns: int, rows: int) -> None:
    """Lines between the cells, instead of a frame around them."""
    for column in range(columns + 1):
        axes.axvline(column - 0.5, color="white", linewidth=2)
    for row in range(rows + 1):
        axes.axhline(row - 0.5, color="white", linewidth=2)


def delivery_rows(
    triage: Triage, columns: Sequence[tuple[int, int | None]]
) -> list[tuple[str, list[int]]]:
    """Label and letters by bin: the tasks with most letters, and one row for all others."""
    totals: Counter[str] = Counter()
    for row in triage.deliveries:
        totals[row.task_name] += row.letters
    shown = [name for name, _letters in totals.most_common(MOST_ROWS)]
    rest = len(totals) - len(shown)
    rows = [(elided(name, _LONGEST_NAME), [0] * len(columns)) for name in shown]
    if rest:
        rows.append((_counted(rest, "other task"), [0] * len(columns)))
    place = {name: index for index, name in enumerate(shown)}
    for row in triage.deliveries:
        cells = rows[place.get(row.task_name, len(shown))][1]
        cells[_bin_of(row.deliveries, columns)] += row.letters
    return rows


def bins(deliveries: Sequence[int]) -> list[tuple[int, int | None]]:
    """The columns: single numbers while they are few, else ranges; without empty ends."""
    least, most = min(deliveries, default=0), max(deliveries, default=0)
    if most - least < _MOST_COLUMNS:
        return [(n, n) for n in range(least, most + 1)]
    first = _bin_of(least, _DELIVERY_BINS)
    return list(_DELIVERY_BINS[first : _bin_of(most, _DELIVERY_BINS) + 1])


def _bin_of(deliveries: int, bins: Sequence[tuple[int, int | None]]) -> int:
    starts = [place for place, (start, _end) in enumerate(bins) if start <= deliveries]
    return starts[-1] if starts else 0


def bin_label(start: int, end: int | None) -> str:
    """What stands over a column of deliveries."""
    if end is None:
        return f"{start}+"
    return str(start) if start == end else f"{start}-{end}"


def _group_label(group: GroupRow) -> str:
    cause = (group.exception_type or group.main_reason).rpartition(".")[2]
    cause = elided(cause, _LONGEST_CAUSE)
    return f"{elided(group.task_name, _LONGEST_LABEL - len(cause))} · {cause}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(part: int, whole: int) -> str:
    """A share for people."""
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"  # noqa: PLR2004 - one per cent


def _short(number: int) -> str:
    """A count in at most four characters, for a cell."""
    if number < _THOUSAND:
        return str(number)
    scaled, unit = float(number), ""
    for unit in "kMG":  # noqa: B007 - the last one is the answer
        scaled /= _THOUSAND
        if scaled < _THOUSAND - 0.5:
            break
    return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"  # noqa: PLR2004


def span_text(first: datetime | None, last: datetime | None) -> str:
    """From when to when, as short as it can be told."""
    if first is None or last is None:
        return "at unknown times"
    start, end = (time.astimezone(timezone.utc) for time in (first, last))
    if start == end:
        return f"{start:%Y-%m-%d %H:%M:%S} UTC"
    if end - start < timedelta(hours=1):
        day = "" if start.date() == end.date() else "%Y-%m-%d "
        return f"{start:%Y-%m-%d %H:%M:%S} to {end:{day}%H:%M:%S} UTC"
    return f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"


def _listed(names: Sequence[str]) -> str:
    """As many names as have room, then how many more there are."""
    shown: list[str] = []
    for name in (elided(name, _LONGEST_NAME) for name in names):
        if shown and sum(map(len, shown)) + len(name) > _LONGEST_QUEUES:
            break
        shown.append(name)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
