"""Selection of the letters that are reported to an error tracker.

A flood of letters must not become a flood of events. So the processes of an app decide
together, in the store, once per letter. Reported are the first letter of a group, the first
after it came back (a redriven message died again, or the group had been emptied), and then
numbers 10, 100, 1,000 and so on. The letter that ends the resolution of its group is reported too;
those of a muted group are not. Against floods of groups each dead-letter queue also has an
allowance; a report that exceeds it is made with the group's next letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import Keys
from celery_dlq.store.overviews import release_text
from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.scripts import ReportReply

QUIET_SECONDS = 24 * 3600.0
"""A group without letters for this long is new again when it comes back."""

GAP_SECONDS = 300.0
"""Minimum time between two reports that a group came back."""

BURST = 20
"""Maximum number of reports of one dead-letter queue in a burst."""

REFILL_SECONDS = 180.0
"""Time until one more report is allowed."""

MOST_IDS = 10
"""Maximum number of letter ids in a report."""


class Why(str, Enum):
    """Reason for reporting a letter; ``USED_UP`` if ``auto_redrive`` redrives it no more."""

    NEW = "new"
    CAME_BACK = "came_back"
    GREW = "grew"
    USED_UP = "used_up"
    REGRESSED = "regressed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Decision to report a letter."""

    why: Why  # The reason
    number: int  # The letter's number in its group, counted since the group was new or came back
    letter_ids: tuple[str, ...]  # Ids of the group's newest letters, this one first


_WHY = {
    ReportReply.NEW: Why.NEW,
    ReportReply.CAME_BACK: Why.CAME_BACK,
    ReportReply.GREW: Why.GREW,
    ReportReply.REGRESSED: Why.REGRESSED,
}


class Reports(Part):
    """The `Reports` in Redis."""

    def __init__(
        self,
        client: Any,
        url: str,
        keys: Keys,
        connection: PipelinedConnection | None = None,
        gap_seconds: float = GAP_SECONDS,
    ) -> None:
        super().__init__(client, url, keys, connection)
        self._options = [
            *(int(seconds * 1000) for seconds in (QUIET_SECONDS, gap_seconds)),
            BURST,
            int(REFILL_SECONDS * 1000),
            MOST_IDS,
        ]

    def of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter that is about to be stored; repeated calls give the same result."""
        self._raise_if_away()
        queue, fingerprint = letter.dead_letter_queue, letter.fingerprint
        places = [
            self._keys.report(queue, fingerprint),
            self._keys.tally(queue),
            self._keys.allowance(queue),
            self._keys.states(queue),
        ]
        with translated(self._url):
            state, number, ids = self._scripts.report(
                keys=places,
                args=[
                    letter.id,
                    fingerprint,
                    *self._options,
                    letter.redrives,
                    release_text(letter.release),
                ],
            )
        if state == ReportReply.NONE:
            return None
        return Report(
            why=_WHY[ReportReply(state)], number=number, letter_ids=tuple(ids.decode().split())
        )
