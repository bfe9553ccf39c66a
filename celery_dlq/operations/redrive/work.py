"""What a redrive works on: its letters, their messages, and the report of what became of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, DLQError, RedriveError
from celery_dlq.events import Redriven, whoami
from celery_dlq.letters.headers import PUBLICATION_HEADER, REPLACED_TASK_NESTING, whole_number
from celery_dlq.letters.links import is_in_chord
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.letters.record import Delivery, from_micros
from celery_dlq.operations.edit import Edit, editing
from celery_dlq.operations.job import counts_of
from celery_dlq.operations.redrive.checks import deliveries_of, targets_of, used_up, waits_of
from celery_dlq.operations.redrive.message import Outgoing, Prepared, RedriveOptions, outgoing
from celery_dlq.operations.redrive.select import Progress, RawEntry, Source, redriven, without
from celery_dlq.policies.table import of_whole_queues
from celery_dlq.store.claims import ClaimState
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import Seed
from celery_dlq.store.worker_records import MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dlq.operations.job import JobRun
    from celery_dlq.operations.jobs import Jobs

TAKEN = (ClaimState.CLAIMED, ClaimState.RECLAIMED)
"""Letters that are ours."""

_MAX_FAILURES_LISTED = 1000
_MOST_FAILED = 20
_MAX_ERROR_CHARS = 300
_REFUSED_PER_BEAT = 500
_SLOW_SECONDS = 0.25  # of a look at the broker, after which the job must show that it lives
_COUNTS = (
    *("published", "finished", "maybe_twice", "skipped", "gone"),
    *("chords", "corrupt", "failures", "refused"),
)


@dataclass(slots=True)
class RedriveReport:
    """The result of a redrive, in numbers of letters.

    Attributes:
        redrive_id: Id of the redrive and of its job, also in the header ``dlq_redrive`` of every
            message.
        published: Published, then removed.
        finished: Published by an interrupted redrive; now only removed.
        maybe_twice: Number of messages that may be there once more than the other numbers say:
            they were published although an interrupted redrive may have published them before, or
            the broker's reply to an earlier attempt was lost. Their header ``dlq_letter``
            identifies the copies.
        skipped: Claimed by another operator, or gone.
        gone: Of those skipped, how many were gone: redriven, discarded or trimmed by others.
        corrupt: Entries that are no letters; skipped.
        failed: Errors by letter id, for letters whose message the broker did not take; they
            stay. The first 1,000 are listed.
        failures: Number of all such letters.
        chords: Messages that are parts of chords: such a chord fails, and its body does not run.
        doubtful: Of those failures, how many the broker may have taken nevertheless.
        refused: Number of letters that stay because their message would be lost.
        refused_by: Such letters by queue or task, with the reason. The first 1,000 are listed.
        canary: Result of the canary, if there was one: numbers of letters, the ids of the
            ``holds`` that have some, and the ``verdict`` (``passed``, ``died again``, ``held``,
            ``not finished`` or ``nothing tried``).
        state: ``done``, ``cancelled``, ``stopped`` (by the canary), ``failed`` (the broker
            refused every batch, or blocks publishers) or ``interrupted`` (another process goes
            on with the job).
        note: Why it ended so, e.g. by whom it was cancelled.
    """

    redrive_id: str
    published: int = 0
    finished: int = 0
    maybe_twice: int = 0
    skipped: int = 0
    gone: int = 0
    corrupt: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    chords: int = 0
    doubtful: int = 0
    refused: int = 0
    refused_by: dict[str, int] = field(default_factory=dict)
    canary: dict[str, Any] | None = None
    state: str = "done"
    note: str = ""

    @property
    def done(self) -> int:
        """Number of letters whose message the broker has."""
        return self.published + self.finished

    @property
    def touched(self) -> int:
        """Number of letters processed."""
        return self.done + self.skipped + self.corrupt + self.failures

    def counts(self) -> dict[str, int]:
        """The numbers, for the job."""
        return {name: getattr(self, name) for name in _COUNTS}

    def first_failures(self) -> dict[str, str]:
        """The first errors, short, for the job."""
        first = islice(self.failed.items(), _MOST_FAILED)
        return {key: shortened(one_line(error), _MAX_ERROR_CHARS) for key, error in first}

    def record_failure(self, letter_id: str, error: str) -> None:
        """Record a letter that stays."""
        self.failures += 1
        if len(self.failed) < _MAX_FAILURES_LISTED:
            self.failed[letter_id] = error

    def record_refusal(self, why: str) -> None:
        """Record a letter that stays because its message would be lost."""
        self.refused += 1
        if why in self.refused_by or len(self.refused_by) < _MAX_FAILURES_LISTED:
            self.refused_by[why] = self.refused_by.get(why, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class RedriveWork:
    """The letters of one redrive and their messages; a release has others."""

    def __init__(self, jobs: Jobs, run: JobRun, store: Source) -> None:
        self.run = run
        self.app = jobs.app
        self.store = store
        self.deaths: Letters = jobs.backend.letters  # where letters come that die again
        self.options: RedriveOptions = run.options
        self.report = RedriveReport(redrive_id=run.job.id, **self._earlier())
        self.backend = jobs.backend
        self.watched: list[Outgoing] | None = None  # what was published, while it is watched
        # Notes a message that is about to be published, and its letter
        self.note: Callable[[MessageKey, str], object] = lambda _key, _letter_id: None
        self._jobs = jobs
        self._targets = None if self.options.force else targets_of(jobs, self.options.to_queue)
        self._takes: Callable[[RawEntry], bool] | None = None
        # Who subscribes later is shown the letters of the next redrive.
        self._shows_letters = jobs.events.wanted(Redriven)

    # -- for the ways to redrive a batch ------------------------------------------

    def send_heartbeat(self, position: str | None = None) -> None:
        """Send the job's heartbeat, with the results so far; see `JobRun.send_heartbeat`."""
        self.run.send_heartbeat(self.report.counts(), position, failed=self.report.first_failures())

    def prepared(self, batch: Sequence[RawEntry]) -> Iterator[Prepared]:
        """The messages of letters; counts those that have none."""
        now = self._jobs.clock()
        for found in batch:
            try:
                message = self.message(found, now)
                seed = self._seed_of(found, message) if self.options.keep_count else None
            except CorruptLetter:
                self.report.corrupt += 1
            except RedriveError as exc:
                self.report.record_failure(found.key, str(exc))
            else:
                if self.watched is not None:  # it may be executed as soon as it is published
                    key = self.key_of(message)
                    self.note(key, found.key)
                    self.store.claims.watch_messages([key])
                yield Prepared(found, message, seed)

    def published(self, done: Sequence[Prepared]) -> None:
        """Make known that the broker has messages; decode letters only if somebody subscribed."""
        if self.watched is not None:
            self.watched += [prepared.message for prepared in done]
        self._jobs.measuring.redriven(self.run.job.queue, len(done))
        if not self._shows_letters:
            return
        for each in done:
            with suppress(CorruptLetter):
                letter = each.found.letter()
                self._jobs.events.emit(
                    Redriven(at=self._jobs.clock(), letter=letter, redrive_id=self.run.job.id)
                )

    def key_of(self, message: Outgoing) -> MessageKey:
        """The key under which the redriven message is counted."""
        came_from = self.run.job.queue if self.options.to_queue is None else None
        task = str(message.headers.get("task"))
        return MessageKey(
            dead_letter_queue=self._jobs.policies.counted_in(came_from, message.queue, task),
            task_id=message.task_id,
            redrives=message.redrives,
            nesting=whole_number(message.headers.get(REPLACED_TASK_NESTING)),
            publication=str(message.headers.get(PUBLICATION_HEADER, "")),
        )

    def matching_holds(self, messages: Sequence[tuple[MessageKey, Outgoing | None]]) -> list[str]:
        """The ids of the holds that have some of these messages."""
        return [name for each in waits_of(self._jobs) for name in each.have(messages)]

    # -- letters ------------------------------------------------------------------

    def selected(self, scanned: Progress | None = None, gone: Progress = id) -> Iterator[RawEntry]:
        """The letters of the job that are left; ``gone`` gets the number of others in files."""
        found = self.run.selected(self.store, self.send_heartbeat, scanned)
        if self.options.files:
            found = without(found, partial(self.store.claims.gone, self.run.job.queue), gone)
        return found if self._takes is None else filter(self._takes, found)

    def safe_entries(self, found: Iterable[RawEntry]) -> Iterator[RawEntry]:
        """The letters whose messages would not be lost; counts the others, which stay."""
        for one in found:
            began = time.monotonic()
            why = self.reason_of_loss(one)
            if self.run.is_begun and time.monotonic() - began > _SLOW_SECONDS:
                self.send_heartbeat()
            if not why:
                yield one
                continue
            self.report.record_refusal(why)
            if not self.report.refused % _REFUSED_PER_BEAT:
                self.run.send_heartbeat(self.report.counts())

    def skip_gone(self, letters: int) -> None:
        """Count letters of files that were redriven before."""
        self.report.gone += letters
        self.report.skipped += letters

    def message(self, found: RawEntry, now: datetime) -> Outgoing:
        """The message that a letter becomes."""
        raise NotImplementedError

    def reason_of_loss(self, found: RawEntry) -> str:
        """Why a letter stays; empty if it does not."""
        return "" if self._targets is None else self._targets.reason_of_loss(found)

    # -- counts -------------------------------------------------------------------

    def _earlier(self) -> dict[str, Any]:
        """The results of earlier runs of the job, whose processes may have been killed."""
        job = self.run.job
        counts = counts_of(job, self.store.claims) if job.run > 1 else job.counts
        return {name: int(counts.get(name, 0)) for name in _COUNTS}

    def _seed_of(self, found: RawEntry, message: Outgoing) -> Seed | None:
        """The count of earlier deliveries; forced, one less than its limit, or it would not run."""
        deliveries, limit = deliveries_of(found)
        if limit:
            deliveries = min(deliveries, limit - 1)
        if deliveries <= 0:
            return None
        return Seed(self.key_of(message), deliveries, _last_delivery(found))


class LettersWork(RedriveWork):
    """The letters of a redrive or an edit."""

    def __init__(self, jobs: Jobs, run: JobRun) -> None:
        super().__init__(jobs, run, jobs.source(run))
        self._edited = None if run.change is None else edited_by(jobs, run.change)
        if self._targets is not None:
            self._targets.refuse_target()
        if self.options.due is not None:
            self._takes = self._due_by_policy()

    def message(self, found: RawEntry, now: datetime) -> Outgoing:
        """The original message, perhaps edited."""
        fields = found.fields
        if self.options.files and b"body" not in fields:
            raise RedriveError(f"the file of letter {found.key} lacks its body")
        self.report.chords += is_in_chord(
            fields.get(b"content_type", b""), fields.get(b"body", b"")
        )
        job = self.run.job  # its last heartbeat was by the clock of Redis, just now
        message = outgoing(
            found, self.options, redrive_id=job.id, redriven_at=job.updated_at, now=now
        )
        return message if self._edited is None else self._edited(message)

    def reason_of_loss(self, found: RawEntry) -> str:
        """Also of a letter that has no delivery left: a kept count bounds."""
        keeps = self.options.keep_count and not self.options.force
        return (keeps and used_up(found)) or super().reason_of_loss(found)

    def _due_by_policy(self) -> Callable[[RawEntry], bool]:
        """Which letters a job takes that a policy made; the policy may have changed since."""
        table, queue = self._jobs.policies.in_force(), self.run.job.queue
        policy = None if table.never_trims(queue) else table.of_dead_letter_queue(queue)
        if policy is not None:
            for takes in redriven(policy, of_whole_queues(), self.options.due):
                return takes
        raise DLQError("the policy of the queue has changed since it made this job")


def edited_by(jobs: Jobs, edit: Edit, actor: str = "") -> Callable[[Outgoing], Outgoing]:
    """A function that applies an edit; values that people cannot see stay as they are."""
    redaction = jobs.settings.redaction
    return editing(edit, actor=actor or whoami(), now=jobs.clock(), redaction=redaction)


def _last_delivery(found: RawEntry) -> Delivery:
    try:
        history = found.letter().history
    except CorruptLetter:
        history = ()
    if history:
        return history[-1]
    died = from_micros(int(found.fields.get(b"dead_lettered_at", b"0")))
    return Delivery(
        number=1,
        started_at=died,
        ended_at=died,
        worker_hostname=found.text("worker_hostname"),
        release=found.text("release") or None,
    )
