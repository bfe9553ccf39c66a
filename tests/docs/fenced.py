"""The code blocks of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILT = ROOT / "docs" / "_build"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.is_relative_to(_BUILT)),
]

_FENCE = re.compile(r"^( *)```(\S.*)?$")
_MADE = re.compile(r"<!-- made: (.+) -->")
"""Begins what `reference` writes: signatures, and files of examples/, which have tests."""


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: Where it stands, e.g. ``docs/reference/events.md``.
        line: The line of its first line of code, from 1.
        language: What follows the back quotes; empty if nothing does.
        text: The code.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, as editors open it."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Commands of a console block, each with the output that the page shows.

        Lines that begin with ``$`` are commands and the others are output; in a block
        without ``$`` every line is a command.
        """
        lines = self.text.replace("\\\n", "").splitlines()
        if not any(line.startswith("$ ") for line in lines):
            return [(line, []) for line in lines if line.strip()]
        found: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def page_name(page: Path) -> str:
    """A page as it is called in messages and lists."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = iter(enumerate(page.read_text("utf-8").splitlines(), 1))
    for number, line in lines:
        if made := _MADE.match(line):
            next(each for each in lines if each[1] == f"<!-- end of {made[1]} -->")
        begins = _FENCE.match(line)
        if begins is None:
            continue
        code = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            code.append(inner.removeprefix(begins[1]))
        else:
            raise ValueError(f"expected an end of the block at {page_name(page)}:{number}")
        yield Block(page_name(page), number + 1, begins[2] or "", "\n".join(code) + "\n")
