"""Which letters are reported to Sentry: the processes of an app decide together, in the store."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dlq.letters.record import DeadLetter, TextEnum
from celery_dlq.store.new_letters import release_text
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


class ReportCause(TextEnum):
    """Reason for reporting a letter; ``USED_UP`` if what redrove it gives it up."""

    NEW = "new"
    CAME_BACK = "came_back"
    GREW = "grew"
    USED_UP = "used_up"
    REGRESSED = "regressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Decision to report a letter."""

    why: ReportCause  # The reason
    number: int  # The letter's number in its group, counted since the group was new or came back
    letter_ids: tuple[str, ...]  # Ids of the group's newest letters, this one first


_WHY = (
    None,
    ReportCause.NEW,
    ReportCause.CAME_BACK,
    ReportCause.GREW,
    ReportCause.REGRESSED,
)  # as `report.lua` replies


class Reports(Part):
    """Decides which letters are reported."""

    lua = "celery_dlq.features.sentry"

    gap_seconds = GAP_SECONDS

    def report_of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter that is about to be stored; repeated calls give the same result."""
        self._connection.raise_if_away()
        queue, fingerprint = letter.dead_letter_queue, letter.fingerprint
        number_of, number, ids = self._run_script(
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
