"""The backends that keep the contracts of `celery_dlq.store.base`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from celery_dlq.store import base
from celery_dlq.store.backend import RedisBackend
from celery_dlq.store.base import DeadLetterStore, DeliveryCounter
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import RedisCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import RedisStore
from celery_dlq.store.slots import pipelined

TTL_SECONDS = 3600.0


@dataclass(frozen=True)
class Backend:
    """A store and a counter that belong together."""

    store: DeadLetterStore
    counter: DeliveryCounter


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests on one Redis and on a cluster."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["redis", "cluster"], indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give each backend in turn, empty."""
    made = redis_backend(request.getfixturevalue(f"{request.param}_url"))
    yield made
    made.counter.close()
    made.store.close()


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
