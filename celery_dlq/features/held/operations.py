"""Look at held messages, edit one, and stop one.

A change claims the message first, as a release does: one of them has it. An edit then puts the
copy into its place in one step, so that at every instant there is one of them, and lets go of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER, LETTER_HEADER
from celery_dlq.letters.packing import packed
from celery_dlq.operations.edit import Edit, arguments, edits_of
from celery_dlq.operations.instructions import Audit
from celery_dlq.operations.paging import LetterPage
from celery_dlq.operations.reading import Reading
from celery_dlq.operations.redrive.message import released
from celery_dlq.operations.redrive.work import edited_by
from celery_dlq.store.claims import REMOVES, ClaimState
from celery_dlq.store.instructions import reason_of
from celery_dlq.store.keys import Keys
from celery_dlq.store.part import Part

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry


class Replaced(Part):
    """Replaces held messages by their edited copies."""

    lua = "celery_dlq.features.held"

    def put(self, hold_id: str, letter: DeadLetter, *, owner: str) -> bool:
        """Put a copy in the place of the message with its id; false if the owner has it not."""
        entry = [part for pair in packed(letter.to_fields()).items() for part in pair]
        return bool(self._run_script("edited", letter.id, owner, *entry, queue=hold_id))


class HeldWindow:
    """Reads the messages of holds; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly) -> None:
        backend = assembly.backend
        self._jobs = assembly.jobs()
        self._queues = assembly.held_queues()
        self._store = backend.held
        self._replaced = Replaced(backend, Keys(f"{backend.keys.prefix}:held"))
        self._audit = Audit(backend.workers, assembly.events)
        self.reading = Reading(self._store, assembly.redaction)

    def held_messages(
        self, hold_id: str, where: LetterFilter | None = None, *, limit: int | None = None
    ) -> Iterator[DeadLetter]:
        """The messages of a hold in the order of their arrival, as letters; changes nothing."""
        self._queues.hold_by_id(hold_id)
        if not self._store.has_queue(hold_id):  # it never had one
            return iter(())
        return self.reading.letters(hold_id, where, limit=limit)

    def page(
        self, hold_id: str, where: LetterFilter | None, cursor: str | None, seconds: float
    ) -> LetterPage:
        """A page of the messages of a hold, the newest first, found within some seconds."""
        if not self._store.has_queue(hold_id):
            return LetterPage()
        return self.reading.page(hold_id, where, cursor=cursor, deadline_seconds=seconds)

    def edit_held(
        self, hold_id: str, letter_id: str, change: Edit, *, note: str = "", seen: str = ""
    ) -> DeadLetter:
        """Change the arguments of a held message, which stays held, as the newest of its hold.

        The header ``dlq_edited`` records who changed what, when, and the old values, as `edit`
        does. Refuses a message that a release has, or may have sent already; and with ``seen``, the
        position of the message as it was shown, one that somebody has edited since.
        """
        with self._claimed(hold_id, letter_id) as (found, owner):
            if seen and found.position != seen:
                raise self._has_changed(found)
            letter = self._edited(found, change)
            self._record(Action.EDITED, hold_id, letter, note=note, changed=change.paths())
            if not self._replaced.put(hold_id, letter, owner=owner):
                raise _has_left(letter_id)
        return letter

    def discard_held(self, hold_id: str, letter_id: str, *, note: str = "") -> DeadLetter:
        """Stop a held message for good: no worker runs it, and nothing brings it back.

        Refuses one that a release has, or may have sent already.
        """
        with self._claimed(hold_id, letter_id) as (found, owner):
            letter = found.letter()
            self._record(Action.PURGED, hold_id, letter, note=note)
            if not self._store.remove(hold_id, [found.key], owner=owner):
                raise _has_left(letter_id)
        return letter

    @contextmanager
    def _claimed(self, hold_id: str, letter_id: str) -> Iterator[tuple[RawEntry, str]]:
        """A held message that no release gets meanwhile, and the owner of its claim."""
        self._queues.hold_by_id(hold_id)
        key, owner = self.reading.entry(letter_id, hold_id)[1].key, f"held-{uuid4().hex}{REMOVES}"
        claims, lease_seconds = self._store.claims, timing.current.claim
        (state,) = claims.claim(hold_id, [key], owner=owner, lease_seconds=lease_seconds)
        try:
            if state is not ClaimState.CLAIMED:
                raise DLQError(
                    f"expected a message that no release has, got {letter_id!r}: it is being "
                    f"released, or was sent by a release that was interrupted; see `dlq jobs`"
                )
            yield self.reading.entry(key, hold_id)[1], owner  # as it is now, edited or not
        finally:  # one that may have been sent stays in doubt
            claims.release(hold_id, [key], owner=owner)

    def _has_changed(self, found: RawEntry) -> DLQError:
        """The error that says who changed what meanwhile, as far as people may see it."""
        headers = self.reading.redaction.letter(found.letter()).decoded("headers") or {}
        last = (edits_of(headers) or [{}])[-1]
        names = ("actor", "at", "from", "to")
        who, at, old, new = (last.get(name, "unknown") for name in names)
        return DLQError(
            f"expected the message {found.key} as it was shown, got one that has changed "
            f"meanwhile: {who} edited it at {at}, from {old} to {new}; nothing was saved"
        )

    def _edited(self, found: RawEntry, change: Edit) -> DeadLetter:
        """The letter of a held message with the arguments and headers that the message gets."""
        sent = edited_by(self._jobs, change)(released(found))
        parts = arguments(sent.content_type, sent.body, sent.headers)
        for name in (HOLD_HEADER, LETTER_HEADER):  # its release adds them
            del sent.headers[name]
        return replace(
            found.letter(),
            body=sent.body,
            content_encoding=sent.content_encoding,
            headers=json_codec.dumps(sent.headers),
            args_json=json_codec.dumps(parts.args),
            kwargs_json=json_codec.dumps(parts.kwargs),
            argsrepr=sent.headers.get("argsrepr"),
            kwargsrepr=sent.headers.get("kwargsrepr"),
        )

    def _record(
        self, action: Action, hold_id: str, letter: DeadLetter, *, note: str, **more: object
    ) -> None:
        detail = {"ids": [letter.id], "task": letter.task_name, "note": reason_of(note), **more}
        self._audit.record(action, hold_id, detail, letters=1)


def _has_left(letter_id: str) -> NotFound:
    return NotFound(f"expected a held message, got {letter_id!r}, which has just left")
