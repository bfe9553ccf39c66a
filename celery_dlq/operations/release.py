"""Held messages: the queues that keep them, and their release as a job."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import CorruptLetter, DLQError, NotFound, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import iso
from celery_dlq.letters.redaction import Redaction
from celery_dlq.operations.job import FAILED, INTERRUPTED, WAITING, CancelledError, Job, JobRun
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, released
from celery_dlq.operations.redrive.redrive import carried_out
from celery_dlq.operations.redrive.select import Progress, RawEntry
from celery_dlq.operations.redrive.work import RedriveReport, RedriveWork
from celery_dlq.store.holds import MOST_HELD, Hold
from celery_dlq.store.records import QueueSummary
from celery_dlq.transport.publications import broker_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dlq.operations.jobs import Jobs
    from celery_dlq.operations.redrive.message import Prepared

logger = get_logger("celery_dlq.worker")

OPENED_AGAIN = (
    "the circuit breaker has opened again: the other messages stay held, and it releases them once "
    "its probes succeed"
)
"""Why a release ends before its end."""


class ReleaseWork(RedriveWork):
    """The messages of a hold, which go back as they came."""

    def __init__(self, jobs: Jobs, run: JobRun) -> None:
        super().__init__(jobs, run, jobs.backend.held)
        self._looked_at = float("-inf")
        if self.options.limit is not None:
            # An unreadable entry at the head would be all that a limit, or a probe, ever meets.
            self._takes = self._is_readable

    def message(self, found: RawEntry, now: datetime) -> Outgoing:  # noqa: ARG002 - nothing is timed
        """The message as it was held."""
        return released(found, self.options.marker)

    def published(self, done: Sequence[Prepared]) -> None:
        """Nothing: a released message is no redriven letter."""

    def reason_of_loss(self, found: RawEntry) -> str:
        """Ends it once its circuit breaker opens again: workers would hold the messages."""
        marker, instructions = self.options.marker, self._jobs.backend.instructions
        if marker and time.monotonic() - self._looked_at > timing.current.release_look:
            self._looked_at, now = time.monotonic(), instructions.now()
            for hold in instructions.of(Hold):
                ours = hold.id == self.run.job.queue
                if ours and hold.in_force(now) and not hold.admits(marker):
                    self.run.update(note=OPENED_AGAIN)
                    raise CancelledError
        return super().reason_of_loss(found)

    def _is_readable(self, found: RawEntry) -> bool:
        try:
            released(found)
        except CorruptLetter:
            return False
        return True


def release(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> RedriveReport:
    """Send the messages of a hold back to their queues, as they came."""
    return carried_out(ReleaseWork(jobs, run), progress, scanned)


def new_release(jobs: Jobs, hold_id: str, options: RedriveOptions) -> JobRun:
    """Make a job that releases held messages; the caller says which ones."""
    return jobs.make("release", hold_id, LetterFilter(), options)


def release_probe(jobs: Jobs, hold_id: str, marker: str) -> int:
    """Release the oldest message of a circuit breaker's hold; return how many were (0 or 1).

    Not listed as a job: there is one every few seconds for as long as it is open.
    """
    options = RedriveOptions(limit=1, marker=marker)
    run = jobs.make("release", hold_id, LetterFilter(), options, listed=False)
    return release(jobs, run, None, None).done


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessages:
    """A hold and its messages."""

    hold: Hold  # The hold
    # `holding`; of a circuit breaker `open` or `releasing`; `full`: it has `MOST_HELD`
    # messages, and workers do not consume the queues of the next ones; `ended`: it takes no more
    state: str
    held: int  # Number of its messages
    oldest_at: datetime | None = None  # When it took the oldest of them
    # Messages that ran because their arguments, for which it asks, cannot be read
    unread: int = 0

    def shown(self, redaction: Redaction) -> HeldMessages:
        """These as people may see them: the hold's conditions and reason may quote messages."""
        return replace(self, hold=redaction.shown(self.hold, "where", "reason"))

    @property
    def problem(self) -> str:
        """What endangers messages now: a circuit breaker that is not closed; empty if none is."""
        circuit = self.hold.circuit
        if circuit is None:
            return ""
        return (
            f"The circuit breaker of {circuit.task} is {self.state}: {self.held:,} messages of "
            f"{circuit.queue} are held. {self.hold.reason}"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: the attributes of the hold, and these."""
        others = {"state": self.state, "held": self.held, "oldest_at": iso(self.oldest_at)}
        return {**self.hold.to_json(), **others, "unread": self.unread}


class HeldQueues:
    """The holds of an app, and the queues of their messages."""

    def __init__(self, jobs: Jobs) -> None:
        self._store = jobs.backend.instructions
        self._held = jobs.backend.held
        self._jobs = jobs

    def broker(self) -> str:
        """The app's broker, as holds name it."""
        return broker_name(self._jobs.app)

    def held_messages(self) -> list[HeldMessages]:
        """The holds that are in force, and those that have ended and still have messages."""
        now = self._store.now()
        queues = {queue.name: queue for queue in self._held.overviews.queues()}
        found = [
            self._messages_of(hold, queues.pop(hold.id, None), now) for hold in self._store.of(Hold)
        ]
        # A worker that stood still for minutes put a message there: the hold itself is gone.
        gone = [Hold(id=name, since=now, until=now) for name in queues]
        found += [self._messages_of(hold, queues[hold.id], now) for hold in gone]
        return [one for one in found if one.held or one.hold.in_force(now)]

    def hold_by_id(self, hold_id: str) -> Hold:
        """A hold by its id."""
        holds = self._store.of(Hold)
        for hold in holds:
            if hold.id == hold_id:
                return hold
        if hold_id in self._held.names():
            now = self._store.now()
            return Hold(id=hold_id, since=now, until=now)
        known = ", ".join(hold.id for hold in holds) or "none"
        raise NotFound(f"expected the id of a hold, got {hold_id!r}; there are: {known}")

    def for_each(self, act: Callable[[Hold], object]) -> None:
        """Do something for each hold of the app's broker; an error of one stops no other."""
        for hold in self._store.of(Hold):
            if not self.is_ours(hold):
                continue
            try:
                act(hold)
            except StoreUnavailable:
                raise
            except DLQError as exc:
                logger.warning("The messages of %s wait: %s", hold.id, exc)
            except Exception:
                logger.exception("The messages of %s wait", hold.id)

    def is_ours(self, hold: Hold) -> bool:
        """True for a hold of the app's own broker."""
        return hold.broker in ("", self.broker())

    def length(self, hold: Hold) -> int:
        """The number of its messages."""
        return self._held.length(hold.id)

    def is_full(self, hold: Hold) -> bool:
        """True if workers put no more messages into it."""
        return self.length(hold) >= MOST_HELD

    def begin_release(self, run: JobRun, hold: Hold) -> None:
        """Let a release take the messages that are there now."""
        if run.job.until is None:
            run.update(until=self._held.last_position(hold.id), total=self.length(hold))

    def release_of(self, hold: Hold) -> Job | None:
        """The release of a hold that has ended; ``None`` if there is none, or not any more."""
        try:
            return None if hold.job is None else self._jobs.get(hold.job)
        except NotFound:
            return None

    def resumed(self, job: Job) -> JobRun | None:
        """A release whose process died, or that failed a while ago; ``None`` of another one."""
        since = self._store.now() - job.updated_at
        waits = job.state == FAILED and since > timing.current.release_retry
        if not waits and job.state not in (INTERRUPTED, WAITING):
            return None
        try:
            return self._jobs.begin_again(job.id)
        except DLQError:  # another worker was faster
            return None

    def _messages_of(self, hold: Hold, queue: QueueSummary | None, now: datetime) -> HeldMessages:
        held = queue.letters if queue else 0
        state = "holding" if hold.circuit is None else hold.circuit.state
        state = "ended" if not hold.in_force(now) else "full" if held >= MOST_HELD else state
        oldest_at = queue.oldest_at if queue else None
        return HeldMessages(hold=hold, state=state, held=held, oldest_at=oldest_at)
