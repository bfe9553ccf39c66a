"""What every screen is drawn with: rich, made safe for texts of any origin, and live counts.

Task names, ids and exception messages come from whoever may publish. rich lets their escape
sequences through, and reads markup in plain strings. So foreign text is shown by `line`, `block`
and `Table` only: there it neither steers the terminal nor means anything to rich.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import rich.table
from rich import box
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from celery_dlq.letters.printable import one_line, printable

if TYPE_CHECKING:
    from celery_dlq.store.instructions import Hold

_CLOCK_SKEW_SECONDS = 2
_LEFT: JustifyMethod = "left"


class Table(rich.table.Table):
    """A table that shows plain strings as they are."""

    def add_row(self, *cells: Any, **looks: Any) -> None:
        """Add a row."""
        super().add_row(*(block(c) if isinstance(c, str) else c for c in cells), **looks)


def block(text: str, style: str = "") -> Text:
    """A text of several lines."""
    return Text(printable(text), style)


def line(text: str, style: str = "") -> Text:
    """A text of one line: a name that holds a line end would forge a row of a table."""
    return Text(one_line(text), style)


def two_lines(first: Text, second: Text) -> Text:
    """Two texts, one below the other."""
    return Text.assemble(first, "\n", second)


def about_hold(hold: Hold, *names: str) -> Text:
    """What is held, why and by whom, a line each."""
    shown = [*map(line, names), *filter(None, (line(hold.reason), line(hold.actor, "dim")))]
    return Text("\n").join(shown)


def table(title: str, *columns: str | tuple[str, JustifyMethod]) -> Table:
    """An empty table; too wide columns are folded, but not those whose name begins with ``!``."""
    made = Table(
        title=line(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        name, justify = column if isinstance(column, tuple) else (column, _LEFT)
        no_wrap = name.startswith("!")
        made.add_column(name.lstrip("!"), justify=justify, no_wrap=no_wrap, overflow="fold")
    return made


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line; it is not wrapped, so that programs can search it."""
    console.print(line(text, style), soft_wrap=True)


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago: ``12 s ago``, ``3 h ago``; or ``in 1 d``, if a worker's clock is wrong."""
    if moment is None:
        return "-"
    seconds = int(((now or datetime.now(timezone.utc)) - moment).total_seconds())
    pattern = "in {} {}" if seconds <= -_CLOCK_SKEW_SECONDS else "{} {} ago"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if abs(seconds) >= 2 * size:
            return pattern.format(abs(seconds) // size, unit)
    return f"{max(0, seconds)} s ago"


def utc(moment: datetime | None) -> str:
    """A time to the second, in UTC."""
    return "-" if moment is None else f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def letters_text(count: int) -> str:
    """``1 letter`` or ``1,234 letters``."""
    return f"{count:,} letter{'' if count == 1 else 's'}"


class Count:
    """A count on the screen; called with the number of letters to add."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, letters: int) -> None:
        """Add to the count."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, letters)

    def expect(self, total: int) -> None:
        """Show a bar from now on, because the total has become known."""
        if self._progress is not None and self._task is not None:
            *shown, elapsed = self._progress.columns
            self._progress.columns = (*shown, *_bar(), elapsed)
            self._progress.update(self._task, total=total)


@contextmanager
def counting(
    console: Console, verb: str, *, quiet: bool = False, total: int | None = None
) -> Iterator[Count]:
    """Show a live count on a terminal, and a bar if the total is known; nothing elsewhere."""
    if quiet or not console.is_terminal:
        yield Count()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:,} " + verb),
        *(() if total is None else _bar()),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Count(progress, progress.add_task(verb, total=total))


def _bar() -> tuple[ProgressColumn, ...]:
    return BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
