"""Counting deliveries in memory."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.store.base import Count, CountStatus, MessageKey

_Run = tuple[str, str, int, int]

_MAX_ASIDE = 20
_MAX_DEAD = 10_000


class MemoryCounter:
    """The `DeliveryCounter` in memory."""

    def __init__(self) -> None:
        self._runs: dict[_Run, dict[tuple[int, int], Delivery]] = {}
        self._counts: Counter[MessageKey] = Counter()
        self._dead: dict[MessageKey, None] = {}
        self.watched: set[MessageKey] = set()
        self.successes: Counter[str] = Counter()
        self._aside: dict[_Run, deque[Delivery]] = {}
        self._lock = threading.Lock()

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Count a delivery without a limit."""
        self.count(key, delivery, None)
        return True

    def count(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        known: int = 0,
        here: bool = False,  # noqa: ARG002 - one process: no record is another worker's
        waited_seconds: float | None = None,  # noqa: ARG002 - one process: nothing is uncertain
        alone: bool = True,  # noqa: ARG002 - the same
        unless_dead: bool = False,
    ) -> Count:
        """Count a delivery, unless the limit was reached before."""
        with self._lock:
            if unless_dead and key in self._dead:
                return Count(CountStatus.DEAD, 0)
            if key in self._dead:
                del self._dead[key]
                known = 0
            number = self._counts[key] = max(self._counts[key], known)
            if limit is not None and number >= limit:
                return Count(CountStatus.LIMIT_REACHED, number)
            number = self._counts[key] = number + 1
            place = (key.retries, number)
            self._runs.setdefault(_run(key), {})[place] = replace(delivery, number=number)
            return Count(CountStatus.COUNTED, number)

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record an end, and its start if that is not on record."""
        with self._lock:
            place, run = self._place(key, delivery), self._runs.setdefault(_run(key), {})
            if place is None:
                if not charged or delivery.outcome is Outcome.RETRIED or key in self._dead:
                    return
                self._counts[key] += 1
                place = (key.retries, self._counts[key])
            if charged:
                run[place] = replace(delivery, number=place[1])
                return
            self._take_back(key, place)
            if delivery.outcome is not None:  # its number will be assigned again
                self._aside.setdefault(_run(key), deque(maxlen=_MAX_ASIDE)).append(delivery)

    def _place(self, key: MessageKey, delivery: Delivery) -> tuple[int, int] | None:
        """Find the record of a start; its number may have changed by a copy of the message."""
        run = self._runs.get(_run(key), {})
        places = [
            place
            for place, known in run.items()
            if place[0] == key.retries and known.started_at == delivery.started_at
        ]
        own = (key.retries, delivery.number)
        return own if own in places else places[0] if places else None

    def _take_back(self, key: MessageKey, place: tuple[int, int]) -> None:
        run, last = self._runs[_run(key)], (key.retries, self._counts[key])
        del run[place]
        self._counts[key] -= 1
        if last in run:
            run[place] = replace(run.pop(last), number=place[1])

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Delete the message's counts, but not those of another one with the same task id."""
        with self._lock:
            own, run = self._place(key, delivery), self._runs.get(_run(key), {})
            others = any(
                known.outcome is None
                and place != own
                and (
                    own is None
                    or place[0] > own[0]
                    or (place[0] == own[0] and (first or place[1] > own[1]))
                )
                for place, known in run.items()
            )
            if others and own is not None:
                self._take_back(key, own)
        if not others:
            self.forget(key)

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count a success."""
        self.successes[redrive_id] += 1

    def died(self, key: MessageKey) -> None:
        """Delete the task's counts, and record that this message is dead; bounded."""
        self.forget(key)
        with self._lock:
            self._dead[key] = None
            while len(self._dead) > _MAX_DEAD:
                del self._dead[next(iter(self._dead))]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Set the count with which a redriven message begins."""
        with self._lock:
            self._counts[key] = deliveries
            place = (key.retries, deliveries)
            self._runs.setdefault(_run(key), {})[place] = replace(last, number=deliveries)

    def is_dead(self, key: MessageKey) -> bool:
        """Return True if this message, or a retry of it, was dead-lettered."""
        with self._lock:
            return any(_run(dead) == _run(key) for dead in self._dead)

    def knows(self, key: MessageKey) -> bool:
        """Return True if the task is watched or has deliveries on record."""
        return key in self.watched or _run(key) in self._runs

    def forget(self, key: MessageKey) -> None:
        """Delete the counts of the task over all its retries."""
        with self._lock:
            self._runs.pop(_run(key), None)
            self.watched = {other for other in self.watched if _run(other) != _run(key)}
            self._aside.pop(_run(key), None)
            for other in [k for k in self._counts if _run(k) == _run(key)]:
                del self._counts[other]

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """Return all deliveries of the task, oldest first."""
        with self._lock:
            known = [*self._runs.get(_run(key), {}).values(), *self._aside.get(_run(key), ())]
            return tuple(sorted(known, key=lambda d: (d.started_at, d.retries, d.number)))

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
        """Do nothing: there are no other processes."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _run(key: MessageKey) -> _Run:
    return (key.dead_letter_queue, key.task_id, key.redrives, key.nesting)
