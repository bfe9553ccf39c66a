"""Circuit breakers: what the processes of an app share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OPEN = "open"
"""Messages are held, and now and then one runs as a probe."""

RELEASING = "releasing"
"""Probes succeeded: the held messages are released, slowly at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """The state of a circuit breaker that is not closed; its `Hold` has it.

    Times are in microseconds since 1970, by the store's clock.
    """

    task: str = ""  # Name of the task
    queue: str = ""  # Its queue
    state: str = OPEN  # `open` or `releasing`
    opened_at: int  # When it opened; marks the messages that were released since, which run
    fingerprint: str = ""  # The group of letters that opened it; empty if a person did
    letter: str = ""  # Id of one of them
    probe_every: float  # Seconds between two probes
    probes: int  # Probes that must succeed in a row
    probed_at: int  # When the newest probe was sent, or when it opened
    successes: int = 0  # Probes that succeeded in a row


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
