"""The cost of a queue as it grows: ``python -m benchmarks growth``.

A Redis is filled anew for each size, and every operation is a process of its own, so that its
memory is its own: the first page of ``list``, ``queues``, ``groups``, the export of all, and a
redrive, which ends the queue and so comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.letters import GROUPS, fill
from benchmarks.operate import LOOKS, Facts, run
from servers import RedisServer

_BULK = ("export", "redrive")
_TELL_EVERY = 50_000


@dataclass(frozen=True)
class Size:
    """Numbers of letters, and how many of them are redriven at most."""

    letters: tuple[int, ...]
    redriven: int


FULL = Size(letters=(10_000, 100_000, 1_000_000), redriven=100_000)
QUICK = Size(letters=(100, 200), redriven=100)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result: a row for each operation and size."""
    rows: list[dict[str, Any]] = []
    with RedisServer() as server:
        for letters in size.letters:
            rows += _rows(server, letters, min(letters, size.redriven), tell)
    rows.sort(key=lambda row: [*LOOKS, *_BULK].index(row["operation"]))  # stable: sizes stay
    yield {"cell": f"first looks, export, redrive; {GROUPS} groups", "rows": rows}


def _rows(
    server: RedisServer, letters: int, redriven: int, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    client = server.client()
    client.flushall()
    empty = client.info("memory")["used_memory"]

    def filled(done: int) -> None:
        if done % _TELL_EVERY == 0:
            tell(f"growth: {done:,} of {letters:,} letters stored")

    message_bytes = fill(client, letters, tell=filled)
    used = client.info("memory")["used_memory"] - empty
    for operation in (*LOOKS, *_BULK):
        facts = run(operation, server, letters=redriven if operation == "redrive" else letters)
        tell(f"growth: {operation} at {letters:,} letters: {facts['seconds']:.3f} s")
        yield _row(operation, letters, facts) | {
            "redis_bytes_each": used / letters,
            "message_bytes_each": message_bytes / letters,
        }


def _row(operation: str, letters: int, facts: Facts) -> dict[str, Any]:
    bulk = operation in _BULK
    redis = facts["server_cpu_seconds"] * 1e3 if bulk else facts["commands_ms"]
    partly = operation == "redrive" and facts["letters"] < letters
    return {
        **facts,
        "name": f"{operation} of {facts['letters']:,}" if partly else operation,
        "partly": partly,
        "operation": operation,
        "size": letters,
        "per_second": facts["letters"] / facts["seconds"] if bulk else None,
        "redis_ms": redis,
    }
