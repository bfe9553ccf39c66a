"""Speed of exports to Parquet files: ``python -m benchmarks export``.

Each pair exports all letters in a new process, then writes the same Arrow tables with the
same settings from memory in another. A third does what no export in Python can do without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import spread
from benchmarks.letters import fill
from benchmarks.operate import Facts, row_of, run
from servers import RedisServer


@dataclass(frozen=True)
class Size:
    """The amount of work."""

    letters: int
    pairs: int


FULL = Size(letters=200_000, pairs=9)
QUICK = Size(letters=200, pairs=1)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result."""
    ours: list[Facts] = []
    bare: list[Facts] = []
    least: list[Facts] = []
    with RedisServer() as server:
        fill(server.client(), size.letters)
        for number in range(size.pairs):
            with tempfile.TemporaryDirectory() as folder:
                ours.append(run("export", server, letters=size.letters, folder=folder))
                bare.append(run("parquet", server, folder=folder))
                least.append(run("least", server, letters=size.letters, folder=folder))
            tell(f"export: pair {number + 1} of {size.pairs}")
    rows = [
        row_of("export", ours),
        row_of("Parquet from memory, the same columns", bare),
        row_of("read, inflated, split and written, one after the other", least),
    ]
    rows[0]["speed_ratio"] = spread(
        memory["seconds"] / export["seconds"] for export, memory in zip(ours, bare, strict=True)
    )
    yield {"cell": f"{size.letters:,} letters", "rows": rows}
