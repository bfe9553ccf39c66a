"""Speed of redrives: ``python -m benchmarks redrive``.

In turn: kombu's ``Producer.batch()`` alone, the redrive, ``Producer.batch()`` again, and a loop
of ``apply_async``; each in a process of its own, on one Redis that is broker and store, and
each after one message, so that all are connected. What the bare limit is: the same messages,
ready in memory, nothing read, claimed or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import spread
from benchmarks.letters import fill
from benchmarks.operate import Facts, row_of, run
from servers import RedisServer

OURS, BARE, LOOP = "redrive", "`Producer.batch()` alone", "`apply_async` in a loop"


@dataclass(frozen=True)
class Size:
    """The amount of work a turn."""

    letters: int
    by_loop: int
    rounds: int


FULL = Size(letters=10_000, by_loop=1_500, rounds=15)
QUICK = Size(letters=200, by_loop=50, rounds=1)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result."""
    found: dict[str, list[Facts]] = {OURS: [], BARE: [], LOOP: []}
    ratios = []
    with RedisServer() as server:
        client = server.client()
        for number in range(size.rounds):
            before = run("batch", server, letters=size.letters)
            client.flushall()
            fill(client, size.letters + 1)
            found[OURS].append(run("redrive", server, letters=size.letters, first=1))
            client.flushall()
            after = run("batch", server, letters=size.letters)
            client.flushall()
            found[LOOP].append(run("apply_async", server, letters=size.by_loop))
            client.flushall()
            found[BARE] += [before, after]
            bare = (before["seconds"] + after["seconds"]) / 2
            ratios.append(bare / found[OURS][-1]["seconds"])
            tell(f"redrive: round {number + 1} of {size.rounds}")
    rows = [row_of(name, facts) for name, facts in found.items()]
    rows[0]["speed_ratio"] = spread(ratios)
    yield {"cell": f"{size.letters:,} letters a turn", "rows": rows}
