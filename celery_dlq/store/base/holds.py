"""Holds: messages that are not executed for now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Protocol

from celery_dlq.letters.record import from_micros, iso, to_micros
from celery_dlq.store.base.circuits import Circuit

MOST_HOLDS = 100
"""Holds at a time; workers compare each message with all that are in force."""

_TIMES = ("created_at", "until")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Messages of a task or a queue that are not executed for now."""

    id: str  # Its id; the name of the queue that has its messages in `Backend.held`
    task: str = "*"  # Name of the tasks, or a pattern such as `shop.*`
    queue: str = "*"  # Name of their queues, or a pattern
    where: tuple[str, ...] = ()  # Conditions on the message that hold all, e.g. `kwargs.tenant=42`
    created_at: datetime  # Its start, aware UTC
    until: datetime | None = None  # Its end, by the store's clock; `None` while nobody knows
    reason: str = ""  # Why, for people
    actor: str = ""  # Who made it
    # The broker whose messages it holds, as in `celery_dlq.operations.job.Job`; workers of
    # another one ignore it. Empty for any
    broker: str = ""
    # Id of the job that releases its messages once it has ended; `None` before
    job: str | None = None
    circuit: Circuit | None = None  # The circuit breaker that made it; `None` if a person did

    def in_force(self, now: datetime) -> bool:
        """True before its end."""
        return self.until is None or now < self.until

    def covers(self, task: str, queue: str) -> bool:
        """True for the messages of a task in a queue; ``where`` may leave some of them out."""
        return fnmatchcase(task, self.task) and fnmatchcase(queue, self.queue)

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
        times = {name: iso(getattr(self, name)) for name in _TIMES}
        return {**asdict(self), "where": list(self.where), **times}

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with times in microseconds since 1970."""
        times = {name: getattr(self, name) for name in _TIMES}
        kept = {name: None if at is None else to_micros(at) for name, at in times.items()}
        return {**self.to_json(), **kept}

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> Hold:
        """Read what `to_stored` wrote; keys of later versions are skipped."""
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for name in _TIMES:
            if known.get(name) is not None:
                known[name] = from_micros(int(known[name]))
        if known.get("circuit") is not None:
            names = {f.name for f in fields(Circuit)}
            circuit = {name: one for name, one in known["circuit"].items() if name in names}
            known["circuit"] = Circuit(**circuit)
        return cls(**{**known, "where": tuple(known.get("where", ()))})


class HoldStore(Protocol):
    """Keeps the holds of an app. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """Return the current time by the store's clock, which decides when holds end."""

    def all(self) -> list[Hold]:
        """Return all holds, also those that have ended, oldest first."""

    def replace(self, known: Hold | None, hold: Hold | None) -> bool:
        """Add, change or remove a hold if the store still has what the caller knows.

        So one process of many opens, changes or ends a hold, at one moment. Workers notice by
        the revision in `WorkerRegistry.heartbeat`.
        """
