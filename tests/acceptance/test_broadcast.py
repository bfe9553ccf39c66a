"""Messages that every worker gets: kombu's Broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from waiting import poll
from workers import Place, Worker, run_python

# Celery declares no broadcast before it publishes, and kombu's Redis transport then takes the
# exchange for a direct one: the message goes into lists that nobody reads.
PUBLISH = """
import sys, broadcast_app as b
exchange = b.app.amqp.queues["refresh"].exchange
print(b.app.tasks[f"broadcast_app.{sys.argv[1]}"].apply_async(declare=[exchange]).id)
"""
QUEUES = "import broadcast_app as b; print(sorted((q.name, q.letters) for q in b.dlq.queues()))"
REDRIVE = "import broadcast_app as b; print(b.dlq.redrive('refresh-DLQ').to_json())"


@pytest.mark.parametrize("place", ["redis", "classic"], indirect=True)
def test_a_broadcast_has_one_dead_letter_queue_of_its_name(
    place: Place, redis_url: str, start_worker: Callable[..., Worker]
) -> None:
    """Each worker has a queue of its own, bcast.<uuid>: a redrive refuses it and says so."""

    def told(code: str, *arguments: str) -> str:
        done = run_python(redis_url, "-c", code, *arguments, **place.env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(name: str) -> Worker:
        arguments = ("--queues", "refresh", "--hostname", f"{name}@x")
        more: dict[str, Any] = {"env": place.env, "app": "broadcast_app", "pool": "threads"}
        return start_worker(arguments=arguments, **more)

    workers = [start("one"), start("two")]
    told(PUBLISH, "refresh")
    for one in workers:
        poll(lambda one=one: "nothing to refresh" in one.output, timeout_seconds=20)
    assert told(QUEUES) == "[('refresh-DLQ', 1)]"

    report = told(REDRIVE)
    assert "'published': 0, 'finished': 0" in report
    assert "queue 'refresh' is a broadcast" in report
    assert told(QUEUES) == "[('refresh-DLQ', 1)]"
    if place.name == "redis":
        with redis.Redis.from_url(redis_url) as client:
            assert not client.exists("refresh")


@pytest.mark.parametrize("place", ["redis", "classic"], indirect=True)
def test_what_a_broadcast_that_kills_its_process_leaves_behind(
    place: Place, redis_url: str, start_worker: Callable[..., Worker]
) -> None:
    """On RabbitMQ one letter at the limit; on Redis a list that nobody reads, as Celery does it."""
    more: dict[str, Any] = {"env": place.env, "app": "broadcast_app"}
    workers = [
        start_worker(
            {"task_reject_on_worker_lost": True},
            arguments=("--queues", "refresh", "--hostname", f"{name}@x"),
            **more,
        )
        for name in ("one", "two")
    ]
    done = run_python(redis_url, "-c", PUBLISH, "dies", **place.env)
    assert done.returncode == 0, done.stderr
    for one in workers:
        poll(lambda one=one: "dies here" in one.output, timeout_seconds=20)

    with redis.Redis.from_url(redis_url) as client:
        if place.name == "redis":
            poll(lambda: len(client.keys("bcast.*")) == 2, timeout_seconds=30)
            assert [client.llen(name) for name in client.keys("bcast.*")] == [1, 1]
        else:
            poll(lambda: client.exists(b"dlq:{refresh-DLQ}:letters"), timeout_seconds=30)
    starts = sum(one.output.count("dies here") for one in workers)
    found = run_python(redis_url, "-c", QUEUES, **place.env).stdout.strip()
    assert found == ("[]" if place.name == "redis" else "[('refresh-DLQ', 1)]")
    # Three count. What starts while the other one runs does not: mostly one beside each of the
    # three, more where a worker is slow to see that its process is gone.
    assert starts in ((2,) if place.name == "redis" else range(3, 13))
