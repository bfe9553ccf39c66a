"""Notes on groups of letters: what operators know of a cause."""

from __future__ import annotations

from celery_dlq.backends.base import Backend, GroupNotes, Note
from celery_dlq.errors import DLQError
from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.letters.printable import shortened
from celery_dlq.operations.reading import Reading

MAX_NOTE_CHARS = 2000
_MAX_AUDIT_CHARS = 200


class Notes:
    """Writes and reads notes.

    Args:
        backend: Keeps the notes and the audit.
        reading: Finds the groups.
        events: Receives every change.
    """

    def __init__(self, backend: Backend, reading: Reading, events: Events) -> None:
        self._notes: GroupNotes = backend.notes
        self._registry = backend.workers
        self._reading = reading
        self._events = events

    def note(self, dead_letter_queue: str, fingerprint: str, text: str) -> Note:
        """Add a note to a group of letters, for example the ticket of its bug.

        A group keeps its newest 50 notes: while it has letters, and for 90 days after. If the
        letters are on the broker: for 90 days after the last note.

        Args:
            dead_letter_queue: The queue's name.
            fingerprint: The whole fingerprint of the group.
            text: At most 2,000 characters.

        Raises:
            NotFound: The queue has no letter with this fingerprint, and no note on it.
            DLQError: The text is empty or too long.
            StoreUnavailable: The store does not answer.
        """
        text = text.strip()
        if not 0 < len(text) <= MAX_NOTE_CHARS:
            raise DLQError(
                f"expected a note of 1 to {MAX_NOTE_CHARS:,} characters, got {len(text):,}"
            )
        self._check(dead_letter_queue, fingerprint)
        note = Note(at=self._registry.now(), actor=whoami(), text=text)
        change = Change(
            at=note.at,
            action=Action.NOTED,
            actor=note.actor,
            target=dead_letter_queue,
            detail={"fingerprint": fingerprint, "text": shortened(text, _MAX_AUDIT_CHARS)},
        )
        self._registry.record(change)  # first, so that no change is untraceable
        self._events.emit(change)
        self._notes.add(dead_letter_queue, fingerprint, note)
        return note

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """The notes on a group of letters, newest first.

        Raises:
            NotFound: The queue has no letter with this fingerprint, and no note on it.
            StoreUnavailable: The store does not answer.
        """
        return self._check(dead_letter_queue, fingerprint)

    def _check(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes; without any, check that the group exists."""
        self._reading.check_queue(dead_letter_queue)
        notes = self._notes.notes(dead_letter_queue, fingerprint)
        if not notes:
            self._reading.group(dead_letter_queue, fingerprint)
        return notes
