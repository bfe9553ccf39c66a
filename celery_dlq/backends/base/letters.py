"""How dead letters are kept, claimed and removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Protocol

from celery_dlq.backends.base.counting import MessageKey
from celery_dlq.record import DeadLetter, Delivery


class Stored(Enum):
    """What storing a letter did."""

    NEW = 1
    ALREADY_THERE = 0


class ClaimState(Enum):
    """What a claim says of a letter."""

    CLAIMED = "claimed"  # ours now, never published before
    RECLAIMED = "reclaimed"  # a redrive died with it: it may have been published
    PUBLISHED = "published"  # a redrive died after publishing it: only removal is left
    HELD = "held"  # another redrive has it
    GONE = "gone"  # no such letter any more


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSummary:
    """One dead-letter queue at a glance."""

    name: str
    letters: int
    oldest_at: datetime | None = None
    newest_at: datetime | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    last_hour: int = field(default=0, compare=False)  # letters that were stored in the last hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What tells whether retention has anything to do in a queue.

    Attributes:
        name: The dead-letter queue.
        at: The moment of looking, by the store's clock.
        letters: How many it has.
        oldest_stored_at: When the first of them was stored, by the same clock.
        first_end_at: When the first message of them expires, or did.
    """

    name: str
    at: datetime
    letters: int
    oldest_stored_at: datetime | None
    first_end_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The letters of one fingerprint."""

    fingerprint: str
    letters: int
    task_name: str
    reason: str
    exception_type: str | None
    first_seen_at: datetime
    last_seen_at: datetime
    example_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLetter:
    """A letter and its place in the store: an opaque, strictly increasing position."""

    position: str
    letter: DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSummary:
    """What retention looks at.

    Attributes:
        position: Where the letter is.
        letter_id: Which one.
        dead_lettered_at: When it died, as its worker's clock says; ``None``: it is no letter.
        stored_at: When it was stored, by the store's clock; ``None`` if nothing tells.
    """

    position: str
    letter_id: str
    dead_lettered_at: datetime | None
    stored_at: datetime | None


class Restored(Enum):
    """What taking a letter out of the bin did."""

    RESTORED = "restored"
    NOT_THERE = "not_there"
    TAKEN = "taken"  # the queue has a letter of this id again


class RedriveOutcome(Enum):
    """What became of a redriven message that is watched."""

    OPEN = "open"  # it waits, or runs
    DIED = "died"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do by its nature; declared on its class.

    Attributes:
        random_access: One letter is found, and the oldest ones are, without reading all.
        overviews: `DeadLetterStore.queues` knows ages and reasons; else only lengths.
        bin: Discarded letters are kept for some time, and can be restored.
        tells_twins: Storing a letter again says so. Else there are two copies, seen as one.
        most_letters: How many letters of a queue can be read; ``None`` for any number.
    """

    random_access: bool = True
    overviews: bool = True
    bin: bool = True
    tells_twins: bool = True
    most_letters: int | None = None


RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]
"""Positions and storage forms, nothing decoded."""


class DeadLetterStore(Protocol):
    """Keeps the letters of dead-letter queues. Every method may raise `StoreUnavailable`.

    What a store cannot do raises `NotSupported`.

    Attributes:
        capabilities: What it can do.
    """

    capabilities: Capabilities

    def check(self) -> None:
        """Do nothing but answer."""

    def now(self) -> datetime:
        """The present by the store's clock, which decides about everybody's letters."""

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter and forget the message's counters, in one atomic step.

        Idempotent: a letter with the id of one that is there changes nothing.
        """

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter, or ``None``."""

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """The first of some queues that has a letter of this id, or an entry at this position."""

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Letters of some queues whose ids begin with a text; reads ids only.

        Returns:
            Queues and ids, at most ``most``.
        """

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """All letters, read in bounded pages while the caller iterates.

        Letters that arrive meanwhile are left out: the end is fixed at the first page.
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
        """Raw pages of (position, fields), nothing decoded; bounded in letters and bytes.

        Entries that are no letters are among them, with whatever fields they have.

        Args:
            dead_letter_queue: Its name.
            after: Leave out everything up to here; ``None`` for nothing.
            until: The last position taken; ``None`` for the newest one now.
            page_size: Most letters a page.
            newest_first: The order.
        """

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Position and raw fields of one letter, or of the entry at a position; or ``None``."""

    def position_at(self, moment: datetime) -> str:
        """A position before which nothing is that was stored at or after a moment."""

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The position of the newest letter ever stored, or ``None``."""

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """As `last_position`, but before the first letter that is still on its way.

        Nothing is stored at or before it any more: who has read so far need not look again.
        """

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """The letters stored first, at most ``most``, or fewer if they are large."""

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Letters whose messages have expired since they were stored, at most ``most``."""

    def length(self, dead_letter_queue: str) -> int:
        """How many letters are there."""

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Note that all letters up to a position are durably in files; never moves back.

        Only an export that leaves nothing out may say so: no filter chose its letters.
        """

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """Up to which position, itself included, letters were exported; ``None`` if never.

        Also ``None`` where the queue ends before the noted position: it was deleted and made
        anew, or a fail-over took its end, and nothing says what of it was exported.
        """

    def names(self) -> list[str]:
        """The names of all dead-letter queues that ever had a letter, sorted."""

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues at a glance, by name."""

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """What retention asks about some queues, before it looks into one."""

    def groups(self, dead_letter_queue: str, *, most: int | None = None) -> list[Group]:
        """The groups of a queue, largest first; at most ``most``."""

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters for an operation, so that no two take one letter.

        Asked twice by one owner, the answer is the same.

        Args:
            dead_letter_queue: Its name.
            letter_ids: Letter ids, or positions of entries that are no letters.
            owner: Who claims; another one for each process of an operation.
            lease_seconds: For how long.
            previous_run_prefix: Owners whose names begin so are known to have died.
        """

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Note that the broker has confirmed the messages of letters that this owner claimed."""

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give claims back that were not used.

        With ``doubtful``, the next owner is told that the message may have been published.
        """

    def remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], *, owner: str | None = None
    ) -> int:
        """Remove letters with their claims; returns how many were there.

        With ``owner``, only letters that it has claimed: then a repetition does no harm.
        """

    def discard(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str,
        keep_seconds: float,
    ) -> int:
        """As `remove`, but into the bin, where they are kept for some time."""

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Put a discarded letter back, as the newest one, in one atomic step."""

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those of some queues whose bin has something."""

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """Raw pages of the bin, newest first."""

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Remember messages that are about to be redriven, so that `outcomes` can tell of them."""

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """What became of messages that are watched."""

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Let a message that is about to be redriven begin with deliveries it had before.

        Args:
            key: The redriven message.
            deliveries: How many count.
            last: The last of them; its ``number`` is not looked at.
        """

    def done(self) -> None:
        """Hear that an operation is over, which claimed or removed letters; never raises.

        A store that holds a queue meanwhile gives it back.
        """

    def close(self) -> None:
        """Let go of connections; never raises."""
