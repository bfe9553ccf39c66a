"""pytest-celery's cluster on processes of this machine instead of Docker containers.

pytest-celery gives tests ``celery_setup`` with its ``broker`` and ``worker_cluster``: nodes with
``logs``, ``wait_for_log``, ``kill`` and ``restart``. The nodes of here answer these for processes;
pytest-celery's own fixtures do the rest. Import everything of here into a test module.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
)
from servers import RedisServer
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, DeadLetters

WORKERS = 2
RESULTS, TRACES = "1", "2"  # databases that poison_app uses beside 0

# Kombu gives a dead worker's messages back when another starts, if they are this old.
SIGHT_SECONDS = 1
CONF: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": SIGHT_SECONDS}}


class RedisNode(CeleryTestBroker):
    """A `RedisServer` in place of a container."""

    database = "0"

    def config(self, *_: Any, vhost: str = "", **__: Any) -> dict[str, Any]:
        url = f"{self.container.url.rpartition('/')[0]}/{vhost or self.database}"
        return {"url": url, "host_url": url}

    def ready(self) -> bool:
        return True  # it is not started without waiting

    def kill(self, *_: Any, **__: Any) -> None:
        self.container.kill()

    def restart(self, *_: Any, **__: Any) -> None:
        self.container.stop()
        self.container.start()


class ResultsNode(RedisNode, CeleryTestBackend):
    """The result backend: another database of the broker's Redis."""

    database = RESULTS


class WorkerNode(CeleryTestWorker):
    """A `Worker` in place of a container."""

    def __init__(self, redis_url: str, folder: Path, number: int) -> None:
        self._hostname = f"worker-{number}@{uuid.uuid4().hex[:12]}"
        log = folder / f"worker-{number}.log"
        arguments = ("--hostname", self._hostname)
        super().__init__(Worker(redis_url, log, CONF, arguments), app=None)

    def name(self) -> str:
        return self._hostname

    hostname = name

    def logs(self) -> str:
        return str(self.container.output)

    def ready(self) -> bool:
        return self.runs() and "ready." in self.logs()

    def runs(self) -> bool:
        return self.container.process.poll() is None

    def kill(self, *_: Any, **__: Any) -> None:
        self.container.kill()

    def restart(self, *_: Any, **__: Any) -> None:
        """End it in order, if it runs; do not wait until it is ready: poison may kill it before."""
        self.container.stop()
        self.container.start(wait=False)


class PoisonSetup(CeleryTestSetup):
    """A setup whose app publishes to ``poison_app`` and reads its dead letters."""

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(dlq_url=app.conf.broker_url, task_default_queue="orders")
        DeadLetters(app)

    @property
    def dlq(self) -> DeadLetters:
        """The operator's API on the cluster's dead letters."""
        return DeadLetters.of(self.app)

    def letters(self, *, count: int = 1) -> list[DeadLetter]:
        """Wait for this number of letters; return all that there are."""

        def enough() -> bool:
            return sum(queue.letters for queue in self.dlq.queues()) >= count

        poll(enough, timeout_seconds=30, every_seconds=0.05)
        return list(self.dlq.letters("orders-DLQ"))

    def send(self, task: str, key: str, *args: Any) -> str:
        """Send a task of ``poison_app``; its id."""
        return str(self.app.send_task(f"poison_app.{task}", (key, *args)).id)

    def executions(self, key: str) -> int:
        """Number of executions of the task with a key."""
        with redis.Redis.from_url(self.broker.config(vhost=TRACES)["url"]) as client:
            return int(client.llen(f"ran:{key}"))

    def unseen(self) -> bool:
        """True if a dead worker's message is old enough to be given back."""
        with redis.Redis.from_url(self.broker.config()["url"]) as client:
            oldest = client.zrange("unacked_index", 0, 0, withscores=True)
        return not oldest or time.time() - oldest[0][1] > SIGHT_SECONDS + 0.1

    def dead(self) -> list[WorkerNode]:
        """The workers that have ended."""
        return [node for node in self.worker_cluster if not node.runs()]


@pytest.fixture
def celery_setup_cls() -> type[PoisonSetup]:
    """The setup class of these tests."""
    return PoisonSetup


@pytest.fixture
def celery_setup_app(celery_setup_app: Celery) -> Iterator[Celery]:
    """pytest-celery's app, closed in the end; the current app is then what it was before."""
    before, default = _state._tls.current_app, _state.default_app
    yield celery_setup_app
    DeadLetters.of(celery_setup_app).close()
    celery_setup_app.close()
    _state._tls.current_app, _state.default_app = before, default


@pytest.fixture
def redis_node() -> Iterator[RedisNode]:
    """A Redis of the test's own that keeps its data, so that the test may kill it."""
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        yield RedisNode(server)


@pytest.fixture
def celery_broker_cluster(redis_node: RedisNode) -> CeleryBrokerCluster:
    """One broker."""
    return CeleryBrokerCluster(redis_node)


@pytest.fixture
def celery_backend_cluster(redis_node: RedisNode) -> CeleryBackendCluster:
    """The result backend on the broker's Redis."""
    return CeleryBackendCluster(ResultsNode(redis_node.container))


@pytest.fixture
def celery_worker_cluster(redis_node: RedisNode, tmp_path: Path) -> Iterator[CeleryWorkerCluster]:
    """Two workers on that Redis."""
    url = redis_node.config()["url"]
    nodes = [WorkerNode(url, tmp_path, number) for number in range(1, WORKERS + 1)]
    for node in nodes:
        node.container.start(wait=False)
    for node in nodes:
        poll(node.ready, timeout_seconds=30)
    yield CeleryWorkerCluster(*nodes)
    for node in nodes:
        node.kill()
