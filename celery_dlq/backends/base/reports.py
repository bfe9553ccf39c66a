"""Which letters an error tracker is told of: a group's first, and then ever rarer ones.

A flood of letters must not become a flood of events. So the processes of an app decide
together, in the store, once per letter: the first letter of a group, the first after it
came back (a redriven message died again, or the group had been emptied), and then those
numbered 10, 100, 1,000 and so on. On top of that each
dead-letter queue has an allowance, for floods of groups; what it put off is reported with
the group's next letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from celery_dlq.record import DeadLetter

QUIET_SECONDS = 24 * 3600.0
"""A group without letters for so long is new again when it comes back."""

GAP_SECONDS = 300.0
"""A group that is emptied and fills again and again came back at most once in this time."""

BURST = 20
"""Most reports of one dead-letter queue at once."""

REFILL_SECONDS = 180.0
"""Time until one more is allowed."""

MOST_IDS = 10
"""Letter ids that a report names: the newest."""


class Why(str, Enum):
    """Why a letter is reported."""

    NEW = "new"
    CAME_BACK = "came_back"
    GREW = "grew"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A letter that is to be reported.

    Attributes:
        why: Why this one.
        number: Which letter of its group it is, since the group was new or came back.
        letter_ids: Ids of the group's newest letters, this one first.
    """

    why: Why
    number: int
    letter_ids: tuple[str, ...]


class Reports(Protocol):
    """Decides, for all processes of an app, which letters are reported."""

    def of(self, letter: DeadLetter) -> Report | None:
        """Ask once for a letter that is about to be stored; asking again changes nothing.

        Raises:
            StoreUnavailable: The store does not answer.
        """
