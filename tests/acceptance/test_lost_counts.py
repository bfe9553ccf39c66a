"""A reply of the store is lost or refused: no message starts more often than its limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from command_proxy import CommandProxy, Matches, sends
from rabbit import RabbitServer
from servers import RedisServer
from waiting import poll
from workers import QUEUES, Worker

from celery_dlq.store.scripts import script_text

Ran = Callable[[str], int]
Start = Callable[..., Worker]


@pytest.fixture
def store() -> Iterator[RedisServer]:
    """A Redis for counters and letters alone; the broker has its own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def proxy(store: RedisServer) -> Iterator[CommandProxy]:
    """A way to the store on which replies get lost."""
    with CommandProxy(store.port) as made:
        yield made


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a worker on each broker."""
    if request.param == "redis":
        return {}
    server: RabbitServer = request.getfixturevalue("rabbit_server")
    server.delete_queues(*QUEUES.split(","))
    return {"POISON_BROKER": server.url}


def calls(name: str) -> Matches:
    """Match the calls of one of the counter's scripts, by text or by digest."""
    script = script_text(name)
    both = [sends("EVAL", script.text), sends("EVALSHA", script.digest)]
    return lambda command: any(call(command) for call in both)


def conf(url: str, limit: int, **more: Any) -> dict[str, Any]:
    return {
        "dlq_url": url,
        "dlq_transport_options": {"socket_timeout": 0.5},
        "dlq_queues": {"orders": {"max_deliveries": limit}},
        **more,
    }


def letters_in(store: RedisServer) -> int:
    """How many letters a store has."""
    with redis.Redis.from_url(store.url) as client:
        return sum(client.xlen(key) for key in client.scan_iter("dlq:*:letters"))


def publish(poison: ModuleType, broker: dict[str, str], task: str, *args: Any) -> None:
    """Publish to the worker's broker."""
    url = broker.get("POISON_BROKER")
    if url is None:
        getattr(poison, task).delay(*args)
        return
    with poison.app.connection_for_write(url) as connection:
        getattr(poison, task).apply_async(args, connection=connection)


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize(
    ("broker", "pool", "workers", "lost"),
    [
        ("redis", "prefork", 1, "after"),
        ("redis", "solo", 1, "hold"),
        ("rabbitmq", "prefork", 2, "hold"),
        ("rabbitmq", "threads", 1, "after"),
    ],
    indirect=["broker"],
)
def test_a_lost_reply_to_a_count_costs_no_start(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    store: RedisServer,
    proxy: CommandProxy,
    broker: dict[str, str],
    lost: str,
    limit: int,
    pool: str,
    workers: int,
) -> None:
    """Redis executed the count, and its second attempt; both replies are lost."""
    fault = proxy.fault(lost, calls("count"), 2 if lost == "after" else 1)
    for n in range(workers):
        start_worker(conf(proxy.url, limit), pool=pool, env=broker, arguments=("-n", f"w{n}@%h"))
    publish(poison, broker, "requeues_late", "poison", 1.0)
    poll(fault.met.is_set, timeout_seconds=20)
    poll(lambda: letters_in(store), timeout_seconds=40)
    assert ran("poison") == limit


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize(
    ("broker", "pool", "workers"),
    [
        ("rabbitmq", "prefork", 1),
        ("rabbitmq", "solo", 1),
        ("redis", "prefork", 2),
        ("redis", "threads", 1),
    ],
    indirect=["broker"],
)
def test_a_store_that_is_read_only_for_two_seconds_costs_no_start(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    store: RedisServer,
    broker: dict[str, str],
    limit: int,
    pool: str,
    workers: int,
) -> None:
    """A failover: the end of a delivery is refused, and so is the next count."""
    client = store.client()
    for n in range(workers):
        start_worker(conf(store.url, limit), pool=pool, env=broker, arguments=("-n", f"w{n}@%h"))
    publish(poison, broker, "requeues_late", "poison", 0.4)
    poll(lambda: ran("poison"), timeout_seconds=20)
    client.replicaof("127.0.0.1", 1)
    began = time.monotonic()
    poll(lambda: time.monotonic() - began > 2)
    client.replicaof("NO", "ONE")
    poll(lambda: letters_in(store), timeout_seconds=40)
    assert ran("poison") == limit
