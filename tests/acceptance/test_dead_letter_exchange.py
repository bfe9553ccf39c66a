"""Other services hear of each letter, whatever happens to the worker that stored it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from rabbit import RabbitServer
from waiting import poll
from workers import HERE, Place, Worker, run_python

from celery_dlq import DeadLetter

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]

EXCHANGE = Exchange("deaths", "topic")
CONF: dict[str, Any] = {
    "dlq_queues": {
        "orders": {
            "max_deliveries": 3,
            "dead_letter_exchange": {
                "name": "deaths",
                "type": "topic",
                "routing_key": "dead.orders",
            },
        }
    }
}

# A publisher that is killed with its worker, where a message should be published.
DIES = """
import os, signal
from celery_dlq.features.exchange.connection import Exchanges
Exchanges.publish = lambda *_, **__: os.killpg(os.getpgid(0), signal.SIGKILL)
from poison_app import *
"""


@pytest.fixture
def place(rabbit_server: RabbitServer) -> Iterator[Place]:
    """Give a RabbitMQ with nothing of these tests in it."""

    def clean() -> None:
        rabbit_server.delete_queues("orders", "slow", "patient", "unguarded", "alerts")
        with Connection(rabbit_server.url) as connection:
            connection.channel().exchange_delete("deaths")

    clean()
    yield Place("classic", {"POISON_BROKER": rabbit_server.url})
    clean()


@pytest.fixture
def alerts(place: Place) -> Iterator[Any]:
    """Give the queue of a service that listens to all deaths."""
    with Connection(place.env["POISON_BROKER"]) as connection:
        queue = Queue("alerts", EXCHANGE, "dead.#", channel=connection.channel())
        queue.declare()
        yield queue


def send(place: Place, redis_url: str, name: str) -> None:
    """Publish a task from a process of its own."""
    code = f"import poison_app as p; p.{name}.delay({name!r})"
    done = run_python(redis_url, "-c", code, **place.env)
    assert done.returncode == 0, done.stderr


def heard(alerts: Any) -> Any:
    return poll(lambda: alerts.get(no_ack=True), timeout_seconds=40, every_seconds=0.05)


def test_a_letter_is_published_beside_being_stored(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    place: Place,
    redis_url: str,
    alerts: Any,
) -> None:
    """With the death in its headers."""
    worker = start_worker(CONF, env=place.env)
    send(place, redis_url, "to_dlq")
    message = heard(alerts)
    (letter,) = letters()
    assert message.headers["dlq_letter"] == letter.id, worker.output
    assert message.headers["dlq_reason"] == "rejected"
    assert message.headers["dlq_source_queue"] == "orders"
    assert message.headers["task"] == "poison_app.to_dlq"
    assert message.delivery_info["routing_key"] == "dead.orders"
    assert "Traceback" not in worker.output.partition("ready.")[0]
    worker.process.terminate()
    assert worker.process.wait(30) == 0


def test_killed_between_storing_and_publishing_it_is_published_later(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    place: Place,
    redis_url: str,
    alerts: Any,
    tmp_path: Path,
) -> None:
    """One letter; by the next worker, though it never saw the message."""
    (tmp_path / "dying_app.py").write_text(DIES)
    path = f"{HERE}:{tmp_path}"
    first = start_worker(CONF, env={**place.env, "PYTHONPATH": path}, app="dying_app")
    send(place, redis_url, "to_dlq")
    first.process.wait(30)
    (letter,) = letters()
    assert alerts.get(no_ack=True) is None

    start_worker(CONF, env=place.env)

    assert heard(alerts).headers["dlq_letter"] == letter.id
    assert [found.id for found in letters()] == [letter.id]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dead_letter_exchange": {"name": "deaths", "type": "fanout"}}, "inequivalent arg 'type'"),
    ({"dead_letter_exchange": {"name": "", "routing_key": "nowhere"}}, "the queue 'nowhere'"),
]


def test_a_worker_refuses_what_the_broker_has_otherwise(
    start_worker: Start, place: Place, alerts: Any
) -> None:
    """One line each, no traceback, no password."""
    for policy, text in REFUSED:
        worker = start_worker({"dlq_queues": {"orders": policy}}, env=place.env, wait=False)
        assert worker.process.wait(60) == 1, worker.output
        assert text in worker.output
        assert "Traceback" not in worker.output
        assert "guest:guest" not in worker.output
        assert len([x for x in worker.output.splitlines() if x.startswith("Error: expected")]) == 1
