"""What happened, told to whoever wants to know: frozen events and the bus that carries them.

Metrics, error trackers and signals are observers; none of them can fail a task, stop a
letter or change what happens.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from celery_dlq.logs import get_logger
from celery_dlq.record import DeadLetter, check_aware, from_micros, iso, to_micros

__all__ = [
    "Action",
    "Change",
    "DeadLettered",
    "Event",
    "Redriven",
]

logger = get_logger("celery_dlq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        at: When, aware UTC.
    """

    at: datetime

    def __post_init__(self) -> None:
        check_aware("at", self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettered(Event):
    """A letter was stored; not told again when the same letter is stored twice.

    Attributes:
        letter: The letter.
    """

    letter: DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven(Event):
    """The broker took a letter's original message again; told once per letter.

    Attributes:
        letter: The letter, as it was before it left its dead-letter queue.
        redrive_id: The redrive, also in the message's header ``dlq_redrive``.
    """

    letter: DeadLetter
    redrive_id: str


class Action(str, Enum):
    """What was changed on purpose: a closed list, the same in events, metrics and ``dlq audit``."""

    REDRIVEN = "redriven"
    EDITED = "edited"
    DISCARDED = "discarded"
    RESTORED = "restored"
    PURGED = "purged"
    TRIMMED = "trimmed"
    ADOPTED = "adopted"
    POLICY_SET = "policy_set"
    POLICY_UNSET = "policy_unset"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Event):
    """Somebody, or a rule that somebody made, changed letters or policies. Kept for ``dlq audit``.

    Attributes:
        action: What was done.
        actor: Who: ``user@host``, or the node name of a worker that followed a rule.
        target: The dead-letter queue, or the queue whose policy was changed.
        letters: How many letters it was done to.
        detail: How they were chosen and with which options; JSON-ready.
    """

    action: Action
    actor: str
    target: str
    letters: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {
            "at": iso(self.at),
            "action": self.action.value,
            "actor": self.actor,
            "target": self.target,
            "letters": self.letters,
            "detail": dict(self.detail),
        }

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with the time in microseconds since 1970."""
        return {**self.to_json(), "at": to_micros(self.at)}

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> Change:
        """Read what `to_stored` wrote; keys of later versions are passed over."""
        return cls(
            at=from_micros(int(value["at"])),
            action=Action(value["action"]),
            actor=str(value["actor"]),
            target=str(value["target"]),
            letters=int(value.get("letters", 0)),
            detail=dict(value.get("detail", {})),
        )


Observer = Callable[[Event], None]
Wants = Callable[[type[Event]], bool]


class Events:
    """Carries events to observers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._observers: dict[Observer, Wants | None] = {}

    def subscribe(self, observer: Observer, wants: Wants | None = None) -> None:
        """Tell an observer of every event from now on; once, however often it is given.

        Args:
            observer: Called with each event.
            wants: Whether it cares for a kind of event at this moment; asked where an event
                is dear to make. ``None``: always.
        """
        self._observers.setdefault(observer, wants)

    def unsubscribe(self, observer: Observer) -> None:
        """Tell it no more."""
        self._observers.pop(observer, None)

    def wanted(self, kind: type[Event]) -> bool:
        """Whether any observer cares for a kind of event."""
        return any(wants is None or wants(kind) for wants in self._observers.values())

    def emit(self, event: Event) -> None:
        """Tell all observers; what one raises is logged, and the others are told all the same."""
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:
                logger.exception("An observer failed at %s", type(event).__name__)


def whoami() -> str:
    """``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
