"""Default delays with real workers: what a worker publishes itself, and where messages wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import chain, chord
from waiting import poll
from workers import HERE, Place, Worker, environment

from celery_dlq import DeadLetter, Reason

Start = Callable[..., Worker]
DELAY = 1.5


def notes(redis_url: str, count: int) -> list[dict[str, Any]]:
    """Wait for the notes of this number of delayed tasks."""
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        poll(lambda: client.llen("delays") >= count, timeout_seconds=30)
        return [json.loads(note) for note in client.lrange("delays", 0, -1)]


def test_what_a_worker_publishes_is_delayed_too(
    poison: ModuleType, start_worker: Start, redis_url: str
) -> None:
    """The second step of a chain and the body of a chord are published by workers."""
    start_worker()
    chain(poison.healthy.si("first"), poison.notes_delay.si()).apply_async()
    chord([poison.healthy.si("a"), poison.healthy.si("b")], poison.notes_delay.si()).apply_async()

    found = notes(redis_url, 2)

    assert [note["seconds"] for note in found] == [DELAY, DELAY]
    assert {note["source"] for note in found} == {"dlq_queues['slow']"}
    assert all(note["eta"] for note in found)


@pytest.mark.parametrize("place", ["quorum"], indirect=True)
def test_on_a_quorum_queue_the_message_waits_in_rabbitmq(
    poison: ModuleType, place: Place, redis_url: str, start_worker: Start
) -> None:
    """Celery's native delayed delivery: the routing key says so; no worker holds the message."""
    start_worker(env=place.env)
    code = (
        "import poison_app as p\n"
        "p.notes_delay.apply_async()\n"
        "p.to_dlq.apply_async(('x',), countdown=1)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env=environment(redis_url, **place.env),
        cwd=HERE,
        check=True,
        timeout=60,
    )

    (note,) = notes(redis_url, 1)

    assert note["routing_key"].startswith("0.0.")
    assert note["routing_key"].endswith(".1.slow")  # 1 s of the 1.5: RabbitMQ knows whole seconds
    assert note["seconds"] == DELAY
    poll(poison.dlq.queues, timeout_seconds=30)
    (letter,) = poison.dlq.letters("orders-DLQ")  # guarded by its queue's policy all the same
    assert letter.source_queue == "orders"
    assert letter.max_deliveries == 3


def test_a_letter_says_how_long_its_message_was_held_back(
    poison: ModuleType, start_worker: Start, letters: Callable[..., list[DeadLetter]]
) -> None:
    """And a message that expires before its delay ends dies as ``expired``."""
    poison.delayed.apply_async(("x",), expires=0.5)
    start_worker({"dlq_queues": {"slow": {"default_delay": DELAY, "max_deliveries": 3}}})

    (letter,) = letters("slow-DLQ")

    assert letter.reason is Reason.EXPIRED
    headers = letter.decoded("headers")
    assert headers["dlq_default_delay"] == DELAY
    assert headers["dlq_default_delay_source"] == "dlq_queues['slow']"
