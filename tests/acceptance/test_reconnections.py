"""A worker whose consumer loses its connection: signs of life, and what is periodic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import redis
from intervals import change
from rabbit import RabbitServer
from raw import JSON, headers, publish
from tcp_proxy import TcpProxy
from test_counting import count_of, runs
from waiting import poll
from workers import QUEUES, Place, Worker

from celery_dlq import DeadLetter, Outcome

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")
EACH = [("quorum", "prefork"), *(("classic", pool) for pool in POOLS)]


@pytest.fixture
def way(rabbit_server: RabbitServer) -> Iterator[TcpProxy]:
    """The way of one worker to RabbitMQ."""
    with TcpProxy(rabbit_server.port) as proxy:
        proxy.open()
        yield proxy


def through(way: TcpProxy, place: Place, server: RabbitServer) -> dict[str, str]:
    """The environment of a worker that goes this way."""
    url = place.env["POISON_BROKER"]
    return {**place.env, "POISON_BROKER": url.replace(f":{server.port}", f":{way.port}")}


@pytest.mark.parametrize(("place", "pool"), EACH, indirect=["place"])
def test_what_runs_on_a_worker_that_reconnects_is_not_dead(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    ran: Callable[[str], int],
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    rabbit_server: RabbitServer,
    way: TcpProxy,
    place: Place,
    pool: str,
) -> None:
    """Another worker runs the copy uncharged, as plain Celery does; there is no letter."""
    change(monkeypatch, tick=0.4, counter_beat=0.4, counter_stale=2.0)
    conf = {"dlq_queues": {"orders": {"max_deliveries": 1}}}
    start_worker(conf, env=through(way, place, rabbit_server), pool=pool)
    body = json.dumps([["long", 60], {}, {}]).encode()
    publish(rabbit_server.url, body, headers=headers("poison_app.sleeps", "long"), **JSON)
    poll(lambda: ran("long") == 1)
    way.shut()

    second = start_worker(conf, env=place.env)
    poll(lambda: ran("long") == 2, timeout_seconds=10)

    assert count_of(runs(redis_url)["long"]) == "1"
    assert "of it still runs, here or on another worker" in second.output
    assert not poison.dlq.queues()


def test_what_kills_its_process_meanwhile_starts_once_more_at_most(
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    rabbit_server: RabbitServer,
    way: TcpProxy,
) -> None:
    """The worker that reconnects lives, the process that ran the message does not."""
    rabbit_server.delete_queues(*QUEUES.split(","))
    place = Place("classic", {"POISON_BROKER": rabbit_server.url})
    conf = {"dlq_queues": {"orders": {"max_deliveries": 1}}}
    start_worker(conf, env=through(way, place, rabbit_server))
    body = json.dumps([["killer"], {}, {}]).encode()
    publish(rabbit_server.url, body, headers=headers("poison_app.killed_later", "killer"), **JSON)
    poll(lambda: ran("killer") == 1)
    way.shut()

    second = start_worker(conf, env=place.env)
    (letter,) = letters(timeout_seconds=40)
    assert ran("killer") <= 2, second.output
    assert letter.history[0].outcome is Outcome.WORKER_LOST


CUTS = 5


@pytest.mark.parametrize(("place", "pool"), EACH[1:], indirect=["place"])
def test_what_is_periodic_ends_with_its_connection(
    start_worker: Callable[..., Worker],
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    rabbit_server: RabbitServer,
    way: TcpProxy,
    place: Place,
    pool: str,
) -> None:
    """An idle worker asks Redis as often after some reconnections as before them."""
    change(monkeypatch, tick=0.2)
    with redis.Redis.from_url(redis_url) as client:
        worker = start_worker(env=through(way, place, rabbit_server), pool=pool)
        before = commands_of_two_seconds(client)
        for cut in range(1, CUTS + 1):
            way.cut()
            poll(lambda cut=cut: worker.output.count(" Connected to") > cut, timeout_seconds=30)
        assert commands_of_two_seconds(client) < 2 * before


def commands_of_two_seconds(client: redis.Redis) -> int:
    """How many commands Redis gets in two seconds."""
    begun, end = int(client.info()["total_commands_processed"]), time.monotonic() + 2
    poll(lambda: time.monotonic() > end, every_seconds=0.5)
    return int(client.info()["total_commands_processed"]) - begun
