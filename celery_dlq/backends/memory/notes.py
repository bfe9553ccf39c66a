"""Notes on groups, in memory."""

from __future__ import annotations

from celery_dlq.backends.base.notes import MAX_NOTES, Note


class MemoryNotes:
    """The `GroupNotes` in memory; they are kept as long as the process lives."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], list[Note]] = {}

    def add(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note."""
        notes = self._notes.setdefault((dead_letter_queue, fingerprint), [])
        if notes[:1] != [note]:
            notes.insert(0, note)
        del notes[MAX_NOTES:]

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group."""
        return list(self._notes.get((dead_letter_queue, fingerprint), ()))
