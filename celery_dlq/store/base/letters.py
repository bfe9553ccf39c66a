"""Storing, reading, claiming and removing dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from celery_dlq.letters.record import DeadLetter, Delivery
from celery_dlq.store.base.counting import MessageKey
from celery_dlq.store.base.exports import ExportLeaseStore
from celery_dlq.store.base.notes import OPEN_GROUP, GroupStatus


class Stored(Enum):
    """Result of storing a letter."""

    NEW = 1
    REGRESSED = 2  # new, and its group was resolved
    ALREADY_THERE = 0


class ClaimState(Enum):
    """State of a letter after an operation tried to claim it."""

    CLAIMED = "claimed"  # the caller has it; it was never published
    RECLAIMED = "reclaimed"  # the caller has it; an earlier operation may have published it
    PUBLISHED = "published"  # the caller has it; it was published and is only to be removed
    HELD = "held"  # another operation has it
    GONE = "gone"  # there is no such letter


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
    memory_bytes: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
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
            The last hour is still running. In Redis, removed letters are included.
        last_hour: Letters stored in the last hour, to five minutes. The same holds.
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
    releases: Sequence[str] = ()
    status: GroupStatus = field(default=OPEN_GROUP, compare=False)


GroupOrder = Literal["letters", "newest"]
"""Order of groups: the largest first, or the last seen first."""


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
    # `DeadLetterStore.ended`
    dead_lettered_at: datetime | None
    stored_at: datetime | None  # When it was stored, by the store's clock; `None` if unknown


class Restored(Enum):
    """Result of restoring a letter from the bin."""

    RESTORED = "restored"
    NOT_THERE = "not_there"
    TAKEN = "taken"  # the queue has another letter of this id


class RedriveOutcome(Enum):
    """Outcome of a watched redriven message."""

    OPEN = "open"  # it waits or runs
    DIED = "died"
    SUCCEEDED = "succeeded"


class Seed(NamedTuple):
    """The count with which a redriven message begins; see `DeadLetterStore.seed`."""

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


class RedriveCall(Protocol):
    """A call of `DeadLetterStore.redrive`. It does nothing twice, however often it is made."""

    def send(self) -> None:
        """Send the call and do not wait; never raises for a failure of the store."""

    def states(self) -> list[ClaimState] | None:
        """Wait for the states in which the letters were found; make the call if need be."""


RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]
"""Entries as (position, raw fields in storage form); nothing is decoded."""


class DeadLetterStore(ExportLeaseStore, Protocol):
    """Stores the letters of dead-letter queues.

    Every method may raise `StoreUnavailable`.
    An *entry* may be something other than a letter, put into the queue by another program; it
    has a position but no id. Methods that take letter ids accept a position in its place.
    """

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check that letters can be stored here; leaves nothing behind."""

    def now(self) -> datetime:
        """Return the current time by the store's clock, by which letters age and leases end."""

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter and delete the message's counters, in one atomic step.

        A letter whose id is there already is not stored again.
        The first letter of a resolved group makes it regressed; see `GroupStatus.ended_by`.
        """

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """Return one letter, or ``None``."""

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """Return the first of the given queues that has this letter, or ``None``."""

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Find letters whose ids begin with a prefix; reads ids only where it can."""

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """Iterate over all letters, reading bounded pages.

        Letters that arrive meanwhile are left out: the end is fixed at the first page.
        Entries that are not readable letters are skipped and logged.
        """

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None,
        until: str | None,
        page_size: int,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Iterate over raw pages, bounded in entries and bytes; includes entries of any kind."""

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Return the position and raw fields of one entry, or ``None``."""

    def position_at(self, moment: datetime) -> str:
        """Return a lower bound: every letter before it was stored before the moment."""

    def last_position(self, dead_letter_queue: str) -> str | None:
        """Return the position of the newest letter ever stored, or ``None``."""

    def stored_ever(self, dead_letter_queue: str) -> int | None:
        """Return how many letters were ever stored, a restored one again; ``None`` if unknown."""

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """Return the entries stored first, after a position.

        At most ``most``; may be fewer, but is empty only at the end.
        """

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Return at most ``most`` letters whose messages have expired since they were stored."""

    def length(self, dead_letter_queue: str) -> int:
        """Return the number of letters in a queue."""

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Record that all letters up to a position are durably in files; never moves back.

        Only for exports without a filter: they leave no letter out.
        """

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """Return the position up to and including which letters were exported, or ``None``.

        Also ``None`` if the queue ends before that position: it was deleted and made anew, or
        a fail-over lost its end, so what was exported of it is unknown.
        """

    def names(self) -> list[str]:
        """Return the names of all dead-letter queues that ever had a letter, sorted."""

    def queues(self) -> list[QueueSummary]:
        """Return a summary of every dead-letter queue, by name."""

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """Return a `Glance` at each of the given queues."""

    def groups(
        self, dead_letter_queue: str, *, most: int | None = None, by: GroupOrder = "letters"
    ) -> list[Group]:
        """Return at most ``most`` groups of a queue, in an order."""

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group | None:
        """Return the group of a fingerprint, or ``None``.

        Where letters are in Redis, also one of the newest 1,000 groups whose last letter left, for
        `KEPT_DAYS`.
        """

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters for an operation, so that no two operations take the same letter.

        Idempotent: a repetition by the same owner returns the same states.
        """

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Record that the broker confirmed the messages of letters that this owner claimed."""

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give back this owner's claims, except on published letters.

        With ``doubtful`` the next owner gets `ClaimState.RECLAIMED`: the messages may have been
        published.
        """

    def marker(self) -> str | None:
        """Write a key that expires after a minute, and return its name.

        A broker's client that sees the key reaches the same database. ``None`` if letters are
        never kept in a broker's database.
        """

    def redrive(
        self,
        dead_letter_queue: str,
        entries: Sequence[QueueEntry],
        *,
        job_id: str,
        owner: str,
        previous_run_prefix: str = "",
    ) -> RedriveCall | None:
        """Publish the messages of letters and remove the letters, in one atomic step.

        Only if the letters are in the broker's database; see `marker`. No letter has to be
        claimed before; the claims of others are respected as by `claim`.
        """

    def redriven(self, dead_letter_queue: str, job_id: str) -> Mapping[ClaimState, int]:
        """Return how many letters `redrive` has found in each state for a job.

        Exact, also if the job's process was killed before it had counted them.
        """

    def remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], *, owner: str | None = None
    ) -> int:
        """Remove letters and their claims; return the number of letters removed.

        With ``owner`` only letters that it has claimed, which makes a repetition harmless.
        """

    def discard(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str,
        keep_seconds: float,
    ) -> int:
        """Move letters that ``owner`` has claimed to the bin, to be kept for ``keep_seconds``."""

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Put a discarded letter back as the newest of its queue, in one atomic step."""

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those of the given queues whose bin is not empty."""

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """Iterate over raw pages of the bin, newest first.

        The field ``~key`` holds the id that `restore` takes.
        """

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Mark messages that are about to be redriven, for `outcomes`."""

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Return the outcomes of watched messages, in the order of the keys."""

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Set the count with which a redriven message begins; called before it is published."""

    def close(self) -> None:
        """Close connections. Never raises."""
