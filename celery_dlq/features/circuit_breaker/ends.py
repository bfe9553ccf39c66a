"""Counts of how executions ended, by which a worker sees that a circuit breaker must open."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from celery_dlq.features.circuit_breaker.policy import Ends, Succeeded
from celery_dlq.store.part import Part
from celery_dlq.store.scripts import script_text

_MOST = 100  # tasks in one call


class CircuitStore(Part):
    """Counts how executions ended, for circuit breakers."""

    lua = "celery_dlq.features.circuit_breaker"

    def count_death(self, fingerprint: str, with_successes: Succeeded) -> Ends:
        """Count an execution that became a letter."""
        died, total = self._count_ends(fingerprint, [with_successes])
        return Ends(died, total)

    def succeeded(self, tasks: list[Succeeded]) -> None:
        """Count executions that succeeded."""
        for start in range(0, len(tasks), _MOST):
            self._count_ends("", tasks[start : start + _MOST])

    def forget_counts(self, breaker: str) -> None:
        """Begin anew: the breaker closed."""
        self._client.delete(self._keys.breaker_ends(breaker))

    def _count_ends(self, fingerprint: str, tasks: Sequence[Succeeded]) -> tuple[int, int]:
        keys = [self._keys.breaker_ends(one.breaker) for one in tasks]
        args: list[str | int] = [fingerprint]
        for one in tasks:
            args += [int(one.window * 1000), one.number]
        self._connection.raise_if_away()
        died, total = self._connection.call_script(script_text("ends", self.lua), keys, *args)
        return int(died), int(total)


def hold_id_of(task: str, queue: str, broker: str) -> str:
    """The id of the hold of a breaker: the same in all processes."""
    text = f"{len(task)}:{task}:{len(queue)}:{queue}:{broker}".encode("utf-8", "backslashreplace")
    return f"breaker-{sha256(text).hexdigest()[:12]}"
