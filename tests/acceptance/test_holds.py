"""Held messages with real workers: nothing runs, nothing is lost, all comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Celery
from servers import RedisServer
from waiting import poll
from workers import Place, Worker, diagonals, run_python

from celery_dlq import DeadLetters

Start = Callable[..., Worker]
Ran = Callable[[str], int]
SHORT_SIGHT = {"broker_transport_options": {"visibility_timeout": 1}}

PUBLISH = """
import json, sys, poison_app as p
for name, key, options in json.loads(sys.argv[1]):
    p.app.send_task(f"poison_app.{name}", (key,), **options)
"""
HOLD = """
import sys, poison_app as p
print(p.dlq.hold(sys.argv[1]).id)
"""
RELEASE = """
import json, sys, poison_app as p
print(json.dumps(p.dlq.release(sys.argv[1]).to_json()))
"""


def publish(redis_url: str, place: Place, *sent: tuple[str, str, dict[str, Any]]) -> None:
    """Publish tasks: name, key and options of each."""
    done = run_python(redis_url, "-c", PUBLISH, json.dumps(sent), **place.env)
    assert done.returncode == 0, done.stderr


def hold_of(redis_url: str, place: Place, task: str) -> str:
    """Hold a task by a process that uses this broker; the id of the hold."""
    done = run_python(redis_url, "-c", HOLD, task, **place.env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def release(redis_url: str, place: Place, hold_id: str) -> dict[str, Any]:
    """Release a hold by a process of its own, as an operator does."""
    done = run_python(redis_url, "-c", RELEASE, hold_id, **place.env)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def held(poison: ModuleType) -> int:
    """The number of held messages."""
    return sum(one.held for one in poison.dlq.holds())


@pytest.fixture
def broker(request: pytest.FixtureRequest, place: Place) -> Place:
    """The brokers whose order is certain."""
    if place.name == "sqs":
        pytest.skip("no order, and a quarter of a minute each")
    return place


@diagonals("prefork", "threads", "solo", brokers=("redis", "classic", "quorum"))
def test_nothing_that_is_held_runs_until_it_is_released(
    poison: ModuleType, redis_url: str, start_worker: Start, ran: Ran, broker: Place, pool: str
) -> None:
    """Guarded or not, acknowledged early or late, with or without an ETA; then each runs once."""
    worker = start_worker({"worker_prefetch_multiplier": 4}, env=broker.env, pool=pool)
    names = ("healthy", "fails_early")
    holds = [hold_of(redis_url, broker, f"poison_app.{name}") for name in names]
    poll(lambda: all(f"{hold} of" in worker.output for hold in holds), timeout_seconds=10)

    sent = [("healthy", f"h-{n}", {}) for n in range(20)]
    sent += [("healthy", "eta", {"countdown": 1}), ("healthy", "free", {"queue": "unguarded"})]
    publish(redis_url, broker, *sent, ("fails_early", "early", {}), ("delayed", "other", {}))
    poll(lambda: held(poison) == len(sent) + 1, timeout_seconds=30)
    poll(lambda: ran("other") == 1, timeout_seconds=30)
    keys = [key for _, key, _ in sent]
    assert {ran(key) for key in [*keys, "early"]} == {0}
    store = poison.dlq.assembly.backend.held
    args = [one.letter.args_json for one in store.letters(holds[0], newest_first=False)]
    assert [arg for arg in args if "h-" in arg] == [f'["h-{n}"]' for n in range(20)]
    if broker.name == "redis":
        with redis.Redis.from_url(redis_url) as client:
            poll(lambda: not client.hlen("unacked"), timeout_seconds=10)

    reports = [release(redis_url, broker, hold) for hold in holds]

    assert [report["published"] for report in reports] == [22, 1]
    poll(lambda: all(ran(key) == 1 for key in keys) and ran("early") == 1, timeout_seconds=30)
    poll(lambda: [q.letters for q in poison.dlq.queues()] == [1], timeout_seconds=30)  # fails_early
    (letter,) = poison.dlq.letters("orders-DLQ")
    assert (letter.deliveries, letter.redrives) == (1, 0)
    assert held(poison) == 0
    assert (
        "Traceback"
        not in worker.output.replace(letter.traceback or "", "").partition("LookupError")[0]
    )


def test_a_worker_killed_between_holding_and_acknowledging_holds_once(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    ran: Ran,
    grown_old: Callable[[], None],
) -> None:
    """The message comes back, and is in the queue of the hold already."""
    hold = poison.dlq.hold("poison_app.healthy")
    poison.healthy.delay("x")
    first = start_worker(SHORT_SIGHT, env={"POISON_DIE_AFTER_STORING": "1"}, wait=False)
    first.process.wait(30)
    first.kill()
    assert held(poison) == 1
    grown_old()
    start_worker(SHORT_SIGHT)
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.llen("orders") and not client.hlen("unacked"), timeout_seconds=30)
    assert (held(poison), ran("x")) == (1, 0)
    assert poison.dlq.release(hold.id).published == 1
    poll(lambda: ran("x") == 1, timeout_seconds=30)


def test_a_worker_that_was_away_learns_of_a_hold_before_its_first_message(
    poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """And a hold with an end is released by the workers."""
    for number in range(5):
        poison.healthy.delay(f"h-{number}")
    hold = poison.dlq.hold("poison_app.healthy", span=timedelta(hours=1))
    start_worker()
    poll(lambda: held(poison) == 5, timeout_seconds=10)
    assert {ran(f"h-{number}") for number in range(5)} == {0}
    store = poison.dlq.assembly.backend.instructions
    store.replace(hold, replace(hold, until=store.now() + timedelta(seconds=1)))
    poll(lambda: all(ran(f"h-{n}") == 1 for n in range(5)), timeout_seconds=40)
    assert poison.dlq.holds() == []


@diagonals("prefork", "gevent", "eventlet", brokers=("redis", "classic", "quorum"))
def test_a_full_hold_stops_its_queue_and_no_other(
    poison: ModuleType, redis_url: str, start_worker: Start, ran: Ran, broker: Place, pool: str
) -> None:
    """The rest waits on the broker, in order; after the release each message runs once."""
    hold = hold_of(redis_url, broker, "poison_app.healthy")
    publish(redis_url, broker, *(("healthy", f"h-{n}", {}) for n in range(30)))
    few = {"POISON_CONSTANTS": json.dumps({"celery_dlq.store.holds:MOST_HELD": 5})}
    conf = {"worker_prefetch_multiplier": 4}
    worker = start_worker(conf, env={**broker.env, **few}, pool=pool)
    poll(lambda: "Queue orders is not consumed" in worker.output, timeout_seconds=20)
    publish(redis_url, broker, ("delayed", "other", {"countdown": 0}))
    poll(lambda: ran("other") == 1, timeout_seconds=20)
    if broker.name == "redis":
        assert waiting(redis_url) == [f"('h-{n}',)" for n in range(5, 30)]
    assert held(poison) == 5

    assert release(redis_url, broker, hold)["published"] == 5

    poll(lambda: all(ran(f"h-{n}") == 1 for n in range(30)), timeout_seconds=30)
    assert "Queue orders is consumed again" in worker.output


def waiting(redis_url: str) -> list[str]:
    """The arguments of the messages in the queue, the next one first."""
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.hlen("unacked"), timeout_seconds=10)
        found = reversed(client.lrange("orders", 0, -1))
        return [json.loads(raw)["headers"]["argsrepr"] for raw in found]


@pytest.fixture
def store_server() -> Iterator[RedisServer]:
    """A Redis for the store alone, to be broken; the broker has its own."""
    with RedisServer() as server:
        yield server


def test_while_the_store_is_away_held_tasks_run_and_then_no_more(
    poison: ModuleType, start_worker: Start, ran: Ran, store_server: RedisServer
) -> None:
    """Each that runs is in the log; once the store answers, the hold is obeyed again."""
    conf = {"dlq_url": store_server.url, "dlq_transport_options": {"socket_timeout": 0.5}}
    with Celery("reader", broker=store_server.url) as app:
        app.conf.update(conf)
        app.tasks.register(poison.healthy)
        dlq = DeadLetters(app)
        dlq.hold("poison_app.healthy")
        worker = start_worker(conf)
        poison.healthy.delay("held")
        poll(lambda: dlq.holds()[0].held == 1, timeout_seconds=10)
        store_server.pause()
        assert poison.healthy.delay("meanwhile").get(timeout=20) == "meanwhile"
        assert "cannot hold it" in worker.output
        store_server.resume()
        poll(lambda: _is_held(poison, dlq), timeout_seconds=60)
        assert ran("held") == 0
        dlq.close()


def _is_held(poison: ModuleType, dlq: DeadLetters) -> bool:
    """Send another task; whether it is held."""
    before = dlq.holds()[0].held
    poison.healthy.delay("later")
    poll(lambda: True, timeout_seconds=1)
    return dlq.holds()[0].held > before
