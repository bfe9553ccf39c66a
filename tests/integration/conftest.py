"""A Redis that is broker and store, for tests that share a database or stop the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from builders import an_app
from servers import RedisServer

from celery_dlq import DeadLetters

Make = Callable[..., DeadLetters]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Broker and store."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    """A client of the broker's database."""
    return server.client()


@pytest.fixture
def make(server: RedisServer) -> Iterator[Make]:
    """Makes the plugin for an app whose broker and letters are on this server."""
    with ExitStack() as stack:

        def make(**settings: Any) -> DeadLetters:
            values = {"broker_url": server.url, "dlq_url": server.url, **settings}
            dlq = DeadLetters(an_app(**values))
            stack.callback(dlq.close)
            return dlq

        yield make
