"""Reports to an error tracker, in memory."""

from __future__ import annotations

from collections import Counter

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.base.notes import GroupState, GroupStatus
from celery_dlq.store.base.reports import MOST_IDS, Report, Why
from celery_dlq.store.in_memory.notes import MemoryNotes


class MemoryReports:
    """The `Reports` in memory; groups never come back, and there is no allowance."""

    def __init__(self, notes: MemoryNotes | None = None) -> None:
        self._notes = notes or MemoryNotes()
        self._ids: dict[tuple[str, str], list[str]] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._ended: dict[tuple[str, str], tuple[GroupStatus, str]] = {}

    def of(self, letter: DeadLetter) -> Report | None:
        """Report letters number 1, 10, 100 and so on of a group."""
        group = (letter.dead_letter_queue, letter.fingerprint)
        status = self._notes.status(*group)
        if status.state is GroupState.MUTED:
            return None
        ids = self._ids.setdefault(group, [])
        if letter.id not in ids:
            ids.insert(0, letter.id)
            del ids[MOST_IDS:]
            self._numbers[group] += 1
            ended, _ = self._ended.get(group, (None, ""))
            if status.ended_by(letter.release) and ended != status:
                self._numbers[group] = 1
                self._ended[group] = (status, letter.id)
        number = self._numbers[group]
        if str(number).rstrip("0") != "1" or ids[0] != letter.id:
            return None
        why = Why.NEW if number == 1 else Why.GREW
        if self._ended.get(group, (None, ""))[1] == letter.id:
            why = Why.REGRESSED
        return Report(why=why, number=number, letter_ids=tuple(ids))
