"""Gives instructions to workers, changes them and takes them back: what only operators do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar
from uuid import uuid4

from celery_dlq.store.holds import Hold
from celery_dlq.store.instructions import CurrentInstructions, Instruction, parsed_or_none
from celery_dlq.store.keys import Keys, compact, spelled

_ANY = "*"

AnyInstruction = TypeVar("AnyInstruction", bound=Instruction)


class Instructions(CurrentInstructions):
    """The instructions of an app in Redis, as operators and circuit breakers give them."""

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
        found = None if text is None else parsed_or_none(field.encode(), text)
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
        if (None if text is None else parsed_or_none(field.encode(), text)) != known:
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
