"""Shutdowns: they end, nothing starts while they last, and nothing is lost or charged by them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from command_proxy import CommandProxy, sends
from servers import RedisServer
from test_holds import publish
from waiting import poll
from workers import Place, Worker

from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.store.scripts import script_text

Start = Callable[..., Worker]
Ran = Callable[[str], int]

MAY_HAVE_RUN = {"headers": {HOLD_HEADER: "released"}}
"""A released message may have run before, so its count is awaited."""


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[CommandProxy]:
    """The way to the store."""
    with CommandProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(params=["redis", "classic"])
def broker(request: pytest.FixtureRequest) -> Place:
    """Redis, and RabbitMQ, where Celery's handler reads the next messages."""
    if request.param == "redis":
        return Place("redis")
    server = request.getfixturevalue("rabbit_server")
    server.delete_queues("orders", "slow", "patient", "unguarded")
    return Place("classic", {"POISON_BROKER": server.url})


SIGNALS: dict[str, tuple[list[signal.Signals], dict[str, str]]] = {
    "quit": ([signal.SIGQUIT], {}),
    "twice": ([signal.SIGINT, signal.SIGINT], {}),
    "remapped": ([signal.SIGTERM], {"REMAP_SIGTERM": "SIGQUIT"}),
}


@pytest.mark.parametrize(
    ("pool", "how"),
    [("threads", "quit"), ("solo", "quit"), *(("prefork", how) for how in SIGNALS)],
)
def test_a_cold_shutdown_during_a_count_ends_and_nothing_starts(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    ran: Ran,
    broker: Place,
    store: CommandProxy,
    how: str,
    pool: str,
) -> None:
    """The handler waits for what it interrupted; the messages come back, and each runs once."""
    keys = [f"k-{n}" for n in range(6)]
    conf = {"worker_prefetch_multiplier": 8, "dlq_transport_options": {"socket_timeout": 20}}
    signals, env = SIGNALS[how]
    counting = store.fault("hold", sends("EVALSHA", script_text("count").digest))
    worker = start_worker(
        {**conf, "dlq_url": store.url}, env={**broker.env, **env}, pool=pool, arguments=("-c", "4")
    )
    publish(redis_url, broker, *(("healthy", key, MAY_HAVE_RUN) for key in keys))
    assert counting.met.wait(20)

    for number in signals:
        worker.process.send_signal(number)
        begun = time.monotonic()
        poll(lambda begun=begun: time.monotonic() - begun > 0.5)  # type: ignore[misc]
    counting.release()
    worker.process.wait(40)

    if pool == "prefork":
        assert sum(map(ran, keys)) == 0, worker.output
    second = start_worker(conf, env=broker.env)
    try:
        poll(lambda: all(ran(key) for key in keys), timeout_seconds=60)
    except AssertionError as error:
        lost = [key for key in keys if not ran(key)]
        raise AssertionError(f"{lost} did not run\n{worker.output}\n{second.output}") from error
    assert not poison.dlq.queues()


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
def test_a_store_that_fails_over_in_a_deploy_learns_what_the_deploy_ended(
    poison: ModuleType,
    redis_server: RedisServer,
    redis_url: str,
    start_worker: Start,
    ran: Ran,
    place: Place,
) -> None:
    """At a limit of one start: the store takes no writes when the worker gives its tasks back."""
    conf = {"dlq_queues": {"orders": {"max_deliveries": 1}}}
    worker = start_worker(conf, env=place.env)
    publish(redis_url, place, ("sleeps", "one", {"kwargs": {"seconds": 40}}))
    poll(lambda: ran("one"), timeout_seconds=20)
    seen = time.monotonic() + 2
    poll(lambda: time.monotonic() > seen)
    redis_server.client().replicaof("127.0.0.1", "1")
    os.killpg(worker.process.pid, signal.SIGTERM)
    try:
        poll(lambda: "read only replica" in worker.output, timeout_seconds=20)
        later = time.monotonic() + 2
        poll(lambda: time.monotonic() > later or worker.process.poll() is not None)
    finally:
        redis_server.client().replicaof("NO", "ONE")
    worker.process.wait(30)

    start_worker(conf, env=place.env)
    poll(lambda: ran("one") == 2, timeout_seconds=60)
    assert not poison.dlq.queues()
