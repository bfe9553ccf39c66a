"""Circuit breakers: when a task is held because nearly all of its executions die, and until when.

| state | what happens | next state |
|---|---|---|
| closed | enough executions died, see `CircuitBreaker.opens_after` | open |
| closed, releasing | a person opens it | open |
| open | a probe is due | open; one held message is sent |
| open | a probe succeeded | open; after enough in a row, releasing |
| open | a probe ended otherwise | open; counts from 0 again |
| open | a person closes it | releasing |
| releasing | a released message died, of what opened it | open |
| releasing | enough executions died | open |
| releasing, closed by hand | its release was cancelled | open |
| releasing | the last held message was released | closed |

Nothing else changes the state. Pure functions of facts: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from celery_dlq.policies.checks import duration, integer, mapping
from celery_dlq.policies.policy import KeyValue
from celery_dlq.registry import interval
from celery_dlq.store.holds import OPEN, RELEASING, Circuit

_MOST_SECONDS = 86_400.0
SHARE = 0.9
"""Share of all executions within the window that must have died for a breaker to open."""
PROBES = 3
"""Probes in a row that must succeed before a breaker closes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker(KeyValue):
    """When the breaker of a task opens and closes.

    Attributes:
        deaths: Letters of one fingerprint within the window that open it. At least 1.
        window: Length of the window in seconds; at most a day.
    """

    deaths: int = 20
    window: float = 60.0

    def opens_after(self, ends: Ends) -> bool:
        """True if so many executions died."""
        return ends.died >= self.deaths and ends.died >= SHARE * ends.all

    def __str__(self) -> str:
        return f"{self.deaths} deaths within {self.window:g} s"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, as the policy takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Died:
    """An execution became a letter."""

    ends: Ends  # All that ended within the window
    fingerprint: str  # The letter's
    letter: str  # Its id
    released: bool = False  # The message was released since the breaker last opened

    def reason_within(self, window: float) -> str:
        """The reason of an opening, for people."""
        return (
            f"{self.ends.died:,} of {self.ends.all:,} executions within {window:g} s died with "
            f"fingerprint {self.fingerprint}, for example letter {self.letter}"
        )


class Happened(Enum):
    """What else may happen."""

    PROBE_DUE = "there is a held message, and it may be time to send one as a probe"
    PROBE_SUCCEEDED = "the task of a probe, or of another released message, returned"
    PROBE_FAILED = "it died, was retried or was returned to its queue"
    OPENED = "a person opens it, or has cancelled its release"
    CLOSED = "a person closes it"
    EMPTIED = "the last held message was released"


def next_state(
    breaker: CircuitBreaker, circuit: Circuit | None, happened: Died | Happened, now: int
) -> Circuit | None:
    """The state after something happened; the same object if that changes nothing.

    ``None`` is closed; ``now`` is in microseconds since 1970. The policy matters for one that is
    not open: an open one has what matters.
    """
    if circuit is not None and circuit.state == OPEN:
        return _while_open(circuit, happened, now)
    if happened is Happened.OPENED:
        return _opened_circuit(circuit, now)
    if isinstance(happened, Died):
        again = circuit is not None and happened.fingerprint == circuit.fingerprint
        if (again and happened.released) or breaker.opens_after(happened.ends):
            opened = _opened_circuit(circuit, now)
            return replace(opened, fingerprint=happened.fingerprint, letter=happened.letter)
    return None if happened is Happened.EMPTIED else circuit


def _while_open(circuit: Circuit, happened: Died | Happened, now: int) -> Circuit:
    if happened is Happened.PROBE_DUE and circuit.micros_until_probe(now) <= 0:
        return replace(circuit, probed_at=now)
    if happened is Happened.CLOSED:
        return replace(circuit, state=RELEASING)
    if happened is Happened.PROBE_SUCCEEDED:
        successes = circuit.successes + 1
        state = RELEASING if successes >= circuit.probes else OPEN
        return replace(circuit, successes=successes, state=state)
    if happened is Happened.PROBE_FAILED and circuit.successes:
        return replace(circuit, successes=0)
    return circuit


def _opened_circuit(before: Circuit | None, now: int) -> Circuit:
    opened_at = now if before is None else max(now, before.opened_at + 1)
    every = interval("probe")
    return Circuit(opened_at=opened_at, probe_every=every, probes=PROBES, probed_at=now)


def circuit_breaker(where: str, value: object) -> CircuitBreaker:
    """Check a circuit breaker: a mapping of its keys; what is left out has its default."""
    given = value.to_json() if isinstance(value, CircuitBreaker) else value
    return CircuitBreaker(**_KEYS(where, given))


_KEYS = mapping(
    {
        "deaths": integer(1),
        "window": duration(
            f"more than 0 and at most {_MOST_SECONDS:,.0f} seconds",
            lambda given: 0 < given <= _MOST_SECONDS,
        ),
    },
)
