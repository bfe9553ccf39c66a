"""Fixtures of the acceptance tests: an app, its worker and what happened in Redis."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import command_line
import pytest
import redis
from servers import RedisServer
from waiting import poll
from workers import HERE, QUEUES, Place, Worker

from celery_dlq import DeadLetter


@pytest.fixture(scope="session")
def poison_module(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The app of these tests, imported once: Celery keeps what a module registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("POISON_REDIS", redis_server.url.rpartition("/")[0])
        module = importlib.import_module("poison_app")
        yield module
        module.dlq.close()
        module.app.close()


@pytest.fixture
def poison(poison_module: ModuleType, redis_url: str) -> ModuleType:
    """The app of these tests, with an empty Redis."""
    return poison_module


@pytest.fixture
def dlq(poison: ModuleType, redis_url: str) -> command_line.Dlq:
    """Run ``celery -A poison_app dlq …``."""
    return partial(command_line.run, redis_url=redis_url)


@pytest.fixture
def start_worker(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start workers; all are ended after the test."""
    started: list[Worker] = []

    def start(conf: dict[str, Any] | None = None, *, wait: bool = True, **more: Any) -> Worker:
        log = tmp_path / f"worker-{len(started)}.log"
        worker = Worker(redis_url, log, conf, **more)
        started.append(worker)
        return worker.start(wait=wait)

    yield start
    for worker in started:
        worker.end()


@pytest.fixture
def ran(redis_url: str) -> Iterator[Callable[[str], int]]:
    """Return a function that counts the executions of the task with a key."""
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        yield lambda key: int(client.llen(f"ran:{key}"))


@pytest.fixture
def letters(poison: ModuleType) -> Callable[..., list[DeadLetter]]:
    """Wait for the letters of a queue."""

    def wait(
        queue: str = "orders-DLQ", *, count: int = 1, timeout_seconds: float = 30
    ) -> list[DeadLetter]:
        def enough() -> bool:
            found = [q.letters for q in poison.dlq.queues() if q.name == queue]
            return bool(found) and found[0] >= count

        poll(enough, timeout_seconds=timeout_seconds, every_seconds=0.05)
        return list(poison.dlq.letters(queue))

    return wait


@pytest.fixture(params=["redis", "classic", "quorum"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each broker in turn."""
    if request.param == "redis":
        return Place("redis")
    if request.param == "quorum" and celery.VERSION < (5, 5):
        pytest.skip("Celery 5.4 cannot consume quorum queues: it asks for a global prefetch limit")
    server = request.getfixturevalue("rabbit_server")
    server.delete_queues(*QUEUES.split(","))
    env = {"POISON_BROKER": server.url, "POISON_QUEUE_TYPE": request.param}
    return Place(request.param, env)


@pytest.fixture
def grown_old(redis_url: str) -> Iterator[Callable[[], None]]:
    """Wait until a dead worker's messages are old enough for the next one to be given them.

    Kombu looks for them when a worker starts, and then rarely; with a visibility
    timeout of 1 s they must be older than that.
    """
    with redis.Redis.from_url(redis_url) as client:

        def old_enough() -> bool:
            newest = client.zrange("unacked_index", -1, -1, withscores=True)
            return not newest or time.time() - newest[0][1] > 1.1

        yield lambda: poll(old_enough) and None
