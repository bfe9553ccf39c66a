"""Circuit breakers: what the processes of an app share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class CircuitStore(Protocol):
    """Counts how executions ended, for circuit breakers. Every method may raise `StoreUnavailable`.

    Only of tasks whose policy has a breaker. The window moves in steps of a twentieth.
    """

    def died(self, fingerprint: str, with_successes: Succeeded) -> Ends:
        """Count an execution that became a letter."""

    def succeeded(self, tasks: list[Succeeded]) -> None:
        """Count executions that succeeded."""

    def forget(self, breaker: str) -> None:
        """Begin anew: the breaker closed."""
