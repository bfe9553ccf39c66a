"""An idle worker on a Redis broker is told of instructions; it does not ask for them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import intervals
import pytest
from kombu import Connection
from kombu.transport.redis import Transport
from servers import RedisServer
from waiting import poll

from celery_dlq.features.dead_letter.demand import Demand
from celery_dlq.letters.record import EPOCH
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import WorkerInfo
from celery_dlq.transport.redis.broker import broker_of
from celery_dlq.transport.redis.channel import reliable
from celery_dlq.transport.redis.leases import Leases
from celery_dlq.worker.heartbeat import Heartbeat

WORKERS = 3


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    """Give the store of the broker's Redis."""
    store = Store(redis_url)
    yield store
    store.close()


@pytest.fixture
def fleet(
    store: Store, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[bool]]]:
    """Let idle workers, one of them on duty, look once; return who was told nothing, for sure."""
    intervals.change(monkeypatch, bell=1.0)
    connections, all_leases = [], []
    for _ in range(WORKERS):
        leases = Leases(60, store)

        def connected(channel: object, leases: Leases = leases) -> None:
            leases.connected(broker_of(channel))

        transport = reliable(Transport, leases, connected)
        connection = Connection(redis_server.url)
        connection.get_transport_cls = lambda transport=transport: transport
        channel = connection.default_channel
        channel.basic_consume("orders", no_ack=False, callback=print, consumer_tag="c")
        connections.append(connection)
        all_leases.append(leases)

    def look() -> list[bool]:
        for connection in connections:
            with suppress(socket.timeout):
                connection.drain_events(timeout=0.02)
        return [leases.watch.was_unchanged() for leases in all_leases]

    yield look
    for connection in connections:
        connection.release()


CHANGES: dict[str, Callable[[Store], object]] = {
    "instruction": lambda store: store.instructions.give(Demand(id="a task", actor="olga")),
    "job": lambda store: store.jobs.write("a job", {"state": "waiting", "updated_at": 0}),
    "flush": lambda store: store.client.flushall(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_all_workers_learn_of_a_change(
    store: Store, fleet: Callable[[], list[bool]], change: str
) -> None:
    """Each time, at once; then all is quiet again."""
    poll(lambda: all(fleet()))
    assert all(fleet())
    for _ in range(2):
        CHANGES[change](store)
        told: set[int] = set()

        def all_know(told: set[int] = told) -> bool:
            told.update(number for number, quiet in enumerate(fleet()) if not quiet)
            return len(told) == WORKERS

        poll(all_know, timeout_seconds=2)
        poll(lambda: all(fleet()), timeout_seconds=5)


def test_a_job_that_may_not_start_yet_wakes_nobody(
    store: Store, fleet: Callable[[], list[bool]]
) -> None:
    """It is found by the heartbeat of any worker, when it is due."""
    poll(lambda: all(fleet()))
    later = 4_000_000_000_000_000
    store.jobs.write("a job", {"state": "waiting", "start_at": later, "updated_at": 0})
    assert all(quiet for _ in range(10) for quiet in fleet())


def test_a_minute_of_heartbeats_costs_the_same_beside_a_thousand_workers(store: Store) -> None:
    """Commands, those of scripts too, and bytes: nothing ranges over all that are registered."""
    cost = []
    for workers in (10, 1_000):
        store.client.flushall()
        for number in range(workers):
            store.workers.register(_info(number))
        heartbeat = Heartbeat(store.workers, _info(0), store.instructions, lambda *_: None)
        before = _asked(store)
        for _ in range(60):
            heartbeat.tick()
        cost.append([after - b for after, b in zip(_asked(store), before, strict=True)])
    (few, few_bytes), (many, many_bytes) = cost
    assert many == few
    assert many_bytes <= 1.2 * few_bytes


def _info(number: int) -> WorkerInfo:
    return WorkerInfo(
        hostname=f"celery@web-{number}",
        pid=number,
        version="1",
        started_at=EPOCH,
        queues=("orders",),
        tasks=("shop.charge",),
        policies={},
    )


def _asked(store: Store) -> list[int]:
    """Commands and bytes sent so far."""
    calls = sum(one["calls"] for one in store.client.info("commandstats").values())
    return [calls, store.client.info("stats")["total_net_output_bytes"]]
