"""The backends that keep the contracts of `celery_dlq.store.base`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from kombu.connection import Connection

from celery_dlq.store import base
from celery_dlq.store.backend import RedisBackend
from celery_dlq.store.base import DeadLetterStore, DeliveryCounter
from celery_dlq.store.broker import BrokerStore
from celery_dlq.store.broker.queue import QueueDriver
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import RedisCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import RedisStore
from celery_dlq.store.positions import PositionIndex
from celery_dlq.store.slots import pipelined

TTL_SECONDS = 3600.0
BACKENDS = {
    "test_store_contract": ["redis", "cluster", "quorum"],
    "test_groups_contract": ["redis", "cluster", "quorum"],
    "test_pages_contract": ["redis", "cluster", "quorum"],
    "test_retention": ["redis", "cluster", "quorum"],
}
QUEUES = ("orders-DLQ", "mail-DLQ", "a-DLQ", "b-DLQ")


@dataclass(frozen=True)
class Backend:
    """A store and a counter that belong together."""

    store: DeadLetterStore
    counter: DeliveryCounter


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module on every backend that they are about.

    Counting is the same with letters on a broker.
    """
    if "backend" in metafunc.fixturenames:
        kinds = BACKENDS.get(metafunc.module.__name__, ["redis", "cluster"])
        metafunc.parametrize("backend", kinds, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give each backend in turn, empty."""
    which = "cluster_url" if request.param == "cluster" else "redis_url"
    url = request.getfixturevalue(which)
    made = redis_backend(url)
    if request.param == "quorum":
        made = Backend(broker_store(request, url), made.counter)
    yield made
    made.counter.close()
    made.store.close()


def broker_store(request: pytest.FixtureRequest, redis_url: str) -> BrokerStore:
    """A store on RabbitMQ."""
    server = request.getfixturevalue("rabbit_server")
    server.delete_queues(*QUEUES)
    driver = QueueDriver(partial(Connection, server.url), 10.0)
    return BrokerStore(driver, PositionIndex(connect(redis_url, 2.0), redis_url, Keys()))


@pytest.fixture
def store(backend: Backend) -> DeadLetterStore:
    """Give the store of each backend in turn."""
    return backend.store


@pytest.fixture
def counter(backend: Backend) -> DeliveryCounter:
    """Give the counter of each backend in turn."""
    return backend.counter


def redis_backend(url: str) -> Backend:
    """The Redis backend, wired as the plugin does it."""
    connection = pipelined(connect(url, 2.0, retries=0), url)
    return Backend(
        store=RedisStore(connect(url, 2.0), url, Keys()),
        # What nobody ended is over here; how long a worker may be silent is tested elsewhere.
        counter=RedisCounter(connection, Keys(), TTL_SECONDS, stale_seconds=0),
    )


@pytest.fixture(params=["redis", "cluster"])
def parts(request: pytest.FixtureRequest) -> Iterator[base.Backend]:
    """Give all parts of each backend in turn, empty."""
    url = request.getfixturevalue(f"{request.param}_url")
    made = RedisBackend(url, timeout_seconds=2.0)
    yield made
    made.close()
