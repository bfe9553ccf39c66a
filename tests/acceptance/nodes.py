"""Nodes of pytest-celery that are processes of this machine, not Docker containers.

pytest-celery gives tests a cluster: ``celery_setup.broker``, ``celery_setup.worker``,
``celery_setup.worker_cluster``, each node with ``logs``, ``wait_for_log``, ``kill``,
``restart``. Its node classes only speak to a container object, so a container that is
a process lets the same tests run without Docker. Import everything of here into a
test module; pytest-celery's own fixtures do the rest.

With ``CELERY_DLQ_TEST_DOCKER=1`` and Docker, the nodes are pytest-celery's containers:
its Redis, and workers in a plain Python image that install this checkout. That path was
written against pytest-celery 1.3 and not run where there is no Docker.

What differs from containers: broker and result backend are two databases of one Redis,
and ``get_running_processes_info`` needs a container.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state
from celery import __version__ as celery_version
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RedisContainer,
)
from pytest_docker_tools import container, fetch, fxtr
from servers import RedisServer
from waiting import poll
from workers import HERE, QUEUES, Worker

from celery_dlq import DeadLetter, DeadLetters

IN_DOCKER = os.environ.get("CELERY_DLQ_TEST_DOCKER") == "1" and shutil.which("docker") is not None
WORKERS = 2
RESULTS, TRACES = "1", "2"  # databases that poison_app uses beside 0
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")

# Kombu gives a dead worker's messages back when another starts, if they are this old.
SIGHT_SECONDS = 1
POISON_CONF: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": SIGHT_SECONDS}}


# -- processes as containers ------------------------------------------------------------


class ProcessContainer(CeleryTestContainer):
    """What pytest-celery's nodes ask of a container, answered by a process.

    Args:
        name: For people.
    """

    def __init__(self, name: str) -> None:
        # Not the base's: there is no Docker object to wrap.
        self._name = name
        self._id = uuid.uuid4().hex

    @property
    def id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        return self._name

    @property
    def attrs(self) -> dict[str, Any]:
        return {"Config": {"Hostname": self.id[:12], "Env": []}, "State": {"Status": self.status}}

    @property
    def status(self) -> str:
        """``running`` or ``exited``, as Docker says it."""
        return "running" if self.runs() else "exited"

    def runs(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it in order; nothing happens if it has ended."""
        raise NotImplementedError

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs."""
        raise NotImplementedError

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal, by default SIGKILL; as in a container, that one ends all children too."""
        self.send(_signal(signal or "SIGKILL"))

    def restart(self, timeout: float = 10) -> None:
        self.stop()
        self.start()

    def reload(self) -> None:
        """Nothing is cached: the state is always the process's own."""

    def ready(self) -> bool:
        return self.runs() and (self.ready_prompt or "") in self.logs()

    def teardown(self) -> None:
        self.stop()

    def exec_run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("expected a container to run a command in, got a process")


class RedisProcess(ProcessContainer):
    """A ``redis-server`` that keeps its data over a restart."""

    def __init__(self) -> None:
        super().__init__("redis")
        self.server = RedisServer(*DURABLE)
        self.server.__enter__()

    @property
    def client(self) -> redis.Redis:
        return self.server.client()

    @property
    def celeryconfig(self) -> dict[str, Any]:
        url = self.server.url
        return {
            "url": url,
            "host_url": url,
            "hostname": "127.0.0.1",
            "port": self.server.port,
            "vhost": "0",
        }

    @property
    def ready_prompt(self) -> str:
        return "Ready to accept connections"

    def runs(self) -> bool:
        process = self.server._process
        return process is not None and process.poll() is None

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def send(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self.server.kill()
        else:
            os.kill(self.server.pid, number)

    def logs(self) -> str:
        return self.server.log

    def teardown(self) -> None:
        self.server.close()


class WorkerProcess(ProcessContainer):
    """A ``celery worker`` of ``poison_app``.

    Args:
        redis_url: Broker, results, letters and traces are in its databases.
        folder: Gets its log.
        number: Tells it from the others of its cluster.
    """

    def __init__(self, redis_url: str, folder: Path, number: int) -> None:
        super().__init__(f"worker-{number}")
        node_name = f"{self.name}@{self.id[:12]}"  # what pytest-celery takes it to be
        self._begun = 0
        self.worker = Worker(
            redis_url, folder / f"{self.name}.log", POISON_CONF, arguments=("--hostname", node_name)
        )

    @property
    def ready_prompt(self) -> str:
        return "ready."

    def runs(self) -> bool:
        return self.worker.process.poll() is None

    def begin(self) -> None:
        """Start it, and do not wait."""
        self._begun = len(self.logs())
        self.worker.start(wait=False)

    def start(self) -> None:
        self.begin()
        # Poison may kill it as soon as it is ready.
        poll(lambda: self.ready() or not self.runs(), timeout_seconds=30)

    def ready(self) -> bool:
        return self.ready_prompt in self.logs()[self._begun :]

    def stop(self) -> None:
        self.worker.stop()

    def send(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self.worker.kill()
        else:
            self.worker.process.send_signal(number)

    def logs(self) -> str:
        return self.worker.output

    # What `CeleryTestWorker` asks of its container.

    def version(self) -> str:
        return str(celery_version)

    def log_level(self) -> str:
        return "INFO"

    def worker_name(self) -> str:
        return self.name

    def worker_queue(self) -> str:
        return QUEUES


def _signal(given: str | int) -> signal.Signals:
    return signal.Signals[given] if isinstance(given, str) else signal.Signals(given)


# -- pytest-celery's classes for this app ------------------------------------------------


class Backend(CeleryTestBackend):
    """The result backend: another database of the broker's Redis."""

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().config(*args, **{"vhost": RESULTS, **kwargs})

    def teardown(self) -> None:
        """The broker's node ends the server."""


class PoisonSetup(CeleryTestSetup):
    """A setup whose app publishes to ``poison_app`` and reads its dead letters."""

    @classmethod
    def name(cls) -> str:
        return "poison"

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(dlq_url=app.conf.broker_url, task_default_queue="orders")
        DeadLetters(app)

    @property
    def dlq(self) -> DeadLetters:
        """The operator's API on the cluster's dead letters."""
        return DeadLetters.of(self.app)

    def letters(self, *, count: int = 1) -> list[DeadLetter]:
        """Wait for so many letters; all that there are."""

        def enough() -> bool:
            return sum(queue.letters for queue in self.dlq.queues()) >= count

        poll(enough, timeout_seconds=30, every_seconds=0.05)
        return list(self.dlq.letters("orders-DLQ"))

    def send(self, task: str, key: str, *args: Any) -> str:
        """Send a task of ``poison_app``; its id."""
        return str(self.app.send_task(f"poison_app.{task}", (key, *args)).id)

    def executions(self, key: str) -> int:
        """How often the task with a key was executed."""
        with redis.Redis.from_url(self.broker.config(vhost=TRACES)["host_url"]) as client:
            return int(client.llen(f"ran:{key}"))

    def unseen(self) -> bool:
        """Whether a dead worker's message is old enough to be given back."""
        with redis.Redis.from_url(self.broker.config()["host_url"]) as client:
            oldest = client.zrange("unacked_index", 0, 0, withscores=True)
        return not oldest or time.time() - oldest[0][1] > SIGHT_SECONDS + 0.1

    def dead(self) -> list[CeleryTestNode]:
        """The workers that have ended."""
        return [node for node in self.worker_cluster if _status(node) != "running"]


def _status(node: CeleryTestNode) -> str:
    node.container.reload()
    return str(node.container.status)


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


# -- fixtures on processes ----------------------------------------------------------------


@pytest.fixture
def process_broker() -> Iterator[CeleryTestBroker]:
    """A Redis of the test's own, so that the test may kill it."""
    broker = CeleryTestBroker(RedisProcess())
    yield broker
    broker.teardown()


@pytest.fixture
def process_workers(
    process_broker: CeleryTestBroker, tmp_path: Path
) -> Iterator[list[CeleryTestWorker]]:
    """Workers on that Redis."""
    url = process_broker.config()["url"]
    containers = [WorkerProcess(url, tmp_path, number) for number in range(1, WORKERS + 1)]
    for each in containers:
        each.begin()
    for each in containers:
        poll(each.ready, timeout_seconds=30)
    yield [CeleryTestWorker(each, app=None) for each in containers]
    for each in containers:
        each.kill()


# -- fixtures on containers ---------------------------------------------------------------


class PoisonContainer(CeleryWorkerContainer):
    """A worker of ``poison_app`` in a Python image, with this checkout installed at its start."""

    @classmethod
    def command(cls, *_: str, **__: Any) -> list[str]:
        worker = (
            f"celery -A poison_app worker --concurrency 2 --queues {QUEUES} --loglevel INFO "
            f"--without-gossip --without-mingle --hostname {cls.worker_name()}@%h"
        )
        return [
            "sh",
            "-c",
            f"cp -r /checkout /tmp/it && pip install --quiet /tmp/it pyyaml && exec {worker}",
        ]


@pytest.fixture
def poison_environment(celery_redis_broker: CeleryTestBroker) -> dict[str, str]:
    """The environment of workers in containers; the Redis under its name in their network."""
    return {
        "PYTHONPATH": "/checkout/tests/acceptance",
        "POISON_REDIS": celery_redis_broker.config()["url"].rpartition("/")[0],
        "POISON_CONF": json.dumps(POISON_CONF),
    }


@pytest.fixture
def default_redis_broker_command() -> list[str]:
    """pytest-celery's Redis, but with its data kept over a restart."""
    return [*RedisContainer.command(), *DURABLE]


poison_image = fetch(repository="python:3.11-slim")


def _worker_container() -> Any:
    return container(
        image="{poison_image.id}",
        command=PoisonContainer.command(),
        environment=fxtr("poison_environment"),
        network="{default_pytest_celery_network.name}",
        volumes={str(HERE.parents[1]): {"bind": "/checkout", "mode": "ro"}},
        wrapper_class=PoisonContainer,
        timeout=120,
    )


first_container, second_container = _worker_container(), _worker_container()


# -- the fixtures that pytest-celery asks for ----------------------------------------------


@pytest.fixture
def celery_broker(request: pytest.FixtureRequest) -> CeleryTestBroker:
    """The broker's node."""
    return request.getfixturevalue("celery_redis_broker" if IN_DOCKER else "process_broker")


@pytest.fixture
def celery_broker_cluster(celery_broker: CeleryTestBroker) -> CeleryBrokerCluster:
    """One broker."""
    return CeleryBrokerCluster(celery_broker)


@pytest.fixture
def celery_backend_cluster(celery_broker: CeleryTestBroker) -> CeleryBackendCluster:
    """The result backend on the broker's Redis."""
    return CeleryBackendCluster(Backend(celery_broker.container))


@pytest.fixture
def celery_worker_cluster(
    request: pytest.FixtureRequest, celery_broker: CeleryTestBroker
) -> CeleryWorkerCluster:
    """Two workers."""
    if not IN_DOCKER:
        return CeleryWorkerCluster(*request.getfixturevalue("process_workers"))
    names = ("first_container", "second_container")
    found = [request.getfixturevalue(name) for name in names]
    return CeleryWorkerCluster(*[CeleryTestWorker(each, app=None) for each in found])
