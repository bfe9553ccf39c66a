"""The cost of failing tasks: ``python -m benchmarks dying``.

Plain Celery logs and forgets them, the plugin keeps them as letters.
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
from benchmarks.node import AGAIN, BARE, DECORATOR, PLAIN, PLUGIN, QUEUE
from benchmarks.processes import Tree
from servers import RedisServer

BODY = "".join(random.Random(1).choices(string.ascii_letters, k=900))  # noqa: S311
"""The argument of every message here: 1 KB of body, which does not compress."""


@dataclass(frozen=True)
class Size:
    """The amount of work: messages a turn, and turns."""

    messages: int
    rounds: int
    variants: tuple[str, ...] = (PLAIN, AGAIN, BARE, PLUGIN, QUEUE, DECORATOR)


FULL = Size(messages=150, rounds=11)
QUICK = Size(messages=20, rounds=1, variants=(PLAIN, QUEUE))


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
    """One result."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        workers = [
            dying(variant, number, server, Path(folder), "fails")
            for number, variant in enumerate(size.variants)
        ]
        contest = Contest(workers, size.messages, size.rounds)
        yield {
            "cell": "failing tasks",
            "rows": contest.run(lambda text: tell(f"failing tasks: {text}")),
        }


def dying(
    variant: str, number: int, server: RedisServer, folder: Path, task: str, **conf: Any
) -> Dying:
    """A worker of a variant, on a database of its own."""
    return Dying(
        variant,
        folder / str(number),
        Tree(server.pid),
        broker=f"{server.url.rpartition('/')[0]}/{number}",
        task=task,
        args=(BODY,),
        conf=conf,
    )
