"""Speed of redrives: ``python -m benchmarks redrive``.

In turn: kombu's ``Producer.batch()`` alone, the redrive, one of letters in another database, one of
letters in the files of an export, one in a process that has sent none before, ``Producer.batch()``
again, and a loop of ``apply_async``; each in a process of its own, on one Redis that is broker and
store, and all but the fourth after one message, so that they are connected. What the bare limit is:
the same messages, ready in memory, nothing read, claimed or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import redis
from benchmarks.contest import spread
from benchmarks.letters import fill
from benchmarks.operate import Facts, row_of, run
from servers import RedisServer

OURS, BARE, LOOP = "redrive", "`Producer.batch()` alone", "`apply_async` in a loop"
ACROSS = "redrive, letters in another database of the server"
FILES = "redrive, letters in files"
FIRST = "redrive, with the start of the first one in a process"


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
    found: dict[str, list[Facts]] = {name: [] for name in (OURS, ACROSS, FILES, FIRST, BARE, LOOP)}
    ratios: dict[str, list[float]] = {name: [] for name in (OURS, ACROSS, FILES, FIRST)}
    with RedisServer() as server:
        client = server.client()
        for number in range(size.rounds):
            before = run("batch", server, letters=size.letters)
            for name in ratios:
                client.flushall()
                found[name].append(_redrive(server, name, size.letters))
            client.flushall()
            after = run("batch", server, letters=size.letters)
            client.flushall()
            found[LOOP].append(run("apply_async", server, letters=size.by_loop))
            client.flushall()
            found[BARE] += [before, after]
            bare = (before["seconds"] + after["seconds"]) / 2
            for name, speeds in ratios.items():
                speeds.append(bare / found[name][-1]["seconds"])
            tell(f"redrive: round {number + 1} of {size.rounds}")
    rows = [row_of(name, facts) for name, facts in found.items()]
    for row, speeds in zip(rows, ratios.values(), strict=False):
        row["speed_ratio"] = spread(speeds)
    yield {"cell": f"{size.letters:,} letters a turn", "rows": rows}


def _redrive(server: RedisServer, name: str, letters: int) -> Facts:
    """Fill a database, and redrive its letters in a new process."""
    database, first = int(name == ACROSS), int(name != FIRST)
    place = f"{server.url.removesuffix('0')}{database}"
    with redis.Redis.from_url(place) as beside, TemporaryDirectory() as folder:
        fill(beside, letters + first)
        options = {"letters": letters, "first": first, "letters_url": place}
        if name == FILES:
            run("export", server, letters=letters + first, folder=folder)
            beside.flushall()
            options["folder"] = f"{folder}/letters"
        return run("redrive", server, **options)
