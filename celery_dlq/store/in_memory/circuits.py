"""Ends of executions in memory."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from celery_dlq.store.base import Ends, Succeeded


class MemoryCircuits:
    """The `CircuitStore` in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
        self._lock = threading.Lock()

    def died(self, fingerprint: str, with_successes: Succeeded) -> Ends:
        """Count an execution that became a letter."""
        with self._lock:
            self._add(with_successes, "", with_successes.number)
            ends = self._add(with_successes, fingerprint, 1)
        died = sum(number for _at, print_, number in ends if print_ == fingerprint)
        return Ends(died, sum(number for _at, _print, number in ends))

    def succeeded(self, tasks: list[Succeeded]) -> None:
        """Count executions that succeeded."""
        with self._lock:
            for one in tasks:
                self._add(one, "", one.number)

    def forget(self, breaker: str) -> None:
        """Begin anew."""
        self._ends.pop(breaker, None)

    def _add(self, to: Succeeded, fingerprint: str, number: int) -> list[tuple[float, str, int]]:
        now, place = self._clock(), to.breaker
        kept = [end for end in self._ends[place] if now - end[0] <= to.window]
        self._ends[place] = [*kept, (now, fingerprint, number)]
        return self._ends[place]
