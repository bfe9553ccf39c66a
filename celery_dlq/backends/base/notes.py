"""Notes of operators on groups of letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from celery_dlq.record import check_aware, from_micros, iso, to_micros

MAX_NOTES = 50
"""Maximum number of notes on a group; the oldest one goes."""

KEPT_DAYS = 90
"""Notes are kept while their group has letters, and for this long after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note on a group.

    Attributes:
        at: When it was written, aware UTC.
        actor: Who wrote it.
        text: Its text.
    """

    at: datetime
    actor: str
    text: str

    def __post_init__(self) -> None:
        check_aware("at", self.at)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {"at": iso(self.at), "actor": self.actor, "text": self.text}

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with the time in microseconds since 1970."""
        return {**self.to_json(), "at": to_micros(self.at)}

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> Note:
        """Read what `to_stored` wrote."""
        return cls(
            at=from_micros(int(value["at"])), actor=str(value["actor"]), text=str(value["text"])
        )


class GroupNotes(Protocol):
    """Stores notes on groups. Every method may raise `StoreUnavailable`."""

    def add(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note to a group. Adding the same note again changes nothing."""

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group, newest first."""
