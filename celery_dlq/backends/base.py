"""The contracts between the worker, the operations and the stores.

A `Backend` has all of them. Its implementations stand beside this module, including
the in-memory one, which ships and is tested by the same suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from celery_dlq.backends.reports import Reports
from celery_dlq.events import Change
from celery_dlq.metrics import MetricsStore
from celery_dlq.record import DeadLetter, Delivery, from_micros, to_micros

Clock = Callable[[], datetime]
"""Gives the present as an aware UTC datetime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKey:
    """What makes one message of a task: ``Task.retry()`` re-uses the task id.

    Attributes:
        dead_letter_queue: Where its letter would go; counters live beside the letters.
        task_id: The task's id.
        retries: The message's ``retries`` header.
        redrives: How often the message was redriven.
        nesting: How often ``Task.replace`` gave the id to another task before.
    """

    dead_letter_queue: str
    task_id: str
    retries: int = 0
    redrives: int = 0
    nesting: int = 0


class CountStatus(Enum):
    """What counting a delivery found."""

    COUNTED = "counted"
    LIMIT_REACHED = "limit_reached"  # nothing was counted
    RUNNING = "running"  # an earlier delivery runs on a live worker; nothing was counted
    UNCERTAIN = "uncertain"  # its worker may have died this moment; nothing was counted
    SUSPECT = "suspect"  # its last delivery vanished, and it must not run now; nothing was counted
    DEAD = "dead"  # its letter was stored before; nothing was counted


@dataclass(frozen=True, slots=True)
class Count:
    """The answer to a count.

    Attributes:
        status: What was found.
        number: The number of this delivery, or of the last one counted.
        suspect: The message's last delivery vanished: it may have killed its worker.
    """

    status: CountStatus
    number: int
    suspect: bool = field(default=False, compare=False)


class DeliveryCounter(Protocol):
    """Counts the deliveries of messages and remembers how each ended."""

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Count a delivery without waiting for the store's answer.

        Returns:
            Whether the mark is on the wire. What the store says to it is logged later.
        """

    def count(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        uncounted: int = 0,
        waited_seconds: float | None = None,
        alone: bool = True,
        unless_dead: bool = False,
    ) -> Count:
        """Count a delivery and wait for the answer.

        Args:
            key: The message.
            delivery: The start; its ``number`` is not looked at.
            limit: Most deliveries; at the limit nothing is counted.
            uncounted: Deliveries that could not be counted before, and are now.
            waited_seconds: How long ago this delivery was first put off; ``None`` if never.
            alone: Whether a message whose last delivery vanished may be counted now.
            unless_dead: Count only if its letter was not stored before. Not for new messages
                that re-use a task id.

        Raises:
            StoreUnavailable: The store does not answer.
        """

    def ended(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record how a delivery ended; with ``charged=False`` it no longer counts.

        A delivery without an outcome that is not charged never started: nothing is kept of it.
        Changes nothing if the start of this delivery is not on record. Never raises.
        """

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Forget a message that is done; may be put off to the next write.

        Another message that runs under the same task id keeps its count.

        Args:
            key: The message.
            delivery: Its last one.
            first: It was never delivered before, so earlier starts are another message's.
        """

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count that a message of a redrive succeeded; may be put off to the next write."""

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """All recorded deliveries of the task of this message, over its retries, oldest first.

        Raises:
            StoreUnavailable: The store does not answer.
        """

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
        """Send a heartbeat beside the counters of these queues; never raises."""

    def flush(self) -> None:
        """Send what was put off and read outstanding answers; never raises."""

    def close(self) -> None:
        """Flush and let go of connections; never raises."""


SUCCEEDED = "succeeded"
"""Stands in place of a reason in the sample of a message that succeeded."""


class Samples(Protocol):
    """Takes samples of messages that succeeded; bounded, and never in the way."""

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Note a sample in the storage form of a letter; sends nothing, never raises."""

    def flush(self) -> None:
        """Send what was noted, without waiting; what cannot be sent is lost; never raises."""


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


def ordered(position: str) -> tuple[int, ...]:
    """A position as numbers, which sort as letters were stored.

    Raises:
        ValueError: It is no position.
    """
    return tuple(int(part) for part in position.split("-"))


def stored_at(position: str) -> datetime | None:
    """When a letter was stored: its position in Redis begins with the milliseconds since 1970."""
    with suppress(ValueError, OverflowError):
        return from_micros(ordered(position)[0] * 1000)
    return None


def position_at(moment: datetime) -> str:
    """The position before which nothing is that was stored at or after a moment."""
    return f"{max(0, to_micros(moment) // 1000)}-0"


RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]
"""Positions and storage forms, nothing decoded."""


class ExportLease(NamedTuple):
    """Whose turn it is to export a queue to a place.

    Attributes:
        acquired: Whether it is the asker's.
        state: What was noted last if it is; else who has it, and until when.
    """

    acquired: bool
    state: str


@runtime_checkable
class ExportLeaseStore(Protocol):
    """What a store can do that all machines share: let one export at a time write to a place."""

    def export_lease(
        self,
        dead_letter_queue: str,
        what: Literal["take", "keep", "note", "end"],
        place: str,
        *,
        owner: str,
        lease_seconds: float,
        state: str = "",
    ) -> ExportLease:
        """Take the turn if it is free, keep it, note something if it is still ours, or end it.

        Args:
            dead_letter_queue: What is exported.
            what: What to do.
            place: Where the files go.
            owner: Who asks.
            lease_seconds: How long the turn is kept without a heartbeat.
            state: What to note; it is there for every later owner.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A letter that a dead-letter exchange must still get.

    Attributes:
        letter_id: The letter.
        exchange: The name of the exchange.
        routing_key: For the exchange.
    """

    letter_id: str
    exchange: str
    routing_key: str


class Outbox(Protocol):
    """Keeps entries until they are published. Every method may raise `StoreUnavailable`."""

    def add(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Keep a entry, due at once; the same one twice is one."""

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Notices that nobody tried to publish in the last ``lease_seconds``; tried now."""

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Forget entries: they are published."""

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those of some queues that have entries."""

    def waiting(self, dead_letter_queue: str) -> int:
        """How many entries are kept."""


class LetterOutbox(Protocol):
    """Keeps for a dead-letter exchange what it must get of a letter."""

    def add(self, letter: DeadLetter) -> None:
        """Keep it, if the letter's policy names an exchange. Called before the letter is stored.

        So whatever is killed between the two, the exchange still gets the letter.

        Raises:
            StoreUnavailable: The store does not answer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself to all processes of its app.

    Attributes:
        hostname: Its node name, e.g. ``celery@web-1``.
        pid: Its main process.
        version: Version of celery_dlq.
        started_at: When it started, aware UTC.
        queues: The queues it consumes.
        tasks: The names of its registered tasks.
        policies: Policy by queue or pattern, and by task as ``task:<name>``; JSON-ready.
    """

    hostname: str
    pid: int
    version: str
    started_at: datetime
    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One field of a queue's policy, changed at run time until a given moment.

    Attributes:
        queue: The queue, by its exact name.
        key: The policy key.
        value: Its value, JSON-ready; checked like a configured one.
        until: When the configured value comes back, aware UTC, by the store's clock.
        actor: Who set it.
    """

    queue: str
    key: str
    value: Any
    until: datetime
    actor: str


class WorkerRegistry(Protocol):
    """What the processes of one app tell each other. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """The present by the clock of the store, by which overrides end."""

    def register(self, info: WorkerInfo) -> None:
        """Put up a worker's info; it stays up while the worker gives heartbeats."""

    def heartbeat(self, hostname: str) -> tuple[bool, int]:
        """Give a worker's heartbeat.

        Returns:
            Whether its info is still up, and the revision of the overrides.
        """

    def deregister(self, hostname: str) -> None:
        """Take a worker's info down."""

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """The infos of live workers, by host name; much lighter without their tasks."""

    def record(self, change: Change) -> None:
        """Keep a change for the audit; the newest ten thousand are kept."""

    def changes(self, *, limit: int) -> list[Change]:
        """The newest changes, newest first."""

    def override(self, override: Override) -> None:
        """Put up an override; replaces an earlier one of the same field."""

    def lift(self, queue: str, key: str) -> bool:
        """Take an override down; whether there was one."""

    def overrides(self) -> list[Override]:
        """The overrides in force, by queue and key; those that ended are taken down."""


class JobStore(Protocol):
    """Keeps what is known of jobs, bounded. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """The present by the clock of the store, by which jobs fall silent."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Keep the state of a job; whether somebody wants it cancelled.

        The states of the five hundred newest jobs are kept.
        """

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """The state of a job, or ``None``."""

    def all(self) -> list[Mapping[str, Any]]:
        """The states of all jobs, newest first."""

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Want a job cancelled, or no more."""

    def succeeded(self, job_id: str) -> int:
        """How many messages of a redrive have succeeded, as far as guarded queues tell."""

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Become the one process that does this run of a job; whether nobody else has."""


class Backend(Protocol):
    """All that an app keeps: one object for each of its processes.

    Its parts share their connections, which are made when there is first something to send.

    Attributes:
        counter: Deliveries.
        letters: Dead letters.
        workers: Live workers, overrides of policies, and the audit.
        jobs: Redrives and discards.
        outbox: What dead-letter exchanges must still get.
        metrics: Counts of all processes.
        samples: Takes samples of messages that succeeded.
        sampled: The samples, read as letters are.
        reports: Decides which letters an error tracker is told of.
    """

    @property
    def counter(self) -> DeliveryCounter: ...  # noqa: D102 - see above
    @property
    def letters(self) -> DeadLetterStore: ...  # noqa: D102
    @property
    def workers(self) -> WorkerRegistry: ...  # noqa: D102
    @property
    def jobs(self) -> JobStore: ...  # noqa: D102
    @property
    def outbox(self) -> Outbox: ...  # noqa: D102
    @property
    def metrics(self) -> MetricsStore: ...  # noqa: D102
    @property
    def samples(self) -> Samples: ...  # noqa: D102
    @property
    def sampled(self) -> DeadLetterStore: ...  # noqa: D102
    @property
    def reports(self) -> Reports: ...  # noqa: D102

    def separate(self) -> Backend:
        """The same place over connections of its own, for another thread or process.

        Connections to a broker serve one thread, and a forked process must not share any.
        In memory there is nothing to separate: it is the same object.
        """

    def close(self) -> None:
        """Let go of all connections; what is used afterwards opens them again. Never raises."""
