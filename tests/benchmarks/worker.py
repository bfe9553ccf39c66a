"""What the plugin costs a worker: ``PYTHONPATH=tests python -m benchmarks worker``.

Plain Celery, plain Celery again (the noise), the plugin without a policy, a guarded queue,
a guarded task; for each pool, broker and length of the task.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from benchmarks.celery_contestant import CeleryContestant
from benchmarks.contest import Contest
from benchmarks.node import AGAIN, BARE, DECORATOR, PLAIN, PLUGIN, QUEUE
from benchmarks.processes import Tree
from rabbit import RabbitServer
from servers import RedisServer

VARIANTS = (PLAIN, AGAIN, PLUGIN, QUEUE, DECORATOR)
_IDLE_SECONDS = 3.0


@dataclass(frozen=True)
class Cell:
    """One combination, with how much work a turn is."""

    broker: str
    pool: str
    task: str
    messages: int = 1000
    rounds: int = 9
    variants: tuple[str, ...] = VARIANTS

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.task}, {self.pool}, {self.broker}"


TARGET = Cell(
    "Redis",
    "prefork",
    "noop",
    messages=250,
    rounds=30,
    variants=(*VARIANTS[:2], BARE, *VARIANTS[2:]),
)
_MESSAGES = {"noop": 200, "busy_1ms": 150, "busy_10ms": 40}
CELLS = (
    TARGET,
    *(
        Cell(broker, pool, task, messages)
        for broker in ("Redis", "RabbitMQ")
        for pool in ("prefork", "threads", "gevent")
        for task, messages in _MESSAGES.items()
        if (broker, pool, task) != ("Redis", "prefork", "noop")
    ),
)
QUICK = (Cell("Redis", "threads", "noop", messages=40, rounds=1, variants=(PLAIN, QUEUE)),)


def measure(cells: tuple[Cell, ...], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result per cell."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        rabbit = None
        if any(cell.broker == "RabbitMQ" for cell in cells):
            rabbit = stack.enter_context(RabbitServer())
        for cell in cells:
            with tempfile.TemporaryDirectory() as folder:
                yield _cell(cell, server, rabbit, Path(folder), tell)
            server.client().flushall()


def _cell(
    cell: Cell,
    server: RedisServer,
    rabbit: RabbitServer | None,
    folder: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    contestants = []
    for number, variant in enumerate(cell.variants):
        own = f"{server.url.rpartition('/')[0]}/{number}"
        contestants.append(
            CeleryContestant(
                variant,
                folder / str(number),
                Tree(server.pid),
                broker=rabbit.url if cell.broker == "RabbitMQ" and rabbit is not None else own,
                letters=own,
                task=cell.task,
                pool=cell.pool,
            )
        )
    contest = Contest(contestants, cell.messages, cell.rounds)
    client = server.client()
    idle = min(_IDLE_SECONDS, cell.rounds / 4)
    contest.after_start = lambda: [_asides(c, client, n, idle) for n, c in enumerate(contestants)]
    rows = contest.run(lambda text: tell(f"{cell.name}: {text}"))
    rows = [{**row, **aside} for row, aside in zip(rows, contest.facts, strict=True)]
    return {"cell": cell.name, "rows": rows}


def _asides(
    contestant: CeleryContestant, client: redis.Redis, database: int, seconds: float
) -> dict[str, Any]:
    """What a worker without work costs, its connections, and its commands for 100 tasks."""
    clients = [c for c in client.client_list() if int(c["db"]) == database]
    before = _commands(client)
    idle = contestant.idle(seconds)
    middle = _commands(client)
    contestant.turn(100)
    contestant.samples.clear()
    return {
        "idle_cpu_ms_per_second": idle * 1e3,
        "idle_commands_per_second": (middle - before - 1) / seconds,
        "commands_per_task": (_commands(client) - middle - 1) / 100,
        "redis_connections": len(clients),
    }


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])
