"""Ends of executions in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from celery_dlq.store.part import Part
from celery_dlq.store.scripts import script_text


@dataclass(frozen=True, slots=True)
class Ends:
    """Executions of a task that ended for good within a window."""

    died: int  # Those that became letters of one fingerprint
    all: int  # Those that succeeded or became letters


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Executions of a task that succeeded in one process since it last told."""

    breaker: str  # Id of the hold that its breaker makes
    window: float  # Seconds for which they count
    number: int  # How many


_MOST = 100  # tasks in one call


class CircuitStore(Part):
    """Counts how executions ended, for circuit breakers."""

    lua = "celery_dlq.features.circuit_breaker"

    def died(self, fingerprint: str, with_successes: Succeeded) -> Ends:
        """Count an execution that became a letter."""
        died, total = self._count(fingerprint, [with_successes])
        return Ends(died, total)

    def succeeded(self, tasks: list[Succeeded]) -> None:
        """Count executions that succeeded."""
        for start in range(0, len(tasks), _MOST):
            self._count("", tasks[start : start + _MOST])

    def forget(self, breaker: str) -> None:
        """Begin anew: the breaker closed."""
        self._client.delete(self._keys.breaker_ends(breaker))

    def _count(self, fingerprint: str, tasks: Sequence[Succeeded]) -> tuple[int, int]:
        keys = [self._keys.breaker_ends(one.breaker) for one in tasks]
        args: list[str | int] = [fingerprint]
        for one in tasks:
            args += [int(one.window * 1000), one.number]
        self._connection.raise_if_away()
        died, total = self._connection.call_script(script_text("ends", self.lua), keys, *args)
        return int(died), int(total)
