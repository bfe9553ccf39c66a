"""What dying work costs: ``PYTHONPATH=tests python -m benchmarks dying``.

A stream of failing tasks, which plain Celery logs and forgets and the plugin keeps as
letters; and messages that kill their process, which plain Celery runs again for ever and
the plugin ends after the third delivery.
"""

from __future__ import annotations

import random
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.celery_contestant import CeleryContestant
from benchmarks.contest import Contest
from benchmarks.node import AGAIN, DECORATOR, LIMIT, PLAIN, PLUGIN, QUEUE
from benchmarks.processes import Tree
from servers import RedisServer

BODY = "".join(random.Random(1).choices(string.ascii_letters, k=900))  # noqa: S311
"""The argument of every message here: 1 KB of body, which does not compress."""


@dataclass(frozen=True)
class Size:
    """How much work."""

    failing: int
    killed: int
    rounds: int
    variants: tuple[str, ...] = (PLAIN, AGAIN, PLUGIN, QUEUE, DECORATOR)


FULL = Size(failing=150, killed=10, rounds=25)
QUICK = Size(failing=20, killed=2, rounds=1, variants=(PLAIN, QUEUE))


class Dying(CeleryContestant):
    """A worker whose messages all die; a turn ends when every letter is there."""

    def publish(self, messages: int) -> None:
        """Remember how many letters there were."""
        self._before = self.stored_letters()
        super().publish(messages)

    def settled(self, messages: int) -> bool:
        """Guarded ones leave a letter for each message, others leave nothing."""
        kept = self.name in (QUEUE, DECORATOR)
        return self.stored_letters() - self._before == (messages if kept else 0)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result per stream."""
    yield _stream("failing tasks", "fails", size.failing, size.rounds, size.variants, tell)
    yield _stream("tasks that kill their process", "kills", size.killed, size.rounds,
                  (PLAIN, QUEUE), tell)  # fmt: skip


def _stream(
    cell: str, task: str, messages: int, rounds: int, variants: tuple[str, ...],
    tell: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        contestants = [
            Dying(
                variant,
                Path(folder) / str(number),
                Tree(server.pid),
                broker=f"{server.url.rpartition('/')[0]}/{number}",
                task=task,
                args=(BODY,),
                # Plain Celery would run them for ever: there each is run once and acknowledged.
                conf={"task_reject_on_worker_lost": variant == QUEUE} if task == "kills" else None,
            )
            for number, variant in enumerate(variants)
        ]
        contest = Contest(contestants, messages, rounds)
        if task == "kills":
            contest.executions = {QUEUE: LIMIT}
            # When two processes die at once, Celery may start a message again by itself.
            contestants[0].exact = False
        rows = contest.run(lambda text: tell(f"{cell}: {text}"))
        for row in rows:
            row["runs_per_message"] = contest.executions.get(row["name"], 1)
    return {"cell": cell, "rows": rows}
