"""The cost of the plugin for a worker: ``python -m benchmarks worker``.

Plain Celery, plain Celery again (the noise), the plugin without a policy, a guarded queue,
a guarded task; for each pool, broker and length of the task.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    """One combination, with how much work a turn is.

    Attributes:
        broker: Its name.
        pool: Celery's name of it.
        task: Of `benchmarks.node`.
        messages: How many a turn.
        rounds: How many turns each variant has.
        variants: Who takes part.
        asides: Ask also for what idle workers cost, connections and commands.
    """

    broker: str
    pool: str
    task: str
    messages: int
    rounds: int = 9
    variants: tuple[str, ...] = VARIANTS
    asides: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.task}, {self.pool}, {self.broker}"


_MESSAGES = {"noop": 500, "busy_1ms": 120, "busy_10ms": 40}
"""A turn is a good third of a second of work: it costs as much again to begin and end one."""

_WITH_BARE = (*VARIANTS[:2], BARE, *VARIANTS[2:])

TARGET = Cell("Redis", "prefork", "noop", messages=250, rounds=20, asides=True, variants=_WITH_BARE)
"""The cell that the aims are about."""

CELLS = (
    TARGET,
    *(
        Cell(broker, pool, task, messages, variants=_WITH_BARE if task == "noop" else VARIANTS)
        for broker in ("Redis", "RabbitMQ")
        for pool in ("prefork", "threads", "gevent")
        for task, messages in _MESSAGES.items()
        if (broker, pool, task) != ("Redis", "prefork", "noop")
    ),
)
_QUICK = "noop, threads, Redis"


def cells(text: str = "", *, quick: bool = False) -> tuple[Cell, ...]:
    """Those whose name has this text; for a quick look only one if there is no text."""
    found = tuple(cell for cell in CELLS if (text or (_QUICK if quick else "")) in cell.name)
    if not found:
        raise SystemExit(f"expected a part of {', '.join(c.name for c in CELLS)}, got {text!r}")
    if not quick:
        return found
    return tuple(replace(c, messages=20, rounds=1, variants=(PLAIN, QUEUE)) for c in found)


def measure(cells: tuple[Cell, ...], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result per cell."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        rabbit = None
        if any(cell.broker == "RabbitMQ" for cell in cells):
            rabbit = stack.enter_context(RabbitServer())
        failed = []
        for cell in cells:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    yield _cell(cell, server, rabbit, Path(folder), tell)
            except AssertionError as exc:
                # Half an hour of other cells is not to be lost with it.
                tell(f"{cell.name}: {exc}")
                failed.append(cell.name)
            server.client().flushall()
        assert not failed, f"expected figures of all cells, got none of {', '.join(failed)}"


def _cell(
    cell: Cell,
    server: RedisServer,
    rabbit: RabbitServer | None,
    folder: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    # With heartbeats Celery's loop for gevent waits 0.1 s after every message of RabbitMQ: plain
    # workers do 9 tasks a second, and what is measured is the waiting.
    conf = {"broker_heartbeat": 0} if (cell.pool, cell.broker) == ("gevent", "RabbitMQ") else None
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
                conf=conf,
            )
        )
    contest = Contest(contestants, cell.messages, cell.rounds)
    client = server.client()
    if cell.asides:
        contest.after_start = lambda: [_asides(c, client, n) for n, c in enumerate(contestants)]
    rows = contest.run(lambda text: tell(f"{cell.name}: {text}"))
    facts = contest.facts or [{}] * len(rows)
    rows = [{**row, **aside} for row, aside in zip(rows, facts, strict=True)]
    return {"cell": cell.name, "rows": rows}


def _asides(contestant: CeleryContestant, client: redis.Redis, database: int) -> dict[str, Any]:
    """The cost of an idle worker, its connections, and its commands for 100 tasks."""
    clients = [c for c in client.client_list() if int(c["db"]) == database]
    before = _commands(client)
    idle = contestant.idle(_IDLE_SECONDS)
    middle = _commands(client)
    contestant.turn(100)
    contestant.samples.clear()
    return {
        "idle_cpu_ms_per_second": idle * 1e3,
        "idle_commands_per_second": (middle - before - 1) / _IDLE_SECONDS,
        "commands_per_task": (_commands(client) - middle - 1) / 100,
        "redis_connections": len(clients),
    }


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])
