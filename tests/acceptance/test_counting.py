"""Starts that are charged as deliveries, and those that are not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import VERSION
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

SHORT_SIGHT = {"broker_transport_options": {"visibility_timeout": 1}}


def runs(redis_url: str) -> dict[str, dict[str, str]]:
    """All counters in Redis, by task id."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        keys = list(client.scan_iter("dlq:*:run:*"))
        return {key.rpartition(":")[2]: client.hgetall(key) for key in keys}


def count_of(run: dict[str, str]) -> str:
    """The count of the one message of a task id that was not retried."""
    (count,) = (value for name, value in run.items() if name.startswith("count:0"))
    return count


def test_waiting_is_not_delivery(poison: ModuleType, start_worker: Start, redis_url: str) -> None:
    """Messages that are prefetched, or wait for their ETA or a rate limit, have no counter."""
    worker = start_worker({"worker_prefetch_multiplier": 4})
    assert poison.limited.delay("in time").get(timeout=10) == "in time"
    limited = poison.limited.delay("too many")
    busy = [poison.sleeps.delay(f"busy-{n}", 8) for n in range(2)]
    prefetched = [poison.healthy.delay(f"prefetched-{n}") for n in range(3)]
    later = poison.healthy.apply_async(("later",), countdown=60)
    poll(lambda: all(r.id in worker.output for r in [*busy, *prefetched, later, limited]))

    # The counter of the one that was in time goes with the next tick.
    poll(lambda: set(runs(redis_url)) == {r.id for r in busy}, timeout_seconds=7)


def test_counters_of_successful_messages_are_removed(
    poison: ModuleType, start_worker: Start, redis_url: str
) -> None:
    """Nothing stays behind in Redis for healthy work."""
    start_worker()
    for result in [poison.healthy.delay(f"x-{n}") for n in range(50)]:
        result.get(timeout=10)
    poll(lambda: not runs(redis_url))


@pytest.mark.parametrize("soft_seconds", [0, 1])
def test_a_cold_or_soft_shutdown_is_recorded_and_not_charged(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
    grown_old: Callable[[], None],
    soft_seconds: int,
) -> None:
    """The worker gave the message up; the message did nothing wrong."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {"max_deliveries": 1}}, **SHORT_SIGHT}
    if soft_seconds:
        if VERSION < (5, 5):
            pytest.skip("soft shutdowns came with Celery 5.5")
        conf["worker_soft_shutdown_timeout"] = soft_seconds
    sent = poison.sleeps.delay("cold", 30)
    for n in range(2):
        worker = start_worker(conf)
        poll(lambda n=n: ran("cold") == n + 1, timeout_seconds=30)  # type: ignore[misc]
        os.kill(worker.process.pid, signal.SIGQUIT)
        worker.process.wait(30)
        worker.kill()
        grown_old()

    assert not poison.dlq.queues()
    worker = start_worker(conf)
    poll(lambda: ran("cold") == 3, timeout_seconds=30)
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        os.kill(int(client.lindex("ran:cold", -1) or 0), signal.SIGKILL)

    (letter,) = letters()
    assert (letter.task_id, letter.reason) == (sent.id, Reason.MAX_DELIVERIES_EXCEEDED)
    assert letter.deliveries == 1
    assert [d.outcome for d in letter.history] == [
        Outcome.SHUTDOWN,
        Outcome.SHUTDOWN,
        Outcome.WORKER_LOST,
    ]


def test_a_second_delivery_of_a_running_message_is_not_charged(
    poison: ModuleType, start_worker: Start, ran: Ran, redis_url: str
) -> None:
    """Without leases, the visibility timeout of Redis is too short; nobody crashed."""
    conf: dict[str, Any] = {
        "dlq_queues": {"orders": {"max_deliveries": 1}},
        "dlq_reliable_fetch": False,
        **SHORT_SIGHT,
    }
    first = start_worker(conf)
    sent = poison.sleeps.delay("slow", 15)
    poll(lambda: ran("slow") == 1)
    begun = time.monotonic()
    poll(lambda: time.monotonic() - begun > 1.5)
    second = start_worker(conf)  # kombu gives old messages back when a worker starts

    poll(lambda: ran("slow") == 2, timeout_seconds=15)

    output = first.output + second.output
    assert "of it still runs, here or on another worker" in output
    assert "how-to/long-tasks.md" in output
    assert count_of(runs(redis_url)[sent.id]) == "1"
    assert not poison.dlq.queues()


def test_a_result_that_kills_the_workers_main_process_stays_bounded(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    grown_old: Callable[[], None],
) -> None:
    """A MemoryError in the pool ends the whole worker in Celery; it is one more death."""
    sent = poison.out_of_memory.delay("memory")
    for _ in range(6):
        worker = start_worker(SHORT_SIGHT, wait=False)
        if worker.lives_until(lambda: bool(poison.dlq.queues()), timeout_seconds=30):
            break
        worker.kill()
        grown_old()

    (letter,) = letters()
    assert (letter.task_id, letter.reason) == (sent.id, Reason.MAX_DELIVERIES_EXCEEDED)
    assert (letter.deliveries, ran("memory")) == (3, 3)
