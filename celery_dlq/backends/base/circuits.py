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

    Attributes:
        task: Name of the task.
        queue: Its queue.
        state: ``open`` or ``releasing``.
        opened_at: When it opened; marks the messages that were released since, which run.
        fingerprint: The group of letters that opened it; empty if a person did.
        letter: Id of one of them.
        probe_every: Seconds between two probes.
        probes: Probes that must succeed in a row.
        probed_at: When the newest probe was sent, or when it opened.
        successes: Probes that succeeded in a row.
    """

    task: str = ""
    queue: str = ""
    state: str = OPEN
    opened_at: int
    fingerprint: str = ""
    letter: str = ""
    probe_every: float
    probes: int
    probed_at: int
    successes: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """Executions of a task that ended for good within a window.

    Attributes:
        died: Those that became letters of one fingerprint.
        all: Those that succeeded or became letters.
    """

    died: int
    all: int


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Executions of a task that succeeded in one process since it last told.

    Attributes:
        breaker: Id of the hold that its breaker makes.
        window: Seconds for which they count.
        number: How many.
    """

    breaker: str
    window: float
    number: int


class CircuitStore(Protocol):
    """Counts how executions ended, for circuit breakers. Every method may raise `StoreUnavailable`.

    Only of tasks whose policy has a breaker. The window moves in steps of a twentieth.
    """

    def died(self, fingerprint: str, with_successes: Succeeded) -> Ends:
        """Count an execution that became a letter.

        Args:
            fingerprint: The letter's.
            with_successes: Breaker and window, and successes that are counted with it.

        Returns:
            All that ended within the window.
        """

    def succeeded(self, tasks: list[Succeeded]) -> None:
        """Count executions that succeeded."""

    def forget(self, breaker: str) -> None:
        """Begin anew: the breaker closed."""
