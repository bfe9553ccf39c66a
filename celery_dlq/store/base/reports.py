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
from typing import Protocol

from celery_dlq.letters.record import DeadLetter

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


class Reports(Protocol):
    """Decides, for all processes of an app, which letters are reported."""

    def of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter that is about to be stored; repeated calls give the same result."""
