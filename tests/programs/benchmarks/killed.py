"""The cost of messages that kill their process: ``python -m benchmarks killed``.

Guarded, each is run `LIMIT` times and then is a letter, ``max_deliveries_exceeded``. Plain Celery
would run it forever: there it is run once and acknowledged (``task_reject_on_worker_lost`` is
off), so what counts is the cost of a run. Nearly all of it is a new process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.contest import Contest
from benchmarks.dying import Size, dying
from benchmarks.node import AGAIN, DECORATOR, LIMIT, PLAIN, QUEUE
from servers import RedisServer

_GUARDED = (QUEUE, DECORATOR)

FULL = Size(messages=20, rounds=9, variants=(PLAIN, AGAIN, QUEUE))
QUICK = Size(messages=2, rounds=1, variants=(PLAIN, QUEUE))


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        workers = [
            dying(
                variant,
                number,
                server,
                Path(folder),
                "kills",
                task_reject_on_worker_lost=variant in _GUARDED,
            )
            for number, variant in enumerate(size.variants)
        ]
        for worker in workers:
            # When two processes die at once, Celery may start a message again by itself.
            worker.exact = worker.name in _GUARDED
        runs = {name: LIMIT for name in _GUARDED if name in size.variants}
        contest = Contest(workers, size.messages, size.rounds, executions=runs)
        rows = contest.run(lambda text: tell(f"tasks that kill their process: {text}"))
    for row in rows:
        each = runs.get(row["name"], 1)
        row["runs_per_message"] = each
        row["worker_cpu_ms_per_run"] = row["worker_cpu_ms"] / each
        row["ratio_per_run"] = [ratio / each for ratio in row["worker_cpu_ratio"]]
    yield {"cell": "tasks that kill their process", "rows": rows}
