"""Instructions: what operators tell all workers, which keep to it within a second or two.

A hold, an override and what a feature adds are one kind of record each, in one hash with one
revision. Every change counts the revision up, also a job that waits for a worker; workers read the
instructions only then. When one ends, the clock of Redis decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from celery_dlq.letters.printable import one_line, readable, shortened
from celery_dlq.letters.record import EPOCH, Recorded, iso
from celery_dlq.registry import features
from celery_dlq.store.keys import Keys, compact, spelled
from celery_dlq.store.part import Part

MOST_HOLDS = 100
"""Holds at a time; workers compare each message with all that are in force."""

MOST_HELD = 100_000
"""About how many messages a hold takes; workers do not consume the queues of the next ones."""

OPEN = "open"
"""State of a circuit breaker: messages are held, and now and then one runs as a probe."""

RELEASING = "releasing"
"""State of a circuit breaker: probes succeeded, and the held messages are released."""

_MAX_REASON_CHARS = 500
_ANY = "*"
_REVISION = b"revision"


def reason_of(text: str) -> str:
    """The reason of an instruction, for people."""
    return shortened(one_line(text.strip()), _MAX_REASON_CHARS)


def matches_pattern(pattern: str, name: str) -> bool:
    """True for the name itself, also if it has signs of a pattern, and for what a pattern fits."""
    return name == pattern or fnmatchcase(name, pattern)


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


_CORE: Mapping[str, type[Instruction]] = {one.kind: one for one in (Hold, Override)}

AnyInstruction = TypeVar("AnyInstruction", bound=Instruction)


class Instructions(Part):
    """The instructions of an app in Redis."""

    def revision(self) -> int:
        """Counts the changes; -1 if it is no number."""
        text = self._connection.send_and_wait("HGET", self._keys.instructions(), _REVISION) or b"0"
        return int(text) if text.isdigit() else -1

    def all(self) -> list[Instruction]:
        """All that are there, also those that have ended, oldest first."""
        texts = self._client.hgetall(self._keys.instructions())
        texts.pop(_REVISION, None)
        read = (_parsed_or_none(field, text) for field, text in texts.items())
        found = [one for one in read if one is not None]
        return sorted(found, key=lambda one: (one.since, one.id))

    def of(self, kind: type[AnyInstruction]) -> list[AnyInstruction]:
        """All of a kind, also those that have ended."""
        return [one for one in self.all() if isinstance(one, kind)]

    def in_force(self, kind: type[AnyInstruction]) -> list[AnyInstruction]:
        """Those of a kind that have not ended; the others are forgotten."""
        found, now = self.of(kind), self.now()
        self.forget([one for one in found if not one.in_force(now)])
        return [one for one in found if one.in_force(now)]

    def get(self, kind: type[AnyInstruction], instruction_id: str) -> AnyInstruction | None:
        """One instruction, unless it has ended."""
        field = _field_of(kind, instruction_id)
        text = self._client.hget(self._keys.instructions(), field)
        found = None if text is None else _parsed_or_none(field.encode(), text)
        return found if isinstance(found, kind) and found.in_force(self.now()) else None

    def give(self, instruction: Instruction, most: int = 0) -> bool:
        """Give an instruction, in place of one with its id; false if there are ``most`` others."""
        return self._instruct(instruction, _ANY, _stored_text(instruction), most)

    def replace(self, known: AnyInstruction | None, new: AnyInstruction | None) -> bool:
        """Add, change or remove an instruction if the store still has what the caller knows.

        So one process of many opens, changes or ends a hold, at one moment. A hold that has
        messages is not removed.
        """
        target = known or new
        if target is None:
            return False
        field = _field_of(type(target), target.id)
        # Its own text: that of a later version may have more keys.
        text = self._client.hget(self._keys.instructions(), field)
        if (None if text is None else _parsed_or_none(field.encode(), text)) != known:
            return False
        if new is None and isinstance(target, Hold) and not self._dropped(target.id):
            return False
        return self._instruct(target, text or "", "" if new is None else _stored_text(new))

    def remove(self, instruction: Instruction) -> bool:
        """Remove an instruction, and let workers notice; false if it is not there."""
        there = self._client.hexists(
            self._keys.instructions(), _field_of(type(instruction), instruction.id)
        )
        return self._instruct(instruction, _ANY, "") and bool(there)

    def forget(self, instructions: Iterable[Instruction]) -> int:
        """Remove instructions that have ended or are met; workers need not notice."""
        names = [_field_of(type(one), one.id) for one in instructions]
        if not names:
            return 0
        return int(self._client.hdel(self._keys.instructions(), *names))

    def _instruct(self, target: Instruction, known: str | bytes, text: str, most: int = 0) -> bool:
        field = _field_of(type(target), target.id)
        return bool(self._run_script("instruct", field, known, text, most) == 1)

    def _dropped(self, hold_id: str) -> bool:
        """Remove the queue of a hold, if it is empty."""
        keys = Keys(f"{self._keys.prefix}:held")
        if not self._run_script("drop_held", letters=keys.letters(hold_id)):
            return False
        self._client.srem(keys.queues(), spelled(hold_id))
        return True


def _field_of(kind: type[Instruction], instruction_id: str) -> str:
    return f"{kind.kind}:{spelled(instruction_id)}"


def _stored_text(instruction: Instruction) -> str:
    """The text of an instruction, which no other call writes: what is there is known as our own."""
    return compact({**instruction.to_stored(), "written": uuid4().hex})


def _parsed_or_none(field: bytes, text: bytes) -> Instruction | None:
    name, _, instruction_id = field.decode("utf-8", "replace").partition(":")
    kind = _CORE.get(name) or _of_feature(name)
    if kind is None:  # of a later version, or of a feature that is gone
        return None
    return readable(f"the {name} {instruction_id}", partial(_parsed, kind, text))


@cache
def _of_feature(name: str) -> type[Instruction] | None:
    places = ((each, each.instructions.get(name)) for each in features())
    return next((each.load(place) for each, place in places if place), None)


def _parsed(kind: type[Instruction], text: bytes) -> Instruction:
    found = json.loads(text)
    if not {"id", "since"} <= found.keys():  # a hold of nothing would hold everything
        raise ValueError("expected an instruction with id and since")
    return kind.from_stored(found)
