"""Notes on groups, and their states, in memory."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.base.notes import MAX_NOTES, OPEN_GROUP, GroupState, GroupStatus, Note


class MemoryNotes:
    """The `GroupNotes` in memory; they are kept as long as the process lives."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], list[Note]] = {}
        self._statuses: dict[tuple[str, str], GroupStatus] = {}

    def add(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note."""
        notes = self._notes.setdefault((dead_letter_queue, fingerprint), [])
        if notes[:1] != [note]:
            notes.insert(0, note)
        del notes[MAX_NOTES:]

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group."""
        return list(self._notes.get((dead_letter_queue, fingerprint), ()))

    def set_status(self, dead_letter_queue: str, fingerprint: str, status: GroupStatus) -> None:
        """Set the state of a group."""
        self._statuses[dead_letter_queue, fingerprint] = status

    def status(self, dead_letter_queue: str, fingerprint: str) -> GroupStatus:
        """Return the state of a group."""
        found = self._statuses.get((dead_letter_queue, fingerprint), OPEN_GROUP)
        is_over = found.until is not None and found.until <= datetime.now(timezone.utc)
        return OPEN_GROUP if is_over else found

    def statuses(self, dead_letter_queue: str) -> dict[str, GroupStatus]:
        """Return the states of all groups that are not open."""
        names = [name for queue, name in self._statuses if queue == dead_letter_queue]
        found = {name: self.status(dead_letter_queue, name) for name in names}
        return {name: one for name, one in found.items() if one.state is not GroupState.OPEN}

    def stored(self, letter: DeadLetter) -> bool:
        """Note that a letter was stored; true if that made its group regressed."""
        group = (letter.dead_letter_queue, letter.fingerprint)
        status = self.status(*group)
        if not status.ended_by(letter.release):
            return False
        self._statuses[group] = replace(
            status,
            state=GroupState.REGRESSED,
            regressed_at=letter.dead_lettered_at,
            regressed_in=letter.release,
            letter_id=letter.id,
        )
        return True
