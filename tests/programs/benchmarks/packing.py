"""What packing a letter costs: ``PYTHONPATH=tests:tests/programs python -m benchmarks.packing``.

CPU of one thread, the median of turns of 1,000 different letters: packed, read whole, read by what
a redrive needs, and made columns of; and the bytes that Redis keeps for one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.letters import entries, fill
from servers import RedisServer

from celery_dlq.export.table import table
from celery_dlq.letters.packed import fields_of
from celery_dlq.letters.packing import packed

LETTERS, TURNS = 1_000, 15
REDRIVE = (b"headers", b"properties", b"task_id", b"source_queue", b"redrives", b"content_type")


def main() -> None:
    """Print one line a figure."""
    letters = list(entries(LETTERS))
    stored = [[part for one in packed(e).items() for part in one] for e in letters]
    stored = [[p.encode() if isinstance(p, str) else p for p in parts] for parts in stored]
    message = sum(len(e[name]) for e in letters for name in ("body", "headers", "properties"))
    _show("message, bytes", message / LETTERS)
    _show("entry, bytes", sum(len(part) for parts in stored for part in parts) / LETTERS)
    _show("packed, µs", _cpu(lambda: [packed(fields) for fields in letters]))
    _show("read whole, µs", _cpu(lambda: [dict(fields_of(parts).items()) for parts in stored]))
    some = _cpu(lambda: [[*map(fields_of(parts).get, REDRIVE)] for parts in stored])
    _show("what a redrive reads, µs", some)
    _show("columns, µs", _cpu(lambda: table([fields_of(parts) for parts in stored])))
    with RedisServer() as server:
        client = server.client()
        empty = client.info("memory")["used_memory"]
        fill(client, 20_000)
        used = client.info("memory")["used_memory"] - empty
        _show("with its index in Redis, bytes", used / 20_000)


def _cpu(work: Callable[[], object]) -> float:
    """Microseconds of CPU a letter."""
    turns = []
    for _ in range(TURNS):
        begun = time.process_time()
        work()
        turns.append(time.process_time() - begun)
    return statistics.median(turns) / LETTERS * 1e6


def _show(what: str, value: float) -> None:
    print(f"{what:32}{value:10,.1f}")


if __name__ == "__main__":
    main()
