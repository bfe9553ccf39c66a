"""Guarded and plain workers on one queue of a Redis broker: together, and one after the other.

``CELERY_DLQ_TEST_PEER`` is a Python for the plain workers, of another version of Celery, say.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import VERSION, Celery
from kombu import Exchange
from waiting import poll
from workers import Worker

PEER = os.environ.get("CELERY_DLQ_TEST_PEER", sys.executable)
SIGHT_SECONDS = 6
KINDS = ("plain", "guarded")


class Fleet:
    """Workers on one Redis, and an app that publishes for them.

    Args:
        redis_url: Of the broker.
        folder: For logs.
    """

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.url = redis_url.rpartition("/")[0]
        self.broker = redis.Redis.from_url(redis_url)
        self._redis_url = redis_url
        self._folder = folder
        self._started: list[Worker] = []
        self.app = Celery("fleet", broker=redis_url, backend=f"{self.url}/1", set_as_current=False)
        self.app.conf.task_default_queue = "orders"

    def start(
        self,
        kind: str,
        *arguments: str,
        pool: str = "prefork",
        queues: str = "orders",
        alone: bool = True,
        conf: dict[str, Any] | None = None,
    ) -> Worker:
        """Start a worker of a kind; one that is not alone looks for others."""
        guarded = kind == "guarded"
        name = f"{kind}-{len(self._started)}"
        worker = Worker(
            self._redis_url,
            self._folder / f"{name}.log",
            arguments=("-n", f"{name}@fleet", "-Q", queues, "-c", "1", *arguments),
            env={
                "FLEET_REDIS": self.url,
                "FLEET_GUARDED": "1" if guarded else "",
                "FLEET_CONF": json.dumps(conf or {}),
            },
            pool=pool,
            app="fleet_app",
            python=None if guarded else (PEER,),
        )
        if not alone:
            for option in ("--without-gossip", "--without-mingle"):
                worker.command.remove(option)
        self._started.append(worker)
        return worker.start()

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.send_task(f"fleet.{task}", args, queue="orders", **options)

    def ran(self, key: str) -> list[str]:
        """The workers on which the task with a key started."""
        with redis.Redis.from_url(f"{self.url}/2") as client:
            return [name.decode() for name in client.lrange(f"ran:{key}", 0, -1)]

    def rests(self) -> bool:
        """True when nothing is queued or unacknowledged."""
        keys = ("orders", "unacked", "unacked_index")
        return not self.broker.exists(*keys)

    def close(self) -> None:
        for worker in self._started:
            worker.end()
        self.app.close()
        self.broker.close()


@pytest.fixture
def fleet(redis_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet, ended after the test."""
    with closing(Fleet(redis_url, tmp_path)) as fleet:
        yield fleet


def old(fleet: Fleet) -> bool:
    """True when all that a dead worker holds is older than the visibility timeout."""
    newest = fleet.broker.zrange("unacked_index", -1, -1, withscores=True)
    return time.time() - newest[0][1] > SIGHT_SECONDS + 0.1


def test_a_plain_and_a_guarded_worker_share_a_queue(fleet: Fleet) -> None:
    """Each message runs once, on one of the two."""
    for kind in KINDS:
        fleet.start(kind)
    for n in range(60):
        fleet.send("healthy", f"shared-{n}", 0.02)
    poll(fleet.rests, timeout_seconds=40)
    ran = [fleet.ran(f"shared-{n}") for n in range(60)]
    assert [len(names) for names in ran] == [1] * 60
    assert {names[0].partition("-")[0] for names in ran} == set(KINDS)


def test_a_guarded_worker_has_one_connection_more_than_a_plain_one(fleet: Fleet) -> None:
    """That of the thread which renews leases; what a start or a letter opened is closed again."""
    fleet.send("healthy", "first")
    before, found = len(fleet.broker.client_list()), {}
    for kind in KINDS:
        worker = fleet.start(kind, alone=False)
        for n in range(20):
            fleet.send("healthy", f"{kind}-{n}")
        fleet.send("unknown")  # guarded, it becomes a letter
        fleet.send("healthy", f"{kind}-last")
        poll(lambda kind=kind: fleet.ran(f"{kind}-last"), timeout_seconds=30)
        if kind == "guarded":
            poll(lambda: fleet.broker.keys("*orders-DLQ*"))
            most = before + found["plain"] + 1
            poll(lambda most=most: len(fleet.broker.client_list()) <= most, timeout_seconds=60)
        found[kind] = len(fleet.broker.client_list()) - before
        worker.stop()
        poll(lambda: len(fleet.broker.client_list()) <= before)


# A socket that the test's own publishing left is closed by Python's collector, some time later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "after"])
@pytest.mark.parametrize(("dead", "alive"), [KINDS, KINDS[::-1]])
def test_each_restores_what_a_killed_one_held(
    fleet: Fleet, dead: str, alive: str, beside: bool
) -> None:
    """Mixed fleet, upgrade and rollback: what ran, what was prefetched, what waits for its ETA."""
    first = fleet.start(dead)
    keys = ["runs", "prefetched-1", "prefetched-2", "eta"]
    fleet.send("stuck", "runs")
    poll(lambda: fleet.ran("runs"))
    fleet.send("healthy", "eta", countdown=2)
    for key in keys[1:3]:
        fleet.send("healthy", key)
    poll(lambda: fleet.broker.hlen("unacked") == 4)
    if beside:
        fleet.start(alive)
    first.kill()
    if not beside:
        assert fleet.broker.hlen("unacked") == 4
        poll(lambda: old(fleet), timeout_seconds=20)
        fleet.start(alive)

    poll(lambda: all(fleet.ran(key)[-1:] for key in keys), timeout_seconds=120)
    poll(fleet.rests, timeout_seconds=30)
    assert {key: len(fleet.ran(key)) for key in keys} == {
        "runs": 2,
        "prefetched-1": 1,
        "prefetched-2": 1,
        "eta": 1,
    }


def test_a_plain_worker_leaves_a_living_workers_messages_alone(fleet: Fleet) -> None:
    """A task, and a countdown, longer than the visibility timeout run once."""
    fleet.start("guarded")
    fleet.send("healthy", "long", 2 * SIGHT_SECONDS)
    poll(lambda: fleet.ran("long"))
    fleet.send("healthy", "late", countdown=2 * SIGHT_SECONDS)
    fleet.send("healthy", "next")
    poll(lambda: fleet.broker.hlen("unacked") == 3)
    fleet.start("plain")
    poll(fleet.rests, timeout_seconds=60)
    assert [len(fleet.ran(key)) for key in ("long", "late", "next")] == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("conf", "fetched"),
    [
        ({}, [4, 8]),
        ({"worker_prefetch_multiplier": 1}, [1, 2]),
        pytest.param(
            {"worker_disable_prefetch": True},
            [1, 2],
            marks=pytest.mark.skipif(VERSION < (5, 6), reason="new in Celery 5.6"),
        ),
    ],
)
def test_a_busy_worker_takes_no_more_than_its_prefetch_window(
    fleet: Fleet, kind: str, conf: dict[str, Any], fetched: list[int]
) -> None:
    """Also after its pool grew; the plain worker is the oracle."""
    fleet.start(kind, conf=conf)
    for n in range(12):
        fleet.send("healthy", f"window-{n}", 60)
    poll(lambda: fleet.broker.hlen("unacked") == fetched[0])
    fleet.app.control.pool_grow(1, reply=True, timeout=10, limit=1)
    poll(lambda: fleet.broker.hlen("unacked") == fetched[1])
    # The answer comes after whatever it had fetched beyond.
    fleet.app.control.inspect(timeout=2, limit=1).ping()
    assert fleet.broker.hlen("unacked") == fetched[1]
    assert fleet.broker.llen("orders") == 12 - fetched[1]


def test_rate_limits_hold_messages_and_not_the_worker(fleet: Fleet) -> None:
    """Two a second of these, while others run."""
    fleet.start("guarded")
    begun = time.monotonic()
    for n in range(6):
        fleet.send("limited", f"limited-{n}")
    fleet.send("healthy", "free")
    poll(fleet.rests, timeout_seconds=30)
    assert time.monotonic() - begun > 1.5
    assert [len(fleet.ran(f"limited-{n}")) for n in range(6)] == [1] * 6


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_remote_control_works_while_the_worker_is_idle_and_busy(fleet: Fleet, pool: str) -> None:
    """Ping, queues, reserved, revoke, consumers added and cancelled, shutdown."""
    worker = fleet.start("guarded", pool=pool)
    inspect = fleet.app.control.inspect(timeout=2, limit=1)
    control = fleet.app.control

    def said(name: str, *args: Any) -> Any:
        return next(iter((getattr(inspect, name)(*args) or {}).values()), None)

    assert poll(lambda: said("ping")) == {"ok": "pong"}
    assert [queue["name"] for queue in said("active_queues")] == ["orders"]
    control.add_consumer("short", reply=True, timeout=10, limit=1)
    fleet.app.send_task("fleet.healthy", ("added",), queue="short")
    poll(lambda: fleet.ran("added"))
    # With gevent, also a plain worker takes what comes while it still waits for the queue.
    control.cancel_consumer("short", reply=True, timeout=3)
    fleet.app.send_task("fleet.healthy", ("cancelled",), queue="short")
    waiting = fleet.send("healthy", "revoked", countdown=3)
    poll(lambda: [one["request"]["id"] for one in said("scheduled")] == [waiting.id])
    waiting.revoke()
    fleet.send("healthy", "still")
    poll(lambda: fleet.ran("still"))
    poll(fleet.rests)
    assert not fleet.ran("revoked")
    assert not fleet.ran("cancelled")
    assert fleet.broker.llen("short") == 1
    if pool == "prefork":
        fleet.send("healthy", "active", 2)
        poll(lambda: [one["args"][0] for one in said("active")] == ["active"])
    control.shutdown()
    assert worker.process.wait(15) == 0
    poll(fleet.rests)


def test_events_mingle_gossip_and_broadcasts_go_through_a_mixed_fleet(fleet: Fleet) -> None:
    """Workers see each other; every worker gets what is for all."""
    seen: dict[str, set[str]] = {}
    news = Exchange("news", type="fanout")

    def note(event: dict[str, Any]) -> None:
        seen.setdefault(event["type"], set()).add(event["hostname"].partition("-")[0])

    connection = fleet.app.connection_for_read()
    receiver = fleet.app.events.Receiver(connection, handlers={"*": note})
    capture = threading.Thread(target=receiver.capture, kwargs={"wakeup": False}, daemon=True)

    def send(key: str) -> None:
        fleet.app.send_task(
            "fleet.news", (key,), exchange="news", routing_key="orders", declare=[news]
        )

    def both_listen() -> bool:  # they subscribe a moment after they are ready
        send("first")
        return len({name.partition("-")[0] for name in fleet.ran("first")}) == len(KINDS)

    capture.start()
    try:
        workers = [fleet.start(kind, "-E", queues="orders,news", alone=False) for kind in KINDS]
        poll(both_listen, timeout_seconds=20, every_seconds=0.2)
        for _ in range(3):
            send("news")
        poll(lambda: len(fleet.ran("news")) == 6, timeout_seconds=20)
        for name in ("worker-online", "task-succeeded"):
            poll(lambda: seen.get(name) == {*KINDS}, timeout_seconds=20)  # noqa: B023
    finally:  # before its Redis ends: what the thread raises fails whatever test comes next
        receiver.should_stop = True
        capture.join(10)
        connection.close()
    assert "sync with 1 nodes" in workers[1].output
