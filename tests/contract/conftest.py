"""The store on one Redis, and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fresh import strict_counter

from celery_dlq.store.connect import connect
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.pipelined import pipelined
from celery_dlq.store.store import Store


@dataclass(frozen=True)
class Backend:
    """A store and a counter that belong together."""

    store: Letters
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
def store(backend: Backend) -> Letters:
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
        store=Store(url, timeout_seconds=2.0).letters,
        # What nobody ended is over here; how long a worker may be silent is tested elsewhere.
        counter=strict_counter(connection, Keys()),
    )


@pytest.fixture(params=["redis", "cluster"])
def parts(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Give all parts of each backend in turn, empty."""
    url = request.getfixturevalue(f"{request.param}_url")
    made = Store(url, timeout_seconds=2.0)
    yield made
    made.close()
