"""The backends that keep the contracts of `celery_dlq.ports`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from celery_dlq.backends.memory import MemoryCounter, MemoryStore
from celery_dlq.backends.redis.connection import Wire, connect
from celery_dlq.backends.redis.counter import SCRIPTS, RedisCounter
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.store import RedisStore
from celery_dlq.ports import DeadLetterStore, DeliveryCounter

TTL_SECONDS = 3600.0


@dataclass(frozen=True)
class Backend:
    """A store and a counter that belong together."""

    store: DeadLetterStore
    counter: DeliveryCounter


@pytest.fixture(params=["memory", "redis"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give each backend in turn, empty."""
    if request.param == "memory":
        counter = MemoryCounter()
        made = Backend(MemoryStore(counter), counter)
    else:
        made = redis_backend(request.getfixturevalue("redis_url"))
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
    wire = Wire(connect(url, 2.0, retries=0), url, SCRIPTS)
    return Backend(
        store=RedisStore(connect(url, 2.0), url, Keys()),
        counter=RedisCounter(wire, Keys(), TTL_SECONDS),
    )
