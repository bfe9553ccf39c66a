"""A message belongs to the worker that fetched it while that lives, and to the next one after.

Redis as the broker. The visibility timeout of 2 s makes a lease of 2 s, so that much of this
would be given to another worker by kombu, too.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import pytest
import redis
from servers import RedisServer
from waiting import poll
from workers import GREEN, Worker

Start = Callable[..., Worker]
Ran = Callable[[str], int]

LEASE = 2.0
SHORT: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": LEASE}}
LONG = 2.5 * LEASE


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the broker."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def all_done(broker: redis.Redis) -> Callable[[], bool]:
    """Whether the broker has no message any more, waiting or held."""

    def nothing() -> bool:
        return not any(
            (
                broker.llen("orders"),
                broker.llen("slow"),
                broker.hlen("unacked"),
                broker.zcard("unacked_index"),
                broker.zcard("unacked_leases"),
            )
        )

    return nothing


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    """Let a worker and its pool stand still, as a suspended machine does."""
    os.killpg(worker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(worker.process.pid, signal.SIGCONT)


def wait(seconds: float) -> None:
    """Let time pass: that nothing happens in it is what a test looks for."""
    until = time.monotonic() + seconds
    poll(lambda: time.monotonic() > until, timeout_seconds=seconds + 10)


def held_back(broker: redis.Redis, queue: str = "orders") -> list[tuple[str, bool]]:
    """The messages in a queue, the next one first: first argument, and whether redelivered."""
    messages = [json.loads(entry) for entry in reversed(broker.lrange(queue, 0, -1))]
    return [
        (json.loads(base64.b64decode(message["body"]))[0][0], message["headers"]["redelivered"])
        for message in messages
    ]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_what_a_living_worker_holds_runs_once(
    poison: ModuleType, start_worker: Start, ran: Ran, all_done: Callable[[], bool], pool: str
) -> None:
    """A task and a countdown longer than lease and visibility timeout, beside an idle worker.

    The task leaves the event loop of solo and gevent no time: a thread renews.
    """
    first = start_worker(SHORT, pool=pool)
    poison.healthy.apply_async(("countdown",), countdown=LONG)
    poison.blocks.delay("long", LONG)
    poll(lambda: ran("long") == 1)
    second = start_worker(SHORT)

    poll(all_done, timeout_seconds=4 * LONG)

    assert (ran("long"), ran("countdown")) == (1, 1)
    for worker in (first, second):
        assert "back in their queues" not in worker.output
        assert "Leases are not renewed" not in worker.output


def test_messages_of_a_killed_worker_come_back_within_the_lease_in_order(
    poison: ModuleType, start_worker: Start, ran: Ran, broker: redis.Redis
) -> None:
    """Running, prefetched and waiting for an ETA; not after the visibility timeout of an hour."""
    conf = {"dlq_lease": 5, "worker_prefetch_multiplier": 4}
    first = start_worker(conf, arguments=("-c", "1"))
    poison.sleeps.delay("running", 60)
    poll(lambda: ran("running") == 1)
    poison.healthy.apply_async(("eta",), countdown=60)
    poll(lambda: broker.hlen("unacked") == 2)
    for number in range(3):
        poison.healthy.delay(f"waiting {number}")
    poll(lambda: broker.hlen("unacked") == 5)
    second = start_worker(conf, arguments=("--queues", "patient"))
    wait(2)  # so that all leases were renewed, and end together

    first.kill()
    killed = time.monotonic()
    poll(lambda: broker.llen("orders") == 5, timeout_seconds=30)
    took = time.monotonic() - killed

    assert 2 < took < 5 + 4
    names = ["running", "eta", "waiting 0", "waiting 1", "waiting 2"]
    assert held_back(broker) == [(name, True) for name in names]
    assert "5 messages are back in their queues" in second.output
    assert broker.hlen("unacked") == broker.zcard("unacked_leases") == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_stood_still_finds_out_what_others_own(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    all_done: Callable[[], bool],
    broker: redis.Redis,
    pool: str,
) -> None:
    """It starts none of their messages, acknowledges none, and goes on with new ones."""
    conf = {
        **SHORT,
        "worker_prefetch_multiplier": 4,
        "dlq_queues": {"orders": {"max_deliveries": 1}},
    }
    first = start_worker(conf, pool=pool, arguments=("-c", "1"))
    poison.sleeps.delay("running", 1)
    poll(lambda: ran("running") == 1)
    for number in range(3):
        poison.sleeps.delay(f"waiting {number}", 3)
    poll(lambda: broker.hlen("unacked") == 4)
    with stopped(first):
        second = start_worker(conf)
        poll(lambda: ran("waiting 0") and ran("waiting 1"), timeout_seconds=20)
    poll(lambda: "stood still" in first.output)
    poll(all_done, timeout_seconds=20)

    assert [ran(f"waiting {number}") for number in range(3)] == [1, 1, 1]
    # The one that ran, too, unless it ended before the worker found out. A busy machine may stand
    # still by itself; others then take fewer.
    assert len(re.findall("others took [34] of its messages", first.output)) == 1
    second.stop()
    for number in range(6):
        poison.healthy.delay(f"new {number}")
    poll(all_done)
    assert [ran(f"new {number}") for number in range(6)] == [1] * 6
    assert "celery_dlq, please report" not in first.output + second.output


def test_a_worker_that_stood_still_for_less_than_its_lease_goes_on(
    poison: ModuleType, start_worker: Start, ran: Ran, all_done: Callable[[], bool]
) -> None:
    """Nothing happens: no message changes hands, no line in the log."""
    conf = {"dlq_lease": 6}
    first = start_worker(conf)
    second = start_worker(conf, arguments=("--queues", "patient"))
    poison.sleeps.delay("short", 1)
    poll(lambda: ran("short") == 1)
    with stopped(first):
        wait(3)
    poll(all_done)

    assert ran("short") == 1
    assert "ERROR" not in first.output
    assert "back in their queues" not in second.output


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_a_lost_connection_neither_doubles_nor_loses_anything(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    all_done: Callable[[], bool],
    broker: redis.Redis,
    redis_server: RedisServer,
    pool: str,
) -> None:
    """What runs goes on and is acknowledged; what waits comes back at once, not after the lease."""
    conf = {"worker_prefetch_multiplier": 4}
    green = pool in GREEN
    waiting = [] if green else ["waiting 0", "waiting 1"]  # there, nothing waits for a place
    worker = start_worker(conf, pool=pool, arguments=("-c", "9" if green else "1"))
    poison.sleeps.delay("running", 8)
    poll(lambda: ran("running") == 1)
    poison.healthy.apply_async(("eta",), countdown=12)
    for name in waiting:
        poison.healthy.delay(name)
    poll(lambda: broker.hlen("unacked") == 2 + len(waiting))

    redis_server.close_connections()
    poll(lambda: "Connection to broker lost" in worker.output)
    poll(lambda: redelivered(broker) == 1 + len(waiting))
    poll(all_done, timeout_seconds=40)

    assert (ran("running"), ran("eta")) == (1, 1)
    assert [ran(name) for name in waiting] == [1] * len(waiting)
    assert "of it still runs" not in worker.output


def redelivered(broker: redis.Redis) -> int:
    """How many of the held messages were given back before."""
    records = broker.hgetall("unacked").values()
    return sum(bool(json.loads(record)[0]["headers"].get("redelivered")) for record in records)


def test_a_task_that_a_lost_connection_cancels_comes_back_soon(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    all_done: Callable[[], bool],
    redis_server: RedisServer,
) -> None:
    """worker_cancel_long_running_tasks_on_connection_loss: not after the lease of a minute."""
    worker = start_worker({"worker_cancel_long_running_tasks_on_connection_loss": True})
    poison.sleeps.delay("cancelled", 5)
    poll(lambda: ran("cancelled") == 1)

    redis_server.close_connections()
    poll(lambda: ran("cancelled") == 2, timeout_seconds=20)

    poll(all_done, timeout_seconds=20)
    assert ran("cancelled") == 2
    assert not poison.dlq.queues()
    assert "back in their queues" not in worker.output


@pytest.mark.parametrize("away", ["paused", "restarted"])
def test_live_workers_keep_their_messages_when_redis_was_away(
    poison: ModuleType, tmp_path: Path, away: str
) -> None:
    """For longer than the lease; they renew before anybody looks for dead workers."""
    with RedisServer("--appendonly", "yes") as server:
        traces = redis.Redis.from_url(server.url.rpartition("/")[0] + "/2")
        client = server.client()
        logs = [tmp_path / "a.log", tmp_path / "b.log"]
        with Worker(server.url, logs[0], SHORT) as one, Worker(server.url, logs[1], SHORT) as two:
            with poison.app.connection_for_write(server.url) as connection:
                for number in range(4):
                    poison.sleeps.apply_async(
                        (f"long {number}", 11), connection=connection, queue="orders"
                    )
                poll(lambda: all(traces.exists(f"ran:long {n}") for n in range(4)))
            if away == "paused":
                server.pause()
                wait(3 * LEASE)
                server.resume()
            else:
                server.stop()
                wait(3 * LEASE)
                server.start()
            poll(
                lambda: client.hlen("unacked") == 0 and not client.llen("orders"),
                timeout_seconds=60,
            )

            assert [traces.llen(f"ran:long {n}") for n in range(4)] == [1] * 4
            for worker in (one, two):
                assert "back in their queues" not in worker.output


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_message_during_whose_receipt_the_worker_is_stopped_is_not_to_blame(
    poison: ModuleType, start_worker: Start, ran: Ran, broker: redis.Redis, pool: str
) -> None:
    """With threads, Celery's handler of a cold shutdown raises where the signal strikes."""
    conf = {"worker_prefetch_multiplier": 4}
    worker = start_worker(conf, pool=pool, arguments=("-c", "1"))
    poison.sleeps.delay("running", 4)
    poll(lambda: ran("running") == 1)
    poison.stops_at_receipt.delay("innocent")
    poll(lambda: worker.process.poll() is not None, timeout_seconds=25)
    poll(lambda: [name for name, _ in held_back(broker)][-1:] == ["innocent"], timeout_seconds=25)
    assert poison.dlq.queues() == []


SOFT = {"worker_soft_shutdown_timeout": 0.5}
ENDS = {
    "warm": (2, [signal.SIGTERM], {}),
    "cold": (4, [signal.SIGQUIT], {}),
    "interrupted twice": (4, [signal.SIGINT, signal.SIGINT], {}),
    "soft": (4, [signal.SIGQUIT], SOFT),
    "remote": (4, [], {}),
}


@pytest.mark.parametrize(
    ("end", "pool"),
    [
        *itertools.product(["warm", "cold", "soft"], ["prefork", "threads", "gevent"]),
        ("cold", "eventlet"),
        ("interrupted twice", "prefork"),
        ("remote", "threads"),
    ],
)
def test_a_shutdown_leaves_nothing_behind(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    broker: redis.Redis,
    end: str,
    pool: str,
) -> None:
    """What did not run is in the queue, in order; what ran is acknowledged; nothing is held."""
    seconds, signals, more = ENDS[end]
    if end == "soft" and celery.VERSION < (5, 5):
        pytest.skip("new in Celery 5.5")
    green = pool in GREEN
    waiting = [] if green else ["waiting 0", "waiting 1", "waiting 2"]
    conf = {"worker_prefetch_multiplier": 4, **more}
    worker = start_worker(conf, pool=pool, arguments=("-c", "9" if green else "1"))
    poison.healthy.apply_async(("eta",), countdown=60)
    poll(lambda: broker.hlen("unacked") == 1)
    poison.sleeps.delay("running", seconds)
    poll(lambda: ran("running") == 1)
    for name in waiting:
        poison.healthy.delay(name)
    poll(lambda: broker.hlen("unacked") == 2 + len(waiting))

    for number in signals:
        worker.process.send_signal(number)
        wait(0.2)
    if not signals:
        with poison.app.connection() as fresh:  # another test may have closed those of the pool
            poll(lambda: poison.app.control.ping(timeout=1, limit=1, connection=fresh))
            poison.app.control.shutdown(connection=fresh)
    poll(lambda: worker.process.poll() is not None, timeout_seconds=25)

    left = [name for name, _ in held_back(broker)]
    finished = "running" not in left
    expected = ["eta", *([] if finished else ["running"]), *waiting]
    if celery.VERSION < (5, 5):  # it ends the pool first, and rejects what that runs
        assert sorted(left) == sorted(expected)
    else:
        assert left == expected
    assert finished or end not in ("warm", "remote")
    assert [
        broker.hlen("unacked"),
        broker.zcard("unacked_index"),
        broker.zcard("unacked_leases"),
    ] == [0, 0, 0], worker.output
    assert "guard failed" not in worker.output


def test_replaced_pool_processes_neither_double_nor_lose_anything(
    poison: ModuleType, start_worker: Start, ran: Ran, all_done: Callable[[], bool]
) -> None:
    """A process a task, and a pool that is restarted in between."""
    conf = {
        "worker_max_tasks_per_child": 1,
        "worker_prefetch_multiplier": 4,
        "worker_pool_restarts": True,
    }
    worker = start_worker(conf)
    for number in range(12):
        poison.healthy.delay(f"m{number}")
    poll(lambda: ran("m5") == 1, timeout_seconds=30)
    with poison.app.connection() as fresh:  # another test may have closed those of the pool
        assert poison.app.control.pool_restart(reply=True, timeout=10, limit=1, connection=fresh)
    for number in range(12, 16):
        poison.healthy.delay(f"m{number}")
    poll(all_done, timeout_seconds=30)

    assert [ran(f"m{number}") for number in range(16)] == [1] * 16, worker.output


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"dlq_lease": 4}, "expected dlq_lease to be a duration of at least 5 seconds"),
        ({**SHORT, "dlq_lease": 5}, "at most the broker's visibility timeout (2 s), got 5 s"),
        ({"dlq_reliable_fetch": "no"}, "expected dlq_reliable_fetch to be True or False, got 'no'"),
    ],
)
def test_a_worker_with_a_lease_that_cannot_work_does_not_start(
    start_worker: Start, conf: dict[str, Any], said: str
) -> None:
    """One line says what is wrong."""
    worker = start_worker(conf, wait=False)
    assert worker.process.wait(60) == 1
    assert said in worker.output
    assert "Traceback" not in worker.output


def test_a_handler_of_the_log_that_raises_costs_no_lease(
    poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """The thread that renews says that Redis is away; the error of the handler is not its end."""
    with RedisServer() as server:
        env = {"POISON_BROKER": server.url}
        worker = start_worker(SHORT, app="raising_log_app", env=env)
        server.pause()
        poll(lambda: "Leases are not renewed" in worker.output, timeout_seconds=30)
        server.resume()
        with celery.Celery(broker=server.url) as app:
            for number in range(2):
                app.send_task("poison_app.sleeps", (f"long-{number}", 3 * LEASE), queue="orders")
        poll(lambda: ran("long-0") and ran("long-1"), timeout_seconds=30)
        start_worker(SHORT, env=env)
        client = server.client()
        poll(lambda: not client.exists("unacked", "orders"), timeout_seconds=60)
    assert (ran("long-0"), ran("long-1")) == (1, 1)
