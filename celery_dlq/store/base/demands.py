"""Demands of operators: tasks whose messages are to become letters instead of being executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Protocol

from celery_dlq.letters.record import from_micros, to_micros

MOST_DEMANDS = 10_000
"""Demands at a time; each worker has all of them in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """An operator wants the message of a task to be dead-lettered."""

    task_id: str  # The task
    reason: str = ""  # Why, for people; the description of the letter
    actor: str = ""  # Who wants it
    # When, aware UTC, by the store's clock. A redrive that began later is not affected
    at: datetime
    until: datetime  # Its end, by the same clock

    @property
    def text(self) -> str:
        """The description of the letter."""
        by = f"dead-lettered by {self.actor}"
        return f"{self.reason} ({by})" if self.reason else by

    def to_stored(self) -> dict[str, Any]:
        """A JSON-ready mapping, with times in microseconds since 1970."""
        return {
            "task_id": self.task_id,
            "reason": self.reason,
            "actor": self.actor,
            "at": to_micros(self.at),
            "until": to_micros(self.until),
        }

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> Demand:
        """Read what `to_stored` wrote; keys of later versions are skipped."""
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        times = {name: from_micros(int(known[name])) for name in ("at", "until")}
        return cls(**{**known, **times})


class DemandStore(Protocol):
    """Keeps the demands of an app. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """Return the current time by the store's clock, which decides when demands end."""

    def add(self, demand: Demand) -> bool:
        """Add a demand, in place of an earlier one for the task.

        Workers notice by the revision in `WorkerRegistry.heartbeat`.
        """

    def get(self, task_id: str) -> Demand | None:
        """Return the demand for a task, unless it has ended."""

    def all(self) -> list[Demand]:
        """Return the demands in force, oldest first; removes those that ended."""

    def remove(self, task_id: str) -> bool:
        """Remove the demand for a task; return True if there was one. Workers are not told."""
