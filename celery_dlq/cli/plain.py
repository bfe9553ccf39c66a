"""Tables and text without rich, for machines where only the core is installed.

The few names of rich that our screens use, with the same meaning: what an operator
finds in a worker's container has to work there, with nothing to install first.
Colours, bars and live counts are what rich adds.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import click

from celery_dlq.letters.printable import printable

box = SimpleNamespace(SIMPLE_HEAD=None)

_GAP = "  "
_NARROWEST = 8


def escape(text: str) -> str:
    """The text itself: nothing here means markup."""
    return text


class Text(str):
    """A text that is printable; its style is dropped."""

    __slots__ = ()

    def __new__(cls, text: str = "", _style: str = "") -> Text:  # noqa: PYI034 - Self came with 3.11
        """Make one; a style is for rich."""
        return super().__new__(cls, printable(text))

    @classmethod
    def assemble(cls, *parts: Any) -> Text:
        """One text of several; a part may be a pair of text and style."""
        return cls("".join(part[0] if isinstance(part, tuple) else str(part) for part in parts))


@dataclass(frozen=True, slots=True)
class Padding:
    """Something with spaces before it.

    Attributes:
        what: A text.
        pad: Lines above, spaces on the right, lines below, spaces on the left.
    """

    what: Any
    pad: tuple[int, int, int, int]


@dataclass(slots=True)
class _Column:
    name: str
    right: bool
    fixed: bool
    cells: list[str] = field(default_factory=list)


class Table:
    """Columns as wide as what is in them, folded where the screen is too narrow."""

    def __init__(self, *, title: str = "", **_looks: Any) -> None:
        """Make an empty one; other arguments are for rich."""
        self._title = title
        self._headed = True
        self._columns: list[_Column] = []

    @classmethod
    def grid(cls, **_looks: Any) -> Table:
        """A table without a head."""
        table = cls()
        table._headed = False
        return table

    def add_column(
        self, name: str = "", *, justify: str = "left", no_wrap: bool = False, **_looks: Any
    ) -> None:
        """Add a column."""
        self._columns.append(_Column(name, justify == "right", no_wrap))

    def add_row(self, *cells: Any) -> None:
        """Add a row; a cell may have several lines."""
        for column, cell in zip(self._columns, cells, strict=False):
            column.cells.append(printable(str(cell)))

    def lines(self, width: int) -> list[str]:
        """The lines to print on a screen of ``width`` characters."""
        widths = self._widths(width)
        made = [self._title] if self._title else []
        if self._headed:
            made += self._row(widths, [column.name for column in self._columns])
            made.append(_GAP.join("-" * n for n in widths))
        for cells in zip(*(column.cells for column in self._columns), strict=False):
            made += self._row(widths, cells)
        return made

    def _widths(self, width: int) -> list[int]:
        names = [len(column.name) if self._headed else 0 for column in self._columns]
        wanted = [
            max([name, *(len(line) for cell in column.cells for line in cell.split("\n"))])
            for name, column in zip(names, self._columns, strict=True)
        ]
        room = width - len(_GAP) * (len(wanted) - 1)
        loose = [n for n, column in enumerate(self._columns) if not column.fixed]
        while loose and sum(wanted) > room:
            widest = max(loose, key=lambda n: wanted[n])
            if wanted[widest] <= _NARROWEST:
                break
            wanted[widest] -= 1
        return wanted

    def _row(self, widths: Sequence[int], cells: Sequence[str]) -> list[str]:
        folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        rows = zip_longest(*folded, fillvalue="")
        return [
            _GAP.join(map(self._aligned, range(len(widths)), row, widths)).rstrip() for row in rows
        ]

    def _aligned(self, column: int, text: str, width: int) -> str:
        return text.rjust(width) if self._columns[column].right else text.ljust(width)


class Console:
    """Prints to standard output; never live."""

    is_terminal = False

    def __init__(self, **_looks: Any) -> None:
        """Arguments are for rich."""

    def print(self, *things: Any, soft_wrap: bool = True) -> None:  # noqa: ARG002 - for rich
        """Print things, with spaces between; a table or a padded text alone."""
        if len(things) == 1 and isinstance(things[0], Table):
            # An empty line below, as rich has it.
            click.echo("\n".join([*things[0].lines(shutil.get_terminal_size().columns), ""]))
        elif len(things) == 1 and isinstance(things[0], Padding):
            before = " " * things[0].pad[3]
            click.echo("\n".join(before + line for line in str(things[0].what).split("\n")))
        else:
            click.echo(" ".join(map(str, things)))


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken at spaces where there are any."""
    lines: list[str] = []
    for line in text.split("\n"):
        rest = line
        while len(rest) > width > 0:
            cut = rest.rfind(" ", 1, width + 1)
            cut = width if cut <= 0 else cut
            lines.append(rest[:cut])
            rest = rest[cut:].lstrip(" ")
        lines.append(rest)
    return lines
