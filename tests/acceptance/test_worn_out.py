"""A worker that has no file descriptor left, or whose package is replaced, loses no letter."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
from servers import RedisServer
from waiting import poll
from workers import HERE, Worker

import celery_dlq
from celery_dlq import DeadLetter, DeadLetters

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]
Ran = Callable[[str], int]

POOLS = ["prefork", "threads", "solo"]


def use_up_descriptors(pid: int) -> None:
    """Let a process open nothing more, not even in place of what it closes."""
    _soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))


def give_descriptors(pid: int) -> None:
    """Let it open files again."""
    _soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


@pytest.fixture
def other_redis() -> Iterator[RedisServer]:
    """A Redis for counts and letters alone."""
    with RedisServer() as server:
        yield server


def unacknowledged(redis_url: str) -> int:
    """The number of messages that workers hold."""
    with redis.Redis.from_url(redis_url) as client:
        return int(client.hlen("unacked"))


@pytest.mark.parametrize("pool", POOLS)
def test_without_a_file_descriptor_the_first_death_becomes_a_letter(
    poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str, pool: str
) -> None:
    """All that it needs was read when the worker started."""
    worker = start_worker(pool=pool)
    assert poison.healthy.delay("before").get(timeout=10) == "before"
    use_up_descriptors(worker.process.pid)
    sent = {poison.fails.delay(f"dies-{n}").id for n in range(3)}
    sent.add(poison.app.send_task("nobody.has.this", queue="orders").id)
    assert {letter.task_id for letter in letters(count=len(sent))} == sent, worker.output
    poll(lambda: unacknowledged(redis_url) == 0)


def test_without_a_file_descriptor_for_the_store_a_death_waits(
    poison: ModuleType,
    start_worker: Start,
    other_redis: RedisServer,
    redis_url: str,
    ran: Ran,
) -> None:
    """As in any outage, until there is one."""
    conf = {"dlq_url": other_redis.url, "worker_prefetch_multiplier": 8}
    worker = start_worker(conf)
    assert poison.healthy.delay("before").get(timeout=10) == "before"
    poll(lambda: unacknowledged(redis_url) == 0)
    use_up_descriptors(worker.process.pid)
    other_redis.close_connections()
    sent = {poison.fails.delay(f"dies-{n}").id for n in range(3)}
    poll(lambda: worker.output.count("is not dead-lettered yet") == len(sent), timeout_seconds=30)
    poll(lambda: unacknowledged(redis_url) == len(sent))
    give_descriptors(worker.process.pid)
    dlq = DeadLetters(type(poison.app)("reader", broker=other_redis.url))
    poll(
        lambda: "orders-DLQ" in dlq.store.names() and len(list(dlq.letters("orders-DLQ"))) == 3,
        timeout_seconds=40,
    )
    poll(lambda: unacknowledged(redis_url) == 0)
    assert {letter.task_id for letter in dlq.letters("orders-DLQ")} == sent
    assert [ran(f"dies-{n}") for n in range(3)] == [1, 1, 1]
    dlq.close()


@pytest.mark.parametrize("pool", POOLS)
def test_while_its_package_is_away_a_worker_stores_letters_and_keeps_limits(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    tmp_path: Path,
    pool: str,
) -> None:
    """``pip install`` removes the old version before it has the new one."""
    package, site = Path(celery_dlq.__file__).parent, tmp_path / "site"
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    worker = start_worker(pool=pool, env={"PYTHONPATH": f"{site}{os.pathsep}{HERE}"})
    assert poison.healthy.delay("before").get(timeout=10) == "before"
    (site / package.name).rename(site / "away")
    dead = [poison.fails.delay("dies"), poison.requeues.delay("poison")]
    if pool == "prefork":
        dead.append(poison.killed.delay("killer"))
    found = {letter.task_id: letter for letter in letters(count=len(dead), timeout_seconds=60)}
    assert found.keys() == {sent.id for sent in dead}, worker.output
    assert (ran("dies"), ran("poison")) == (1, 3)
    assert poison.healthy.delay("after").get(timeout=10) == "after"
    assert "CRITICAL" not in worker.output
