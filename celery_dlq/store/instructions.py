"""Instructions: what operators tell all workers, which keep to it within a second or two.

A hold, an override and what a feature adds are one kind of record each, in one hash with one
revision. Every change counts the revision up, also a job that waits for a worker; workers read the
instructions only then. When one ends, the clock of Redis decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any, ClassVar

from celery_dlq.letters.printable import one_line, readable, shortened
from celery_dlq.letters.record import EPOCH, Recorded
from celery_dlq.registry import features
from celery_dlq.store.part import Part

_MAX_REASON_CHARS = 500
_REVISION = b"revision"


def reason_of(text: str) -> str:
    """The reason of an instruction, for people."""
    return shortened(one_line(text.strip()), _MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction(Recorded):
    """What an operator, or a circuit breaker, tells all workers."""

    kind: ClassVar[str]

    id: str = ""  # Its id, unique in its kind
    since: datetime = EPOCH  # Its beginning, aware UTC, by the store's clock
    until: datetime | None = None  # Its end, by the store's clock; `None` while nobody knows
    reason: str = ""  # Why, for people
    actor: str = ""  # Who gave it

    def in_force(self, now: datetime) -> bool:
        """True before its end."""
        return self.until is None or now < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Instruction):
    """A temporary change of one key of a queue's policy."""

    kind = "override"

    queue: str  # The queue, by its exact name
    key: str  # The policy key
    # The new value, JSON-ready; validated like a configured one. `None`: it was lifted
    value: Any
    until: datetime  # Its end; before it begins, the letters of the queue are left alone

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", json.dumps([self.queue, self.key]))


class CurrentInstructions(Part):
    """The instructions of an app in Redis, as its workers read them."""

    def revision(self) -> int:
        """Counts the changes; -1 if it is no number."""
        text = self._connection.send_and_wait("HGET", self._keys.instructions(), _REVISION) or b"0"
        return int(text) if text.isdigit() else -1

    def all(self) -> list[Instruction]:
        """All that are there, also those that have ended, oldest first."""
        texts = self._client.hgetall(self._keys.instructions())
        texts.pop(_REVISION, None)
        read = (parsed_or_none(field, text) for field, text in texts.items())
        found = [one for one in read if one is not None]
        return sorted(found, key=lambda one: (one.since, one.id))


def parsed_or_none(field: bytes, text: bytes) -> Instruction | None:
    """Read an instruction; ``None`` for one of a kind that is not known here."""
    name, _, instruction_id = field.decode("utf-8", "replace").partition(":")
    kind = _kind_of(name)
    if kind is None:  # of a later version, or of a feature that is gone
        return None
    return readable(f"the {name} {instruction_id}", partial(_parsed, kind, text))


@cache
def _kind_of(name: str) -> type[Instruction] | None:
    if name == Override.kind:
        return Override
    if name == "hold":
        from celery_dlq.store.holds import Hold  # noqa: PLC0415 - most workers never hold a message

        return Hold
    places = ((each, each.instructions.get(name)) for each in features())
    return next((each.load(place) for each, place in places if place), None)


def _parsed(kind: type[Instruction], text: bytes) -> Instruction:
    found = json.loads(text)
    if not {"id", "since"} <= found.keys():  # a hold of nothing would hold everything
        raise ValueError("expected an instruction with id and since")
    return kind.from_stored(found)
