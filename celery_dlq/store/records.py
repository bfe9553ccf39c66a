"""The plain records of whoever reads letters, as the store takes and returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

from celery_dlq.events import GroupState
from celery_dlq.letters.fingerprint import SHOWN_DIGITS
from celery_dlq.letters.record import (
    DeadLetter,
    Delivery,
    Recorded,
    check_aware,
    from_micros,
    to_micros,
)
from celery_dlq.store.worker_records import MessageKey


def ordered(position: str) -> tuple[int, ...]:
    """Return a position as numbers, which sort in the order of storing."""
    return tuple(int(part) for part in position.split("-"))


def stored_at(position: str) -> datetime | None:
    """Return the time in a position, which begins with milliseconds since 1970, or ``None``."""
    with suppress(ValueError, OverflowError):
        return from_micros(ordered(position)[0] * 1000)
    return None


def position_at(moment: datetime) -> str:
    """Return the first position of a moment: letters before it were stored earlier."""
    return f"{max(0, to_micros(moment) // 1000)}-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What Redis leaves out of a range of letters before it sends them.

    What it cannot judge, such as an entry that is no letter, it sends.
    """

    codes: str = ""  # Of the fields that are read, see `letters.packed.codes_of`; empty: of all
    since: int | None = None  # Microseconds since 1970
    until: int | None = None  # The same, exclusive
    reason: str = ""
    fingerprints: tuple[str, ...] = ()  # Their beginnings; of any of them


KEPT_DAYS = 90
"""Notes and states are kept while their group has letters, and for this long after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus(Recorded):
    """The state of a group, since when, and by whom."""

    state: GroupState = GroupState.OPEN  # The state
    # When the group was muted or resolved, aware UTC; of a regressed group, when it had been
    # resolved. `None` for an open one
    at: datetime | None = None
    actor: str = ""  # Who did that
    owner: str = ""  # Who takes care of the group, whatever its state is; empty for nobody
    until: datetime | None = None  # When a muted group opens by itself; `None`: never
    # The release in which a group is, or was, resolved; `None`: in all that run
    release: str | None = None
    releases: tuple[str, ...] = ()  # Releases in which it had died before
    regressed_at: datetime | None = None  # When the letter died that ended the resolution
    regressed_in: str | None = None  # The release of that letter, if known
    letter_id: str | None = None  # Its id
    # The task of the group, as it was when it was muted or resolved. This and the following
    # describe a group that has no letters any more
    task_name: str = ""
    reason: str = ""  # Its reason
    exception_type: str | None = None  # Its exception
    first_seen_at: datetime | None = None  # When its first letter had died
    last_seen_at: datetime | None = None  # When its newest letter had died

    def __post_init__(self) -> None:
        for name in ("at", "until", "regressed_at", "first_seen_at", "last_seen_at"):
            check_aware(name, getattr(self, name))


OPEN_GROUP = GroupStatus()
"""The status of a group about which nobody decided anything."""


NOW_MINUTES = 10  # at most, of which the pace of a queue is
_GROWING = 1.5  # times the usual


def by_minute(arrivals: Mapping[str, Sequence[int]]) -> list[int]:
    """Letters of all reasons in each minute of the last hour, the oldest minute first."""
    return [sum(column) for column in zip(*arrivals.values(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSummary:
    """Size, age and reasons of one dead-letter queue.

    Attributes:
        name: Its name.
        letters: Number of letters.
        oldest_at: When its oldest letter died.
        newest_at: When its newest letter died.
        reasons: Letters by reason.
        last_hour: Letters stored in the last hour, removed ones too.
        arrivals: The same by reason: their numbers in each of the last 60 minutes, the oldest
            minute first. The last minute is still running.
        per_minute: Letters a minute now: of the last five to ten minutes, since the first one in
            them; 0 as `Group.per_minute`.
        memory_bytes: Memory of its letters and of those in its bin, estimated from the oldest ones;
            ``None`` if unknown.
    """

    name: str
    letters: int
    oldest_at: datetime | None = None
    newest_at: datetime | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    last_hour: int = field(default=0, compare=False)
    arrivals: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)
    per_minute: float = field(default=0.0, compare=False)
    memory_bytes: int | None = field(default=None, compare=False)

    @property
    def direction(self) -> str:
        """``quiet``, ``growing``, ``slowing`` or ``steady``: now, by the minutes before."""
        now, before = self.per_minute, by_minute(self.arrivals)[:-NOW_MINUTES]
        usual = sum(before) / max(1, len(before))
        if not now:
            return "quiet"
        if now > _GROWING * usual:
            return "growing"
        return "slowing" if _GROWING * now < usual else "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """A queue as retention first sees it, to decide if there is anything to remove."""

    name: str  # The dead-letter queue
    at: datetime  # The current time by the store's clock
    letters: int  # Number of letters
    oldest_stored_at: datetime | None  # When the oldest letter was stored, by the same clock
    first_end_at: datetime | None  # Earliest expiry of a letter's message, past or future


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The letters of one fingerprint, summed up.

    Attributes:
        fingerprint: The fingerprint.
        letters: Number of letters.
        task_name: The task of the newest letter.
        reason: Its reason.
        exception_type: Its exception.
        first_seen_at: When the first letter died, since the group last was empty.
        last_seen_at: When the newest letter died.
        example_id: Id of the newest letter; empty if that was removed.
        course: Letters stored in each of the last 24 hours of the clock, the oldest hour first.
            The last hour is still running. In Redis, removed letters are included, but none from
            before the group last was empty: it starts anew with its next letter.
        last_hour: Letters stored in the last hour, to five minutes. The same holds.
        recent: The same in each of its twelve parts, the oldest first. The last one still runs.
        per_minute: Letters a minute now: of the last five to ten minutes, or since the first one;
            0 once so many would have come since the last five minutes ended, and none did.
        releases: The `DeadLetter.release` of its letters, that of the newest letter first: at
            most five, among them the first one.
        status: Its state; `DeadLetters.groups` and `DeadLetters.group` fill it in.
    """

    fingerprint: str
    letters: int
    task_name: str
    reason: str
    exception_type: str | None
    first_seen_at: datetime
    last_seen_at: datetime
    example_id: str
    course: Sequence[int] = field(default=(), compare=False)
    last_hour: int = field(default=0, compare=False)
    recent: Sequence[int] = field(default=(), compare=False)
    per_minute: float = field(default=0.0, compare=False)
    releases: Sequence[str] = ()
    status: GroupStatus = field(default=OPEN_GROUP, compare=False)

    @property
    def digits(self) -> str:
        """The first ones of its fingerprint, by which commands and people name it."""
        return self.fingerprint[:SHOWN_DIGITS]

    @property
    def is_growing(self) -> bool:
        """True if the last hour has half as many again as the hours of the day before it.

        Not without letters: then it is mended, and not red.
        """
        before = self.course[:-2]
        usual = sum(before) / max(1, len(before))
        return self.letters > 0 and self.last_hour > _GROWING * usual

    def release_with_fix(self, live: Iterable[str]) -> str:
        """The release of all live workers, if no letter is from it; else empty."""
        releases = {*live}
        return releases.pop() if len(releases) == 1 and not releases & {*self.releases} else ""


GroupOrder = Literal["letters", "newest"]
"""Order of groups: the largest first, or the last seen first."""


def has_text(group: Group, text: str) -> bool:
    """Return True if a group has a text, in small letters, in what names it."""
    names = (group.task_name, group.exception_type or "", group.reason, group.fingerprint)
    return any(text in name.casefold() for name in (*names, *group.releases))


def in_order(groups: Iterable[Group], by: GroupOrder) -> list[Group]:
    """Sort groups."""
    if by == "newest":
        return sorted(groups, key=lambda group: (group.last_seen_at, group.fingerprint))[::-1]
    return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLetter:
    """A letter and its place in the store: an opaque, strictly increasing position."""

    position: str
    letter: DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSummary:
    """A letter as retention sees it."""

    position: str  # Its position
    letter_id: str  # Its id
    # When it died, by its worker's clock. `None` if the entry is not a letter, and from
    # `Letters.expired_letters`
    dead_lettered_at: datetime | None = None

    @property
    def stored_at(self) -> datetime | None:
        """When it was stored, by the store's clock; ``None`` if unknown."""
        return stored_at(self.position)


FIRST_POSITION = "0-0"
"""The position before the first letter of every queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFolder:
    """A folder that letters of one queue are exported to, as its last export left it."""

    key: str  # What tells it from other folders
    name: str  # For people, without credentials
    seen_at: datetime  # When an export last gave a sign of life
    position: str  # It lacks the letters after this position
    # Its exports removed letters up to this position, or are doing so
    trimmed: str = FIRST_POSITION
    trimmed_letters: int = 0  # How many of those that are removed are in its files
    filtered: bool = False  # True if it has some letters only; such a folder holds none back


class RedriveOutcome(Enum):
    """Outcome of a watched redriven message."""

    OPEN = "open"  # it waits or runs
    DIED = "died"
    SUCCEEDED = "succeeded"


class Seed(NamedTuple):
    """The count with which a redriven message begins; see `Letters.seed`."""

    key: MessageKey
    deliveries: int
    last: Delivery


class QueueEntry(NamedTuple):
    """The entry of a broker's queue that a letter becomes."""

    letter_id: str  # Id of the letter
    position: str  # Its position
    reason: bytes  # Its reason
    fingerprint: bytes  # Its fingerprint
    list_key: bytes  # Key of the queue in the broker's database
    entry: str | bytes  # The message as the broker's transport writes it
    seed: Seed | None = None  # The count with which the message begins; `None` for 0


RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]
"""Entries as (position, raw fields in storage form); nothing is decoded."""
