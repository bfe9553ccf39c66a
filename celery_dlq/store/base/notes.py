"""What operators say of groups of letters: notes, and the state of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from celery_dlq.letters.record import check_aware, from_micros, iso, to_micros

MAX_NOTES = 50
"""Maximum number of notes on a group; the oldest one goes."""

KEPT_DAYS = 90
"""Notes and states are kept while their group has letters, and for this long after."""


class GroupState(str, Enum):
    """What is to be done about a group: a closed list."""

    OPEN = "open"
    MUTED = "muted"
    RESOLVED = "resolved"
    REGRESSED = "regressed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """The state of a group, since when, and by whom."""

    state: GroupState = GroupState.OPEN  # The state
    # When the group was muted or resolved, aware UTC; of a regressed group, when it had been
    # resolved. `None` for an open one
    at: datetime | None = None
    actor: str = ""  # Who did that
    until: datetime | None = None  # When a muted group opens by itself; `None`: never
    # The release in which a group is, or was, resolved; `None`: in all that run
    release: str | None = None
    releases: tuple[str, ...] = ()  # Releases in which it had died before
    regressed_at: datetime | None = None  # When the letter died that ended the resolution
    regressed_in: str | None = None  # The release of that letter, if known
    letter_id: str | None = None  # Its id
    # The task of the group, as it was when it was muted or resolved. This and the following
    # describe a group that has no letters any more
    task_name: str = ""
    reason: str = ""  # Its reason
    exception_type: str | None = None  # Its exception
    first_seen_at: datetime | None = None  # When its first letter had died
    last_seen_at: datetime | None = None  # When its newest letter had died

    def __post_init__(self) -> None:
        for name in _TIMES:
            if getattr(self, name) is not None:
                check_aware(name, getattr(self, name))

    def ended_by(self, release: str | None) -> bool:
        """True if a new letter of a release means that the group is not resolved after all.

        Where the fix has a release, a worker of an earlier one has not been deployed yet.
        """
        if self.state is not GroupState.RESOLVED:
            return False
        return not (self.release and release and release != self.release) or (
            release not in self.releases
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return self._mapping(iso)

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with the times in microseconds since 1970."""
        return self._mapping(to_micros)

    def _mapping(self, written: Any) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _TIMES:
            values[name] = None if values[name] is None else written(values[name])
        return {**values, "state": self.state.value, "releases": list(self.releases)}

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> GroupStatus:
        """Read what `to_stored` wrote; keys of later versions are skipped."""
        found = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        for name in _TIMES:
            if found.get(name) is not None:
                found[name] = from_micros(int(found[name]))
        state, releases = GroupState(value["state"]), tuple(map(str, found.get("releases", ())))
        return cls(**{**found, "state": state, "releases": releases})


_TIMES = ("at", "until", "regressed_at", "first_seen_at", "last_seen_at")

OPEN_GROUP = GroupStatus()
"""The status of a group about which nobody decided anything."""


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
    """Stores notes on groups and their states. Every method may raise `StoreUnavailable`."""

    def add(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note to a group. Adding the same note again changes nothing."""

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group, newest first."""

    def set_status(self, dead_letter_queue: str, fingerprint: str, status: GroupStatus) -> None:
        """Set the state of a group: open, muted or resolved.

        Storing a letter makes it regressed; see `DeadLetterStore.dead_letter`.
        """

    def status(self, dead_letter_queue: str, fingerprint: str) -> GroupStatus:
        """Return the state of a group; one whose mute has ended is open."""

    def statuses(self, dead_letter_queue: str) -> dict[str, GroupStatus]:
        """Return the states of all groups of a queue that are not open, by fingerprint."""
