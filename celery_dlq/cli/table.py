"""What every screen is drawn with: tables of rich, made safe for texts of any origin, live counts.

Task names, ids and exception messages come from whoever may publish. rich lets their escape
sequences through, and reads markup in plain strings. So foreign text is shown by `line_text`,
`block_text`, `print_table` and `print_facts` only: there it neither steers the terminal nor means
anything to rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
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
from rich.table import Table
from rich.text import Text

from celery_dlq.letters.printable import one_line, printable

if TYPE_CHECKING:
    from celery_dlq.store.holds import Hold

_CLOCK_SKEW_SECONDS = 2
_FOLDED_WIDTH = 16  # a name that is folded at less cannot be read

FORGET = "  If one of them is not used any more: `dlq export FOLDER --forget`."
"""Said below names of folders for which letters are kept."""

Cell = str | int | Text | Sequence[str | Text] | None
"""What a table shows in one place: a line, a number, styled text, or several lines."""


def block_text(text: str, style: str = "") -> Text:
    """A text of several lines."""
    return Text(printable(text), style)


def line_text(text: str, style: str = "") -> Text:
    """A text of one line: a name that holds a line end would forge a row of a table."""
    return Text(one_line(text), style)


def text_lines(parts: Iterable[str | Text]) -> Text:
    """Texts below each other; those that are empty are left out."""
    shown = (part if isinstance(part, Text) else line_text(part) for part in parts)
    return Text("\n").join(part for part in shown if part)


def about_hold(hold: Hold, *names: str) -> Text:
    """What is held, why and by whom, a line each."""
    return text_lines((*names, hold.reason, line_text(hold.actor, "dim")))


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]
) -> int:
    """Print a table, if it has rows; returns how many.

    A column whose name begins with ``!`` is not folded, one with ``>`` is of numbers. Where the
    columns do not fit beside each other, each row is a block of lines.
    """
    cells = [[*map(_shown_cell, row)] for row in rows]
    if _least_width(columns, cells) > console.width:
        _print_blocks(console, title, columns, cells)
    elif cells:
        console.print(_drawn_table(title, columns, cells))
    return len(cells)


def _least_width(columns: Sequence[str], cells: Sequence[Sequence[Text]]) -> int:
    """What a table needs to be read; below that, rich leaves columns out."""
    width = 0
    for name, *column in zip(map(Text, columns), *cells, strict=False):
        folded = name.plain[:1] not in ("!", ">")
        longest = max(cell_len(part) for cell in (name, *column) for part in cell.plain.split("\n"))
        width += 2 + (min(longest, _FOLDED_WIDTH) if folded else longest)
    return width


def _print_blocks(
    console: Console, title: str, columns: Sequence[str], cells: Sequence[Sequence[Text]]
) -> None:
    """Print each row as lines, one for each column that has something."""
    if title:
        console.print(line_text(title, "bold"))
    for row in cells:
        for name, cell in zip(columns, row, strict=False):
            if cell.plain:
                label = ", ".join(name.lstrip("!>").split("\n"))
                shown = Text(", ").join(cell.split("\n"))
                console.print(Text(f"{label}: " if label else "", "dim") + shown, overflow="fold")
        console.print()


def _drawn_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[Text]]) -> Table:
    """The table that rich draws."""
    made = Table(
        title=line_text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        made.add_column(
            name.lstrip("!>"),
            justify="right" if name[:1] == ">" else "left",
            no_wrap=name[:1] == "!",
            overflow="fold",
        )
    for row in cells:
        made.add_row(*row)
    return made


def print_facts(
    console: Console, rows: Iterable[Sequence[Cell]], styles: Sequence[str] = ("dim",)
) -> None:
    """Print names and what they have; ``styles`` are those of the columns."""
    grid = Table.grid(padding=(0, 2))
    shown = [[*map(_shown_cell, row)] for row in rows]
    for number in range(max(map(len, shown), default=0)):
        style = styles[number] if number < len(styles) else ""
        grid.add_column(style=style, no_wrap=not number, overflow="fold")
    for row in shown:
        grid.add_row(*row)
    if shown:
        console.print(grid)


def _shown_cell(cell: Cell) -> Text:
    if cell is None:
        return Text("")
    if isinstance(cell, Text):
        return cell
    if isinstance(cell, int):
        return Text(f"{cell:,}")
    return line_text(cell) if isinstance(cell, str) else text_lines(cell)


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line; it is not wrapped, so that programs can search it."""
    console.print(line_text(text, style), soft_wrap=True)


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago: ``12 s ago``, ``3 h ago``; or ``in 1 d``, if a worker's clock is wrong."""
    if moment is None:
        return "-"
    seconds = int(((now or datetime.now(timezone.utc)) - moment).total_seconds())
    pattern = "in {} {}" if seconds <= -_CLOCK_SKEW_SECONDS else "{} {} ago"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if abs(seconds) >= 2 * size:
            return pattern.format(abs(seconds) // size, unit)
    return f"{max(0, seconds)} s ago"


def utc_text(moment: datetime | None) -> str:
    """A time to the second, in UTC."""
    return "-" if moment is None else f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def letters_text(count: int) -> str:
    """``1 letter`` or ``1,234 letters``."""
    return f"{count:,} letter{'' if count == 1 else 's'}"


def successes_text(count: int) -> str:
    """``1 success`` or ``1,234 successes``."""
    return f"{count:,} success{'' if count == 1 else 'es'}"


def unreadable_text(count: int) -> str:
    """``1 entry that is not a letter``, or several."""
    return f"{count:,} entr{'y that is not a letter' if count == 1 else 'ies that are not letters'}"


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
            self._progress.columns = (*shown, *_bar_columns(), elapsed)
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
        *(() if total is None else _bar_columns()),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Count(progress, progress.add_task(verb, total=total))


def _bar_columns() -> tuple[ProgressColumn, ...]:
    return BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
