"""The record of a hold, and of the circuit breaker that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from celery_dlq.letters.record import Recorded, iso
from celery_dlq.store.instructions import Instruction

MOST_HOLDS = 100
"""Holds at a time; workers compare each message with all that are in force."""

MOST_HELD = 100_000
"""About how many messages a hold takes; workers do not consume the queues of the next ones."""

OPEN = "open"
"""State of a circuit breaker: messages are held, and now and then one runs as a probe."""

RELEASING = "releasing"
"""State of a circuit breaker: probes succeeded, and the held messages are released."""

_ANY = "*"


def matches_pattern(pattern: str, name: str) -> bool:
    """True for the name itself, also if it has signs of a pattern, and for what a pattern fits."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit(Recorded):
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

    def micros_until_probe(self, now: int) -> int:
        """Microseconds until the next probe may be sent; 0 or less: now."""
        return self.probed_at + int(self.probe_every * 1_000_000) - now


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Instruction):
    """Messages of a task or a queue that are not executed for now.

    Its id is the name of the queue that has its messages in `Store.held`.
    """

    kind = "hold"

    task: str = _ANY  # Name of the tasks, or a pattern such as `shop.*`
    queue: str = _ANY  # Name of their queues, or a pattern
    where: tuple[str, ...] = ()  # Conditions on the message that hold all, e.g. `kwargs.tenant=42`
    # The broker whose messages it holds, as in `celery_dlq.operations.job.Job`; workers of
    # another one ignore it. Empty for any
    broker: str = ""
    # Id of the job that releases its messages once it has ended; `None` before
    job: str | None = None
    circuit: Circuit | None = None  # The circuit breaker that made it; `None` if a person did

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", tuple(self.where))
        if isinstance(self.circuit, Mapping):  # as it is stored
            object.__setattr__(self, "circuit", Circuit.from_stored(self.circuit))

    def covers(self, task: str, queue: str) -> bool:
        """True for the messages of a task in a queue; ``where`` may leave some of them out."""
        return matches_pattern(self.task, task) and matches_pattern(self.queue, queue)

    @property
    def marker(self) -> str:
        """The header of the messages that are released from it now."""
        return self.id if self.circuit is None else f"{self.id}.{self.circuit.opened_at}"

    def admits(self, marker: object) -> bool:
        """True for a message that was released from it: it runs.

        Not so if a circuit breaker has opened again since: the message is held once more.
        """
        if self.circuit is None or not isinstance(marker, str):
            return marker == self.id
        hold_id, _, opened_at = marker.rpartition(".")
        return (
            hold_id == self.id
            and opened_at.isdecimal()
            and int(opened_at[:20]) >= self.circuit.opened_at
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        found = Recorded.to_json(self)
        return {"created_at": found.pop("since"), **found}

    def for_audit(self) -> dict[str, Any]:
        """What the audit says of it: no times of its own, which are those of the changes."""
        circuit = self.circuit
        if circuit is None:
            what: dict[str, Any] = {"task": self.task, "queue": self.queue}
        else:  # the exact names instead of patterns
            what = {"task": circuit.task, "queue": circuit.queue, "state": circuit.state}
            what |= {"fingerprint": circuit.fingerprint, "letter": circuit.letter}
        what |= {"where": list(self.where), "reason": self.reason, "until": iso(self.until)}
        return {name: value for name, value in what.items() if value}
