"""After a crash a message waits: uncharged, without the place of a healthy one, and never lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import redis
from rabbit import RabbitServer
from test_brokers import publish
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome

Start = Callable[..., Worker]
Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]

PUBLISH = """
import json, sys, poison_app as p
for name, key in json.loads(sys.argv[1]):
    p.app.send_task(f"poison_app.{name}", (key,))
"""


def conf(**policy: Any) -> dict[str, Any]:
    """Settings of a worker with a prefetch window of two messages."""
    return {"dlq_queues": {"orders": policy}, "dlq_lease": 5, "worker_prefetch_multiplier": 1}


def send(redis_url: str, place: Place, *sent: tuple[str, str]) -> None:
    """Publish tasks: name and key of each."""
    done = run_python(redis_url, "-c", PUBLISH, json.dumps(sent), **place.env)
    assert done.returncode == 0, done.stderr


def gaps(letter: DeadLetter) -> list[timedelta]:
    """The time between each end of a delivery and the next start; of a vanished one, its start."""
    before, after = letter.history[:-1], letter.history[1:]
    pairs = zip(before, after, strict=True)
    return [later.started_at - (one.ended_at or one.started_at) for one, later in pairs]


def test_each_wait_is_twice_as_long_and_none_is_charged(
    poison: ModuleType, redis_url: str, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """Three starts of three, as without a delay, over more than seven seconds."""
    start_worker(conf(max_deliveries=3, crash_delay=2.5))
    publish(redis_url, Place("redis"), ["killed", "requeues"])
    found = {one.task_name.rpartition(".")[2]: one for one in letters(count=2)}
    crashed = found["killed"]
    assert [one.outcome for one in crashed.history] == [Outcome.WORKER_LOST] * 3
    assert (crashed.deliveries, ran("killed")) == (3, 3)
    first, second = gaps(crashed)
    assert timedelta(seconds=2.4) <= first <= timedelta(seconds=9)
    assert timedelta(seconds=4.9) <= second <= timedelta(seconds=14)
    # What was given back on purpose did not crash.
    assert max(gaps(found["requeues"])) < timedelta(seconds=2.4)


def test_healthy_neighbours_run_while_many_wait(
    poison: ModuleType, redis_url: str, start_worker: Start, ran: Ran, place: Place
) -> None:
    """Five wait, and the window has two places."""
    start_worker(conf(max_deliveries=2, crash_delay=90), env=place.env)
    poisoned = [f"poison-{n}" for n in range(5)]
    send(redis_url, place, *(("killed", key) for key in poisoned))
    poll(lambda: all(ran(key) for key in poisoned), timeout_seconds=30)
    healthy = [f"healthy-{n}" for n in range(20)]
    send(redis_url, place, *(("healthy", key) for key in healthy))
    poll(lambda: all(ran(key) == 1 for key in healthy), timeout_seconds=30)
    assert {ran(key) for key in poisoned} == {1}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("redis", signal.SIGTERM),
        ("redis", signal.SIGKILL),
        ("classic", signal.SIGTERM),
        ("quorum", signal.SIGKILL),
    ],
    indirect=["place"],
)
def test_a_message_that_waits_survives_its_worker(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    how: signal.Signals,
) -> None:
    """The next worker waits for the rest, and starts it as often as its limit says."""
    first = start_worker(conf(max_deliveries=2, crash_delay=6), env=place.env)
    send(redis_url, place, ("killed", "x"))
    poll(lambda: "starts again in" in first.output, timeout_seconds=20)
    first.process.send_signal(how)
    first.process.wait(15)
    first.kill()
    start_worker(conf(max_deliveries=2, crash_delay=6), env=place.env)
    (letter,) = letters(timeout_seconds=40)
    assert (letter.deliveries, ran("x")) == (2, 2)
    assert timedelta(seconds=5.9) <= gaps(letter)[0] <= timedelta(seconds=25)


@pytest.mark.parametrize(
    ("place", "pool"),
    [("redis", "prefork"), ("classic", "prefork"), ("redis", "gevent"), ("classic", "threads")],
    indirect=["place"],
)
def test_a_message_that_took_its_worker_down_waits(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    pool: str,
) -> None:
    """Nobody recorded the end; the last sign of life of its worker is it."""
    how: dict[str, Any] = {"env": place.env, "pool": pool}
    delay = 14 if place.name == "redis" else 8  # there it comes back after its lease of 5 s
    worker = start_worker(conf(max_deliveries=2, crash_delay=delay), **how)
    send(redis_url, place, ("kills_worker" if pool == "prefork" else "killed", "x"))
    worker.process.wait(20)
    worker.kill()
    second = start_worker(conf(max_deliveries=2, crash_delay=delay), **how)
    poll(lambda: "starts again in" in second.output, timeout_seconds=20)
    send(redis_url, place, ("healthy", "beside"))
    poll(lambda: ran("beside") == 1, timeout_seconds=10)
    assert ran("x") == 1
    second.process.wait(60)
    second.kill()
    start_worker(conf(max_deliveries=2, crash_delay=delay), **how)
    (letter,) = letters(timeout_seconds=30)
    assert (letter.deliveries, ran("x")) == (2, 2)
    assert gaps(letter)[0] >= timedelta(seconds=delay - 2)  # signs are a second apart, or more


def test_a_message_at_its_limit_does_not_wait(
    poison: ModuleType, redis_url: str, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """It becomes a letter at once, and its prefetch place is free."""
    start_worker(conf(max_deliveries=1, crash_delay=300))
    publish(redis_url, Place("redis"), ["killed"])
    (letter,) = letters(timeout_seconds=20)
    assert (letter.deliveries, ran("killed")) == (1, 1)
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.hlen("unacked"), timeout_seconds=10)


@pytest.mark.parametrize("place", ["quorum"], indirect=True)
def test_a_lost_connection_neither_loses_nor_doubles_what_waits(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    rabbit_server: RabbitServer,
) -> None:
    """The broker redelivers it; the copy waits for the rest, and the first one does not start."""
    worker = start_worker(conf(max_deliveries=2, crash_delay=30), env=place.env)
    send(redis_url, place, ("killed", "x"))
    poll(lambda: "starts again in" in worker.output, timeout_seconds=20)
    rabbit_server.close_connections()
    poll(lambda: worker.output.count("starts again in") == 2, timeout_seconds=25)
    (letter,) = letters(timeout_seconds=60)
    assert (letter.deliveries, ran("x")) == (2, 2)
    assert gaps(letter)[0] >= timedelta(seconds=29.9)


def test_an_operator_sees_what_waits_and_may_want_it_dead(
    poison: ModuleType, redis_url: str, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """It is with what waits for its ETA, and a demand does not wait for its start."""
    worker = start_worker(conf(max_deliveries=3, crash_delay=300))
    sent = poison.killed.delay("x")
    poll(lambda: "starts again in" in worker.output, timeout_seconds=20)

    def scheduled() -> list[str]:
        found = poison.app.control.inspect(timeout=1, limit=1).scheduled() or {}
        return [one["request"]["id"] for several in found.values() for one in several]

    poll(lambda: scheduled() == [sent.id], timeout_seconds=20)
    poison.dlq.dead_letter(sent.id)
    (letter,) = letters(timeout_seconds=20)
    assert (letter.reason.value, letter.deliveries, ran("x")) == ("operator", 1, 1)
    poison.healthy.delay("beside")
    poll(lambda: ran("beside") == 1, timeout_seconds=20)
