"""What is published: a seeded mix of tasks that succeed, fail, and kill."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import ModuleType
from uuid import UUID

import amqp
import redis
from botocore.exceptions import BotoCoreError
from chaos.facts import Published
from chaos.odd import odd
from kombu.exceptions import OperationalError

WEIGHTS = {
    "quick": 520,
    "slow": 100,
    "later": 30,
    "retries": 50,
    "killed": 60,
    "segfault": 20,
    "exits": 20,
    "requeues": 50,
    "fails": 60,
    "autoretries": 30,
    "to_dlq": 40,
    "too_long": 10,
    "unknown": 20,
    "undecodable": 18,
    "kills_worker": 2,
    "odd": 40,
    "poison": 10,
}
IN_PROCESS = {"too_long": 0, "segfault": 0, "exits": 0, "killed": 5, "kills_worker": 5}
"""In pools without processes each death is that of a worker, and time limits are not kept."""

DROPPED = ("unknown", "undecodable", "poison")
"""What plain Celery drops, or dies of."""

MOST_OUTSTANDING = 200  # more would only wait in the queue, where nothing happens
COUNTDOWN_SECONDS = 4.0  # times up to 2.5
ERRORS = (redis.RedisError, amqp.AMQPError, BotoCoreError, OSError, OperationalError)


class Publisher(threading.Thread):
    """Publishes the seeded mix, as fast as it is consumed, again where it is not confirmed.

    Args:
        app: The module of the app.
        rng: Decides on the mix.
        tasks: How many.
        settled: How many tasks have come to an end so far.
        share: How many of all may be published by now, as a share of 1.
        weights: How often each kind is published, compared with the others.
    """

    def __init__(
        self,
        app: ModuleType,
        rng: random.Random,
        tasks: int,
        settled: Callable[[], int],
        share: Callable[[], float],
        weights: dict[str, int],
    ) -> None:
        super().__init__(name="publisher", daemon=True)
        self._app = app
        self._settled = settled
        self._share = share
        self._plan = self._mix(rng, tasks, weights)
        self._slow = [rng.uniform(0.2, 2.5) for _ in range(tasks)]
        self.published: dict[str, Published] = {}
        self.stopped = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Publish all, or what is possible until asked to stop."""
        try:
            for (task_id, kind), seconds in zip(self._plan, self._slow, strict=True):
                while self._waits():
                    if self.stopped.wait(0.05):
                        return
                self._publish(task_id, kind, seconds)
                if self.stopped.is_set():
                    return
        except BaseException as exc:  # shown by the runner
            self.problem = exc

    def _waits(self) -> bool:
        sent = len(self.published)
        early = sent >= len(self._plan) * self._share()
        return early or sent - self._settled() > MOST_OUTSTANDING

    def _publish(self, task_id: str, kind: str, seconds: float) -> None:
        note = self.published[task_id] = Published(kind)
        while not note.confirmed:
            note.attempts += 1
            try:
                self._send(task_id, kind, seconds)
                note.confirmed = True
            except ERRORS:
                if self.stopped.wait(0.2) and note.attempts > MOST_OUTSTANDING:
                    return

    def _send(self, task_id: str, kind: str, seconds: float) -> None:
        app = self._app.app
        if self._app.PLAIN and kind in DROPPED:
            kind = "quick"
        if kind in ("odd", "poison"):
            # The same at each try; uuid4 is random enough to choose by.
            draft = odd(kind, UUID(task_id).fields[0] / 2**32, task_id, "chaos.app.quick")
            queue = app.amqp.queues[self._app.QUEUE]
            with app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    draft["body"],
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],  # it may be the first message
                    headers=draft["headers"],
                    content_type=draft["content-type"],
                    content_encoding=draft["content-encoding"],
                    correlation_id=task_id,
                )
            return
        if kind == "undecodable":
            headers = {"task": "chaos.app.quick", "id": task_id, "lang": "py", "retries": 0}
            queue = app.amqp.queues[self._app.QUEUE]
            with app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    b'{"broken',
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],  # it may be the first message
                    headers=headers,
                    content_type="application/json",
                    content_encoding="utf-8",
                )
            return
        countdown = COUNTDOWN_SECONDS * seconds if kind == "later" else None
        name = "chaos.nobody.knows" if kind == "unknown" else f"chaos.app.{kind}"
        args = (seconds,) if kind == "slow" else ()
        app.send_task(name, args, task_id=task_id, retry=False, countdown=countdown)

    @staticmethod
    def _mix(rng: random.Random, tasks: int, weights: dict[str, int]) -> list[tuple[str, str]]:
        kinds = list(weights)[:tasks]  # each at least once
        kinds += rng.choices(list(weights), list(weights.values()), k=tasks - len(kinds))
        rng.shuffle(kinds)
        return [(str(UUID(int=rng.getrandbits(128), version=4)), kind) for kind in kinds]
