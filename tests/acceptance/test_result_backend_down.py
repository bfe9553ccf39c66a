"""A result backend that is down while tasks succeed: they are healthy, and it is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import RedisServer
from test_brokers import publish
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetter, Reason

CAUSE = "the result backend did not take the result: "


@pytest.fixture
def results() -> Iterator[RedisServer]:
    """A Redis for results alone."""
    with RedisServer() as server:
        yield server


def conf_of(results: RedisServer, limit: int) -> dict[str, Any]:
    """The settings of a worker that gives up on its result backend soon."""
    retry = {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.1}
    return {
        "result_backend": results.url,
        "result_backend_transport_options": {"retry_policy": retry},
        "redis_socket_timeout": 1,
        "dlq_lease": 5,
        "dlq_queues": {"orders": {"max_deliveries": limit}},
    }


@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize(("pool", "limit"), [("threads", 1), ("solo", 1), ("threads", 2)])
def test_an_outage_charges_no_healthy_message(
    pool: str,
    limit: int,
    how: str,
    poison: Any,
    results: RedisServer,
    redis_url: str,
    start_worker: Callable[..., Worker],
    ran: Callable[[str], int],
) -> None:
    """Plain Celery leaves it with the broker and delivers it again; we do, when its lease ends."""
    start_worker(conf_of(results, limit), pool=pool)
    getattr(results, how)()
    publish(redis_url, Place("redis"), ["healthy"])
    poll(lambda: ran("healthy") > limit, timeout_seconds=40)
    assert not poison.dlq.queues()
    results.start() if how == "kill" else results.resume()

    with results.client() as client:
        (key,) = poll(lambda: client.keys("celery-task-meta-*"), timeout_seconds=40)
        # It comes back between the two stores of one end: Celery itself says that the task failed.
        failed = json.loads(client.get(key))["status"] == "FAILURE"
    assert failed or not poison.dlq.queues()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_an_outage_keeps_no_poison_alive(
    pool: str,
    results: RedisServer,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
) -> None:
    """A task that fails is charged, though its failure could not be stored either."""
    start_worker(conf_of(results, 2), pool=pool)
    results.kill()
    publish(redis_url, Place("redis"), ["fails"])
    (letter,) = letters()
    assert (letter.reason, ran("fails")) == (Reason.MAX_DELIVERIES_EXCEEDED, 2)


@pytest.mark.parametrize(
    ("place", "pool", "reason"),
    [
        ("redis", "prefork", Reason.FAILED),
        ("classic", "prefork", Reason.FAILED),
        ("classic", "threads", Reason.MAX_DELIVERIES_EXCEEDED),
    ],
    indirect=["place"],
)
def test_a_letter_of_an_outage_names_the_result_backend(
    pool: str,
    reason: Reason,
    place: Place,
    results: RedisServer,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
) -> None:
    """A pool process reports a failure, as with Celery alone; RabbitMQ has no leases to end."""
    start_worker(conf_of(results, 2), pool=pool, env=place.env)
    results.kill()
    publish(redis_url, place, ["healthy"])

    (letter,) = letters()
    assert letter.reason is reason
    assert CAUSE in letter.description
