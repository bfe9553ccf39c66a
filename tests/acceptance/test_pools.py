"""Prefork pools that change while tasks run: they grow, shrink, are restarted, and die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]

LIMIT = 3
KILLS = 2  # fewer than the limit: they alone make no letter
CONF: dict[str, Any] = {
    "worker_max_tasks_per_child": 1,
    "worker_prefetch_multiplier": 4,
    "worker_pool_restarts": True,
    "dlq_queues": {"orders": {"max_deliveries": LIMIT}},
}


def processes(worker: Worker) -> list[int]:
    """The processes of its pool."""
    with suppress(OSError):
        pid = worker.process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


@pytest.fixture
def nothing_left(redis_url: str) -> Callable[[], bool]:
    """Return a function that tells if the broker has no message, waiting or held."""

    def nothing() -> bool:
        with redis.Redis.from_url(redis_url) as broker:
            return not broker.exists("orders", "unacked", "unacked_index", "unacked_leases")

    return nothing


def test_a_pool_that_grows_and_shrinks_while_its_processes_are_killed(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    nothing_left: Callable[[], bool],
) -> None:
    """Only what kills its process again and again becomes a letter; every other task runs."""
    env = {"AUTOSCALE_KEEPALIVE": "0.5"}
    worker = start_worker(CONF, arguments=("--autoscale", "6,1"), env=env)
    poison.healthy.delay("first")
    poll(lambda: ran("first") == 1)  # a pool that never ran a task ends the worker when it dies
    keys = [f"m{n}" for n in range(16 * KILLS)]
    killers = [poison.killed.delay(f"killer {n}").id for n in range(2)]
    sizes, dice = set(), random.Random(7)  # noqa: S311 - no secret
    for n, key in enumerate(keys):
        poison.sleeps.delay(key, 0.2)
        if n % 16 == 15:
            poll(lambda: len(processes(worker)) > 3, timeout_seconds=30)
            sizes.add(len(pool := processes(worker)))
            with suppress(ProcessLookupError):
                os.kill(dice.choice(pool), signal.SIGKILL)
            poll(lambda seen=n + 1: sum(ran(k) > 0 for k in keys) >= seen, timeout_seconds=60)
            time.sleep(dice.random())  # so that it shrinks, more or less

    found = letters(count=2, timeout_seconds=60)
    poll(nothing_left, timeout_seconds=60)

    assert {letter.task_id for letter in found} == set(killers)
    assert {letter.deliveries for letter in found} == {LIMIT}
    # A kill may hit a process between the count of its delivery and the first line of its task.
    starts = [ran(f"killer {n}") for n in range(2)]
    assert all(LIMIT - KILLS <= n <= LIMIT for n in starts), starts
    assert all(1 <= ran(key) <= 2 for key in keys), {key: ran(key) for key in keys}
    poll(lambda: len(processes(worker)) < max(sizes), timeout_seconds=30)
    assert "please report" not in worker.output


def test_a_pool_that_is_restarted_goes_on_counting(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    nothing_left: Callable[[], bool],
) -> None:
    """Again and again under load: what kills processes is a letter after its last delivery."""
    worker = start_worker({**CONF, "worker_max_tasks_per_child": None})
    keys = [f"m{n}" for n in range(40)]
    killers = []
    for n, key in enumerate(keys):
        poison.sleeps.delay(key, 0.05)
        if n % 20 == 10:
            killers.append(poison.killed.delay(f"killer {len(killers)}").id)
            with poison.app.connection() as fresh:
                assert poison.app.control.pool_restart(
                    reply=True, timeout=10, limit=1, connection=fresh
                )

    found = letters(count=len(killers), timeout_seconds=60)
    poll(nothing_left, timeout_seconds=60)

    assert {(x.task_id, x.reason, x.deliveries) for x in found} == {
        (killer, Reason.MAX_DELIVERIES_EXCEEDED, LIMIT) for killer in killers
    }
    assert [ran(f"killer {n}") for n in range(len(killers))] == [LIMIT] * len(killers)
    assert [ran(key) for key in keys] == [1] * len(keys)
    assert "please report" not in worker.output


def test_processes_that_die_at_the_same_time_start_nothing_uncounted(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    nothing_left: Callable[[], bool],
) -> None:
    """A pool of which every process dies again and again: no task starts once too often."""
    keys = [f"killer {n}" for n in range(12)]
    killers = [poison.killed.delay(key).id for key in keys]
    worker = start_worker(CONF, arguments=("--concurrency", "4"))

    found = letters(count=len(killers), timeout_seconds=120)
    poll(nothing_left, timeout_seconds=60)

    assert {(letter.task_id, letter.deliveries) for letter in found} == {
        (killer, LIMIT) for killer in killers
    }
    assert [ran(key) for key in keys] == [LIMIT] * len(keys)
    assert "please report" not in worker.output
