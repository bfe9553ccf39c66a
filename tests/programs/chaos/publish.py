"""What is published: a seeded mix of tasks that succeed, fail, and kill."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from uuid import UUID

import amqp
import redis
from botocore.exceptions import BotoCoreError
from chaos.facts import HEADER, Published, name_of
from chaos.odd import odd
from kombu.exceptions import OperationalError

WEIGHTS = {
    "quick": 520,
    "slow": 100,
    "long": 12,
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

RAW = frozenset({"odd", "poison", "undecodable", "unknown"})
"""Written by hand, or for no task of the app: each has a task id of its own."""

DROPPED = ("unknown", "undecodable", "poison")
"""What plain Celery drops, or dies of."""

MOST_OUTSTANDING = 200  # more would only wait in the queue, where nothing happens
COUNTDOWN_SECONDS = 4.0  # times up to 2.5
LONG_SECONDS = 5.0  # and up to 2.5 more: longer than a worker may give no sign of life
AT_ONCE_SHARE = 0.4  # of the task ids that are used again, while the first message is alive
MOST_ENDS_SECONDS = 60.0  # for the end of a publication whose task id is to be used again
ERRORS = (redis.RedisError, amqp.AMQPError, BotoCoreError, OSError, OperationalError)


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be published.

    Attributes:
        name: The publication's.
        task_id: Its task id.
        kind: Which task.
        seconds: How long it runs or waits, if its kind does.
        before: The publication before it with the same task id.
        at_once: It does not wait for the end of that one.
    """

    name: str
    task_id: str
    kind: str
    seconds: float
    before: str = ""
    at_once: bool = True


def mix(rng: random.Random, tasks: int, weights: dict[str, int], reuse: float) -> list[Planned]:
    """The seeded mix, in its order; each kind is in it."""
    kinds = list(weights)[:tasks]  # each at least once
    kinds += rng.choices(list(weights), list(weights.values()), k=tasks - len(kinds))
    rng.shuffle(kinds)
    plan: list[Planned] = []
    last: dict[str, Planned] = {}  # by task id
    numbers: Counter[str] = Counter()
    for kind in kinds:
        seconds = rng.uniform(0.2, 2.5) + (LONG_SECONDS if kind == "long" else 0.0)
        task_id, before, at_once = str(UUID(int=rng.getrandbits(128), version=4)), "", True
        if kind not in RAW and last and rng.random() < reuse:
            at_once = rng.random() < AT_ONCE_SHARE
            task_id = next(reversed(last)) if at_once else rng.choice([*last])
            before = last[task_id].name
        numbers[task_id] += 1
        name = name_of(task_id, numbers[task_id])
        plan.append(Planned(name, task_id, kind, seconds, before, at_once))
        if kind not in RAW | {"long"}:
            last.pop(task_id, None)
            last[task_id] = plan[-1]
    return plan


class Publisher(threading.Thread):
    """Publishes the seeded mix, as fast as it is consumed, again where it is not confirmed.

    Args:
        app: The module of the app.
        rng: Decides on the mix.
        tasks: How many.
        settled: How many publications have come to an end so far.
        end_of: How a publication ended, ``letter`` or ``success``; nothing while it is alive.
        share: How many of all may be published by now, as a share of 1.
        weights: How often each kind is published, compared with the others.
        reuse: How many task ids are used again, as a share of 1.
    """

    def __init__(
        self,
        app: ModuleType,
        rng: random.Random,
        tasks: int,
        settled: Callable[[], int],
        end_of: Callable[[str], str],
        share: Callable[[], float],
        weights: dict[str, int],
        reuse: float,
    ) -> None:
        super().__init__(name="publisher", daemon=True)
        self._app = app
        self._settled = settled
        self._end_of = end_of
        self._share = share
        self._plan = deque(mix(rng, tasks, weights, reuse))
        self._tasks = tasks
        self._used: list[Planned] = []  # their task ids are used already, by what is alive
        self._long: deque[Planned] = deque()  # published when one is wanted, or at the end
        self.wanted = 0
        self.published: dict[str, Published] = {}
        self.stopped = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Publish all, or what is possible until asked to stop."""
        try:
            while self._plan:
                planned = self._plan.popleft()
                while self._waits() and not (planned.before and planned.at_once):
                    self._special()
                    if self.stopped.wait(0.05):
                        return
                self._take(planned)
                if self.stopped.is_set():
                    return
            until, self.wanted = time.monotonic() + MOST_ENDS_SECONDS, len(self._long)
            while self._used or self._long:
                self._special(at_once=time.monotonic() > until)
                if self.stopped.wait(0.1):
                    return
        except BaseException as exc:  # shown by the runner
            self.problem = exc

    def _waits(self) -> bool:
        sent = len(self.published)
        early = sent >= self._tasks * self._share()
        return early or sent - self._settled() > MOST_OUTSTANDING

    def _take(self, planned: Planned) -> None:
        if planned.kind == "long":
            self._long.append(planned)
        elif planned.at_once:
            self._publish(planned)
        else:
            self._used.append(planned)
        self._special()

    def _special(self, *, at_once: bool = False) -> None:
        """Publish the long tasks that are wanted, and under ids whose publications have ended."""
        while self.wanted > 0:
            self.wanted -= 1
            if not self._long:  # a quick one becomes long
                quick = next((p for p in self._plan if p.kind == "quick" and not p.before), None)
                if quick is None:
                    break
                self._plan.remove(quick)
                seconds = LONG_SECONDS + quick.seconds
                self._long.append(replace(quick, kind="long", seconds=seconds))
            self._publish(self._long.popleft())
        for planned in [*self._used]:
            if at_once or self._end_of(planned.before):
                self._used.remove(planned)
                self._publish(planned)

    def _publish(self, planned: Planned) -> None:
        after = (self._end_of(planned.before) or "alive") if planned.before else ""
        note = self.published[planned.name] = Published(planned.kind, after=after)
        while not note.confirmed:
            note.attempts += 1
            try:
                self._send(planned)
                note.confirmed = True
            except ERRORS:
                if self.stopped.wait(0.2) and note.attempts > MOST_OUTSTANDING:
                    return

    def _send(self, planned: Planned) -> None:
        app, kind, task_id = self._app.app, planned.kind, planned.task_id
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
        app.send_task(
            "chaos.nobody.knows" if kind == "unknown" else f"chaos.app.{kind}",
            (planned.seconds, planned.name),  # one id, other arguments
            task_id=task_id,
            headers={HEADER: planned.name},
            retry=False,
            countdown=COUNTDOWN_SECONDS * planned.seconds if kind == "later" else None,
        )
