"""Look at held messages, and stop one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action
from celery_dlq.operations.instructions import Audit
from celery_dlq.operations.reading import Reading
from celery_dlq.store.instructions import reason_of
from celery_dlq.store.worker_records import ClaimState

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.letters.record import DeadLetter


class HeldWindow:
    """Reads the messages of holds; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly) -> None:
        self._queues = assembly.held_queues()
        self._store = assembly.backend.held
        self._audit = Audit(assembly.backend.workers, assembly.events)
        self.reading = Reading(self._store, assembly.redaction)

    def held_messages(
        self, hold_id: str, where: LetterFilter | None = None, *, limit: int | None = None
    ) -> Iterator[DeadLetter]:
        """The messages of a hold in the order of their arrival, as letters; changes nothing."""
        self._queues.hold_by_id(hold_id)
        if hold_id not in self._store.names():  # it never had one
            return iter(())
        return self.reading.letters(hold_id, where, limit=limit)

    def discard_held(self, hold_id: str, letter_id: str, *, note: str = "") -> DeadLetter:
        """Stop a held message for good: no worker runs it, and nothing brings it back.

        Refuses one that a release has, or may have sent already.
        """
        self._queues.hold_by_id(hold_id)
        found = self.reading.entry(letter_id, hold_id)[1]
        letter, owner = found.letter(), f"held-{uuid4().hex}"
        (state,) = self._store.claims.claim(
            hold_id, [found.key], owner=owner, lease_seconds=timing.current.claim
        )
        if state is not ClaimState.CLAIMED:
            raise DLQError(
                f"expected a message that no release has, got {letter_id!r}: it is being released, "
                f"or was sent by a release that was interrupted; see `dlq jobs`"
            )
        detail = {"ids": [found.key], "task": letter.task_name, "note": reason_of(note)}
        self._audit.record(Action.PURGED, hold_id, detail, letters=1)
        if not self._store.remove(hold_id, [found.key], owner=owner):
            raise NotFound(f"expected a held message, got {letter_id!r}, which has just left")
        return letter
