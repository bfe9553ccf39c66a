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

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.overviews import release_text
from celery_dlq.store.part import Part

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


_WHY = (None, Why.NEW, Why.CAME_BACK, Why.GREW, Why.REGRESSED)  # as `report.lua` replies


class Reports(Part):
    """Decides which letters are reported."""

    lua = "celery_dlq.features.sentry"

    gap_seconds = GAP_SECONDS

    def of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter that is about to be stored; repeated calls give the same result."""
        self._connection.raise_if_away()
        queue, fingerprint = letter.dead_letter_queue, letter.fingerprint
        number_of, number, ids = self._call(
            "report",
            letter.id,
            fingerprint,
            *(int(seconds * 1000) for seconds in (QUIET_SECONDS, self.gap_seconds)),
            BURST,
            int(REFILL_SECONDS * 1000),
            MOST_IDS,
            letter.redrives,
            release_text(letter.release),
            queue=queue,
            report=self._keys.report(queue, fingerprint),
        )
        why = _WHY[number_of]
        if why is None:
            return None
        return Report(why=why, number=number, letter_ids=tuple(ids.decode().split()))
