"""Frozen events with their closed lists, and the bus that delivers them to observers.

Metrics, error trackers and signals are observers: none of them fails a task or stops a letter.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery_dlq.letters.printable import get_logger, one_line, shortened
from celery_dlq.letters.record import DeadLetter, Recorded, TextEnum, check_aware

__all__ = ["Action", "Change", "DeadLettered", "Event", "Redriven", "acting_as"]

logger = get_logger("celery_dlq")

_MAX_USER_CHARS = 100
_actor: ContextVar[str | None] = ContextVar("celery_dlq_actor", default=None)


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
    """A letter was stored; emitted once, also if the same letter is stored twice.

    Attributes:
        letter: The letter.
        regressed: True if its group was resolved until this letter, the first of those after.
    """

    letter: DeadLetter
    regressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven(Event):
    """The broker confirmed a letter's original message again; emitted once per letter.

    Attributes:
        letter: The letter, as it was before it left its dead-letter queue.
        redrive_id: Id of the redrive, also in the message's header ``dlq_redrive``.
    """

    letter: DeadLetter
    redrive_id: str


class Action(TextEnum):
    """The kind of a change: a closed list, the same in events, metrics and ``dlq audit``."""

    REDRIVEN = "redriven"
    EDITED = "edited"
    DISCARDED = "discarded"
    RESTORED = "restored"
    PURGED = "purged"
    TRIMMED = "trimmed"
    ADOPTED = "adopted"
    POLICY_SET = "policy_set"
    POLICY_UNSET = "policy_unset"
    NOTED = "noted"
    HELD = "held"
    RELEASED = "released"
    RESOLVED = "resolved"
    MUTED = "muted"
    REOPENED = "reopened"
    ASSIGNED = "assigned"
    CIRCUIT_OPENED = "circuit_opened"
    CIRCUIT_CLOSED = "circuit_closed"
    DEMANDED = "demanded"
    DEMAND_WITHDRAWN = "demand_withdrawn"


class GroupState(TextEnum):
    """What is to be done about a group: a closed list.

    A member is its text, its colour in a console, and whether the group is not reported meanwhile.
    """

    colour: str
    is_quiet: bool

    def __new__(cls, value: str, colour: str = "", is_quiet: bool = False) -> GroupState:  # noqa: PYI034, FBT001, FBT002 - see `Reason`
        """Make a member. The defaults are for type checkers: see `Reason`."""
        made = str.__new__(cls, value)
        made._value_, made.colour, made.is_quiet = value, colour, is_quiet
        return made

    OPEN = "open", "dim"
    MUTED = "muted", "dim", True
    RESOLVED = "resolved", "green"
    REGRESSED = "regressed", "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Event, Recorded):
    """A person or a policy changed letters, groups or policies. ``dlq audit`` shows it.

    Attributes:
        action: What was done.
        actor: ``user@host``, ``alice via user@host`` of a user of the web page, or the node name
            of a worker that applied a policy.
        target: The dead-letter queue, or the queue whose policy was changed, or the hold, or
            the task of a demand.
        letters: Number of letters changed.
        detail: How the letters were selected, and the options; JSON-ready.
    """

    action: Action
    actor: str
    target: str
    letters: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)


EventObserver = Callable[[Event], None]
Wants = Callable[[type[Event]], bool]


class Events:
    """Delivers events to observers in the order of their subscription."""

    def __init__(self) -> None:
        self._observers: dict[EventObserver, Wants | None] = {}

    def subscribe(self, observer: EventObserver, wants: Wants | None = None) -> None:
        """Deliver every event to an observer from now on. Subscribing twice changes nothing.

        Args:
            observer: Called with each event.
            wants: Returns whether the observer needs a kind of event now; called first when
                building the event is expensive. ``None``: always.
        """
        self._observers.setdefault(observer, wants)

    def unsubscribe(self, observer: EventObserver) -> None:
        """Deliver no more events to an observer."""
        self._observers.pop(observer, None)

    def wanted(self, kind: type[Event]) -> bool:
        """True if any observer needs a kind of event."""
        return any(wants is None or wants(kind) for wants in self._observers.values())

    def emit(self, event: Event) -> None:
        """Call all observers; an error of one is logged and does not stop the others."""
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:
                logger.exception("An observer failed at %s", type(event).__name__)


def process_user() -> str:
    """``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def whoami() -> str:
    """Who acts: the user of this process, unless `acting_as` or `on_behalf_of` names another."""
    return _actor.get() or process_user()


@contextmanager
def acting_as(user: str) -> Iterator[None]:
    """Name a user of this process, e.g. of the web page, in jobs, audit and edits.

    Within the block they say ``alice via web@host``. It ends with the thread or asyncio task.

    Args:
        user: Name of the user; control characters are escaped, more than 100 characters are cut.
            Empty for an unknown one: the process's own user is named.
    """
    name = shortened(one_line(user.strip()), _MAX_USER_CHARS)
    with on_behalf_of(f"{name} via {process_user()}" if name else process_user()):
        yield


@contextmanager
def on_behalf_of(actor: str) -> Iterator[None]:
    """Name the actor who started a job, while another thread or process runs it."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)
