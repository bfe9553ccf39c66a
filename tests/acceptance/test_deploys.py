"""Workers are ended in order again and again, as deploys do, while healthy tasks wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import redis
from waiting import poll
from workers import Worker

Start = Callable[..., Worker]

LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
ROUNDS = 20 if LONG else 3
TASKS = 150  # wait at each SIGTERM
POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")
CONF = {"worker_prefetch_multiplier": 4, "dlq_queues": {"orders": {"max_deliveries": 1}}}


class Deploys:
    """Rounds of a worker's start, some of its work, and SIGTERM.

    Args:
        poison: The app.
        redis_url: Where its tasks leave their traces.
        start_worker: Starts a worker.
    """

    def __init__(self, poison: ModuleType, redis_url: str, start_worker: Start) -> None:
        self._poison = poison
        self._start = start_worker
        self._traces = redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2")
        self._published: list[str] = []

    def __call__(self, conf: dict[str, Any], **more: Any) -> list[str]:
        """Do the rounds, and then all that is left; the keys of tasks that never ran."""
        self._published.clear()
        for _ in range(ROUNDS):
            self._publish(len(self._published) + TASKS - len(self._waiting()))
            worker = self._start(conf, **more)
            most = TASKS - 1 - len(self._published) % 60  # not always at the same moment
            poll(lambda most=most: len(self._waiting()) <= most, timeout_seconds=30)
            worker.process.send_signal(signal.SIGTERM)
            worker.process.wait(30)
        worker = self._start(conf, **more)
        try:
            poll(lambda: not self._waiting(), timeout_seconds=30)
        except AssertionError:
            return self._waiting()
        finally:
            worker.stop()
        return []

    def close(self) -> None:
        """Let go of the connection."""
        self._traces.close()

    def _publish(self, up_to: int) -> None:
        news = [f"deploy-{n}" for n in range(len(self._published), up_to)]
        with self._poison.app.producer_pool.acquire(block=True) as producer:
            for key in news:
                self._poison.healthy.apply_async((key,), producer=producer)
        self._published += news

    def _waiting(self) -> list[str]:
        with self._traces.pipeline(transaction=False) as pipe:
            for key in self._published:
                pipe.exists(f"ran:{key}")
            found: Sequence[int] = pipe.execute()
        return [key for key, ran in zip(self._published, found, strict=True) if not ran]


@pytest.mark.parametrize("pool", POOLS)
def test_deploys_leave_no_letter_and_every_task_runs(
    poison: ModuleType, start_worker: Start, redis_url: str, pool: str
) -> None:
    """A start that the closing pool threw away is no delivery, even if one is all there may be."""
    deploys = Deploys(poison, redis_url, start_worker)
    try:
        never_ran = deploys(CONF, pool=pool)
    finally:
        deploys.close()

    letters = [letter for queue in poison.dlq.queues() for letter in poison.dlq.letters(queue.name)]
    described = [(x.reason.value, x.deliveries, [d.outcome for d in x.history]) for x in letters]
    assert not letters, f"{len(letters)} of healthy tasks: {described[:3]}"
    assert not never_ran
