"""Operations that change letters: redrive, edit, discard, trim; their jobs and the audit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from celery_dlq.backends.base import Backend, Clock, Restored
from celery_dlq.config import Settings
from celery_dlq.errors import CorruptLetter, DLQError, NotFound, NotSupported
from celery_dlq.events import Action, Change, Events, Redriven, on_behalf_of, whoami
from celery_dlq.filters import LetterFilter
from celery_dlq.metrics import Measuring
from celery_dlq.operations.auto_redrive import AutoRedrives, Due
from celery_dlq.operations.canary import Canary
from celery_dlq.operations.discard import Discarder, DiscardOptions
from celery_dlq.operations.dry_run import Check, DryRun, Targets, dry_run, refuse_lost
from celery_dlq.operations.edit import MAX_CHANGE_CHARS, Edit, arguments, edited
from celery_dlq.operations.job import DONE, FAILED, RUNNING, STOPPED, WAITING, Job
from celery_dlq.operations.jobs import CancelledError, JobRun, Jobs
from celery_dlq.operations.message import Outgoing, RedriveOptions, outgoing, released
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.preview import Preview, dry_run_of
from celery_dlq.operations.publisher import broker_name
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX, Progress, Reading
from celery_dlq.operations.redrive import Loss, Redriver, died_again, first_failures
from celery_dlq.operations.results import DiscardReport, RedriveReport
from celery_dlq.operations.retention import Retention
from celery_dlq.operations.selection import PositionRange, RawEntry, select
from celery_dlq.policies.table import PolicyTable
from celery_dlq.redaction.masking import Redaction

_MAX_DISCARDED_SCANNED = 100_000  # per queue, to complete the prefix of an id
_PREVIEW_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_REDRIVES = ("redrive", "edit")
_PLANNED = (*_REDRIVES, "discard", "purge")
_ACTIONS = {
    "redrive": Action.REDRIVEN,
    "edit": Action.REDRIVEN,
    "discard": Action.DISCARDED,
    "purge": Action.PURGED,
    "release": Action.RELEASED,
}


class Operations:
    """Redrives, edits and discards letters; safe against crashes and other operators.

    The methods are those of `DeadLetters`, which describes the arguments that they share.

    Args:
        app: The Celery app.
        settings: Its checked settings.
        backend: Keeps letters, jobs and the audit.
        reading: Finds the letters.
        policies: Knows the policies in force.
        events: Receives every redriven letter and every change.
        measuring: Counts redriven letters.
        clock: Returns the present, aware UTC.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        backend: Backend,
        reading: Reading,
        policies: PolicyAdmin,
        *,
        events: Events,
        measuring: Measuring,
        clock: Clock,
    ) -> None:
        self._app = app
        self._settings = settings
        self._store = backend.letters
        self._held = backend.held
        self._holds = backend.holds
        self._registry = backend.workers
        self._jobs = Jobs(backend.jobs)
        self._successes = backend.jobs.succeeded
        self._reading = reading
        self._policies = policies
        self._events = events
        self._measuring = measuring
        self._clock = clock

    # -- redriving ----------------------------------------------------------------

    def redrive(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        rate: float | None = None,
        limit: int | None = None,
        to_queue: str | None = None,
        delay: float | timedelta = 0,
        new_id: bool = False,
        keep_count: bool = False,
        force: bool = False,
        canary: int | None = None,
        max_failures: int = 0,
        canary_wait: float | timedelta = 60,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> RedriveReport:
        """Publish the original messages of letters again, then remove the letters.

        Exactly once where the letters are in the database of the Redis broker: each is published
        and removed in one step. Elsewhere at least once: after a crash between publishing and
        removing, the next redrive publishes no letter that is known to be published. One batch may
        be uncertain; its letters are published and counted in ``maybe_twice``. Letters that arrive
        during the redrive are not touched.

        A message that would be lost is not published: its letter stays, and the report counts it
        by name under ``refused_by``. Lost means that its queue is neither on the broker nor known
        to anybody, or that no live worker that consumes the queue has its task. The others are
        redriven. If ``to_queue`` is such a queue, nothing is. Each queue and task is checked
        once, when its first letter is met.

        Args:
            rate: At most this many letters per second; ``None`` for no limit.
            to_queue: Publish to this queue instead of each message's own.
            delay: Seconds, or a timedelta, before the messages may run.
            new_id: Give each task a new id.
            keep_count: Count earlier deliveries: a message is executed once more, then as
                often as its ``max_deliveries`` has left.
            force: Publish also what would be lost; the job and the audit have it.
            canary: First redrive this many letters, taken from all groups in turn, and watch
                how they end.
            max_failures: Continue if at most this many letters of the canary die again or do
                not end in time.
            canary_wait: Seconds, or a timedelta, to watch the canary.

        Raises:
            NotFound: The queue does not exist.
            StoreUnavailable: The store does not answer.
            RedriveError: All messages would be lost in ``to_queue``.
            DLQError: An option or a field of the filter is not usable.
        """
        where = where or LetterFilter(**fields)
        options = _redrive_options(
            rate=rate,
            limit=limit,
            to_queue=to_queue,
            delay=delay,
            new_id=new_id,
            keep_count=keep_count,
            force=force,
            canary=canary,
            max_failures=max_failures,
            canary_wait=canary_wait,
        )
        self._check_target(to_queue)
        self._reading.check_queue(dead_letter_queue)
        run = self._new_job("redrive", dead_letter_queue, where, options)
        report: RedriveReport = self._run(run, progress, scanned)
        return report

    def edit(
        self,
        letter_id: str,
        change: Edit,
        dead_letter_queue: str | None = None,
        *,
        to_queue: str | None = None,
        delay: float | timedelta = 0,
        new_id: bool = False,
        keep_count: bool = False,
        force: bool = False,
    ) -> RedriveReport:
        """Change the arguments of one letter's message, and redrive it.

        The header ``dlq_edited`` records who changed what, when, and the old values. If the
        message dies again, the new letter has it too. The options are those of `redrive`.

        Args:
            letter_id: As for `get`.
            change: The change.
            dead_letter_queue: The letter's queue; ``None`` searches all queues.

        Raises:
            NotFound: The letter does not exist.
            DLQError: Its body is not plain JSON, or the change does not fit it.
            RedriveError: The message would be lost.
            StoreUnavailable: The store does not answer.
        """
        options = _redrive_options(
            to_queue=to_queue, delay=delay, new_id=new_id, keep_count=keep_count, force=force
        )
        queue, found = self._reading.entry(letter_id, dead_letter_queue)
        change_kept = self._check_edit(change, found, options)
        if not force:
            refuse_lost(dry_run([found], self._targets(to_queue)))
        where = LetterFilter(ids=frozenset({found.key}))
        options["changed"] = change.paths()
        run = self._new_job("edit", queue, where, options, change_kept)
        report: RedriveReport = self._run(run, edit=change)
        return report

    def dry_run(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        to_queue: str | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> DryRun:
        """Report what a redrive would do, and whether its queues and tasks exist.

        Raises:
            NotFound: The queue does not exist.
            StoreUnavailable: The store does not answer.
        """
        RedriveOptions(limit=limit, to_queue=to_queue)  # checks them
        self._check_target(to_queue)
        found = self._reading.entries(
            dead_letter_queue, where, limit=limit, scanned=scanned, **fields
        )
        return dry_run(found, self._targets(to_queue))

    # -- discarding ---------------------------------------------------------------

    def discard(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        forever: bool = False,
        limit: int | None = None,
        export_first: str | Path | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> DiscardReport:
        """Remove letters from their queue; `restore` puts them back within 24 hours.

        Args:
            forever: Remove them permanently.
            export_first: Write them to this Parquet file first, or to a new file in this folder.

        Raises:
            NotFound: The queue does not exist.
            ExportError: The file cannot be written; nothing was removed.
            StoreUnavailable: The store does not answer.
            DLQError: An option or a field of the filter is not usable.
        """
        return self._discard(
            "discard",
            dead_letter_queue,
            where or LetterFilter(**fields),
            DiscardOptions(forever=forever, limit=limit),
            export_first,
            progress,
            scanned,
        )

    def purge(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        export_first: str | Path | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> DiscardReport:
        """Remove letters permanently: `discard` with ``forever``; the audit names it a purge."""
        return self._discard(
            "purge",
            dead_letter_queue,
            where or LetterFilter(**fields),
            DiscardOptions(forever=True, limit=limit),
            export_first,
            progress,
            scanned,
        )

    def restore(self, letter_id: str, dead_letter_queue: str | None = None) -> str:
        """Put a discarded letter back, as the newest of its queue.

        Args:
            letter_id: The letter's id, or a prefix of 6 characters or more.
            dead_letter_queue: Its queue; ``None`` searches the bins of all queues.

        Returns:
            The name of its queue.

        Raises:
            NotFound: No bin has the letter, or the prefix fits several discarded letters.
            DLQError: The queue has a letter with this id again.
            StoreUnavailable: The store does not answer.
        """
        self._check_bin()
        if dead_letter_queue is not None:
            self._reading.check_queue(dead_letter_queue)
        names = [dead_letter_queue] if dead_letter_queue else self._store.names()
        names = self._store.binned(names)
        if SHORTEST_PREFIX <= len(letter_id) < ID_LENGTH:
            letter_id = self._discarded_id(names, letter_id)
        for name in names:
            restored = self._store.restore(name, letter_id)
            if restored is Restored.TAKEN:
                raise DLQError(
                    f"{name} has a letter {letter_id} again, because its message died again; "
                    f"the discarded letter stays in the bin"
                )
            if restored is Restored.RESTORED:
                self._record(Action.RESTORED, name, 1, {"letter": letter_id})
                return name
        raise NotFound(
            f"no bin has a letter with the id {letter_id!r}; discarded letters stay there 24 hours"
        )

    def discarded(self, dead_letter_queue: str) -> Iterator[RawEntry]:
        """The letters in the bin of a queue, newest first."""
        self._reading.check_queue(dead_letter_queue)
        self._check_bin()
        for page in self._store.discarded(dead_letter_queue):
            for position, fields in page:
                kept = dict(fields)
                key = kept.pop(b"~key", b"").decode("utf-8", "replace")
                found = RawEntry(position, kept)
                found.key = key or found.key
                yield found

    def trim(self, *dead_letter_queues: str, dry_run: bool = False) -> list[Change]:
        """Remove letters past ``dead_letter_ttl`` or over ``dead_letter_max_length`` now.

        Workers trim on their own; call this for queues that no worker consumes.

        Args:
            *dead_letter_queues: The queues to trim; none for all.
            dry_run: Return what the next pass would trim, up to 500 letters per queue and
                cause, and change nothing.

        Returns:
            One change per queue and cause.

        Raises:
            NotFound: A queue does not exist.
            StoreUnavailable: The store does not answer.
        """
        for name in dead_letter_queues:
            self._reading.check_queue(name)
        table = self._policies.in_force()
        retention = Retention(self._store, self._registry, self._events, whoami())
        names = dead_letter_queues or self._store.names()
        policies = {name: table.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        return [change for n, p in policies.items() for change in retention.trim_all(n, p)]

    # -- plans --------------------------------------------------------------------

    def plan(
        self,
        /,
        kind: str,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        change: Edit | None = None,
        force: bool = False,
        seconds: float = _PREVIEW_SECONDS,
        **options: Any,
    ) -> Job:
        """Make a dry run and keep it as a job, which `start` starts within 15 minutes.

        The job works on the letters that match now: those that go meanwhile are left out and
        counted in its note, those that arrive are not touched. The newest 50 plans are kept.

        Args:
            kind: ``redrive``, ``edit``, ``discard`` or ``purge``.
            where: The letters; ``None`` for all. For an edit, the id of one letter.
            change: The change of an edit.
            force: Publish also what would be lost.
            seconds: Time for the dry run; after it, the plan counts *at least* so many letters.
            **options: As of the method with the name of the kind.

        Returns:
            The plan; its ``preview`` has what the dry run found.

        Raises:
            NotFound: The queue or letter does not exist.
            NotSupported: The store has no bin.
            StoreUnavailable: The store does not answer.
            DLQError: The kind, an option or the change is not usable.
        """
        where = where or LetterFilter()
        self._reading.check_queue(dead_letter_queue)
        kept, text = self._planned_options(kind, options), ""
        if kind == "edit":
            if change is None or len(where.ids or ()) != 1:
                raise DLQError("expected a change and the id of one letter, to edit it")
            (letter_id,) = where.ids or ("",)
            _, found = self._reading.entry(letter_id, dead_letter_queue)
            text = self._check_edit(change, found, kept)
            if not text:
                raise DLQError(
                    f"expected a change of at most {MAX_CHANGE_CHARS:,} characters of JSON, got "
                    f"a longer one; change single values by their paths"
                )
            where = LetterFilter(ids=frozenset({found.key}))
            kept["changed"] = change.paths()
        if force and kind in _REDRIVES:
            kept["force"] = True
        job = self._new_job(kind, dead_letter_queue, where, kept, text).job
        try:
            return self._jobs.plan(self._previewed(job, where, seconds))
        finally:
            self._store.done()  # who runs it needs the queue

    def start(self, job_id: str, *, at: datetime | None = None) -> Job:
        """Let a plan wait for a process that runs jobs: a worker, `dlq web`, or your own.

        Whoever calls it second, or clicks twice, gets the same job. What would be lost is looked
        for again when it is run.

        Args:
            job_id: The plan.
            at: Aware time, by the store's clock, before which it is not run; ``None`` for none.

        Raises:
            NotFound: The job does not exist.
            DLQError: The plan has expired, or the time is past.
            RedriveError: All its messages would be lost, and it was made without ``force``.
        """
        return self._jobs.start(job_id, _refuse_lost, at)

    def edited_arguments(self, job_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """``args`` and ``kwargs`` of a letter before and after an edit that is planned.

        Raises:
            NotFound: The job or the letter does not exist (any more).
            DLQError: The job is no edit.
        """
        job = self._jobs.get(job_id)
        if not job.change:
            raise DLQError(f"expected a planned edit, got job {job_id}, a {job.kind}")
        (letter_id,) = job.filter["ids"]
        _, found = self._reading.entry(letter_id, job.queue)
        apply = self._edited(Edit.from_text(job.change), job.actor)
        before = self._message(found, job.options)
        after = apply(self._message(found, job.options))
        return _arguments(before), _arguments(after)

    # -- releasing ----------------------------------------------------------------

    def new_release(self, hold_id: str, options: Mapping[str, Any]) -> JobRun:
        """Make a job that releases held messages; for `Holds`, which says which ones."""
        return self._jobs.new(
            "release",
            hold_id,
            where={},
            options=options,
            until=None,
            total=None,
            broker=self._broker(),
        )

    def release_probe(self, hold_id: str, marker: str) -> int:
        """Release the oldest message of a circuit breaker's hold; return how many were (0 or 1).

        Not listed as a job: there is one every few seconds for as long as it is open.
        """
        options = {"limit": 1, "marker": marker}
        run = self._jobs.unlisted("release", hold_id, options=options)
        report = self._release(run, None, None)
        return report.published + report.finished

    def run_release(
        self, run: JobRun, progress: Progress | None = None, scanned: Progress | None = None
    ) -> RedriveReport:
        """Run such a job."""
        report: RedriveReport = self._run(run, progress, scanned)
        return report

    # -- jobs and audit -----------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs, newest first; at least the newest 500 are kept, and at most 50 plans."""
        return self._jobs.all()

    def job(self, job_id: str) -> Job:
        """One job; for a redrive also how many of its messages ``died_again`` and ``succeeded``.

        A new letter's header names the redrive of its message. Workers count successes, on
        guarded queues only.

        Raises:
            NotFound: The job does not exist.
        """
        job = self._jobs.get(job_id)
        if job.kind not in ("redrive", "edit") or not job.run:
            return job
        if job.state == RUNNING and not self._store.capabilities.random_access:
            return job  # it has locked the queue
        died = sum(1 for _ in died_again(self._store, job))
        ends = {"died_again": died, "succeeded": self._successes(job_id)}
        return replace(job, counts={**job.counts, **ends})

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch; no letter is left half done.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job has ended.
        """
        return self._jobs.cancel(job_id)

    def resume(
        self,
        job_id: str,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport | DiscardReport:
        """Continue a job here whose process died, or that waits, was cancelled or stopped.

        A redrive that has not passed its canary starts with a new canary.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job is planned, running or done, or is an edit whose change was too
                long to be kept.
        """
        self._check_change(self._jobs.get(job_id))
        report: RedriveReport | DiscardReport = self._run(
            self._jobs.again(job_id), progress, scanned
        )
        return report

    def resume_in_background(self, job_id: str) -> Job:
        """Like `resume`, but by a process that runs jobs; also from there if it has ended.

        Returns:
            The job, which waits; unchanged if it waits or runs already.

        Raises:
            NotFound: The job does not exist.
            DLQError: As `resume`.
        """
        self._check_change(self._jobs.get(job_id))
        return self._jobs.wait_again(job_id)

    def run_next(self, stopping: Callable[[], bool]) -> Job | None:
        """Run the job that waits longest, on behalf of who started it; for `Runner`.

        Args:
            stopping: Asked between batches; once it is true, the job waits for the next process.

        Returns:
            The job as it ended; ``None`` if none waits.
        """
        run = self._jobs.next_run(self._may_run)
        if run is None:
            return None
        run.stopping = stopping
        with on_behalf_of(run.job.actor):
            self._run(run)
        return run.job

    def redrive_due(
        self, table: PolicyTable, stopping: Callable[[], bool]
    ) -> Generator[Job, None, None]:
        """Redrive what is due by the policy key ``auto_redrive``; yields each job when it ended.

        Args:
            table: The policies in force.
            stopping: As for `run_next`.

        Raises:
            StoreUnavailable: The store does not answer.
        """

        def new_job(queue: str, options: Mapping[str, Any]) -> JobRun:
            return self._new_job("redrive", queue, LetterFilter(), options)

        due = AutoRedrives(self._store, self._jobs, new_job, self._run)
        return due.due(table.auto_redrive_of, stopping)

    def _may_run(self, job: Job) -> bool:
        """False for a job of a later version, of another broker, or with a file elsewhere."""
        return (
            job.kind in _ACTIONS
            and job.broker in ("", self._broker())
            and ("export_path" not in job.options or job.host == socket.gethostname())
        )

    def _broker(self) -> str:
        """The broker of this process, as a job names it: two hosts may call it differently."""
        return broker_name(self._app)

    def changes(self, limit: int = 100) -> list[Change]:
        """The audit, newest first: who changed what; the newest 10,000 changes are kept."""
        return self._registry.changes(limit=limit)

    # -- internals ----------------------------------------------------------------

    def _discarded_id(self, names: Sequence[str], prefix: str) -> str:
        """The only id in the bins with this prefix; the prefix itself if there is none."""
        found: set[str] = set()
        for name in names:
            for entry in islice(self.discarded(name), _MAX_DISCARDED_SCANNED):
                if entry.key.startswith(prefix):
                    found.add(entry.key)
                if len(found) > 1:
                    raise NotFound(
                        f"several discarded letters have an id that begins with {prefix!r}: "
                        f"{', '.join(sorted(found))}; give more characters"
                    )
        return found.pop() if found else prefix

    def _redriver(self) -> Redriver:
        return Redriver(
            self._app,
            self._store,
            self._clock,
            counted_in=self._policies.counted_in,
            confirmed=self._redriven,
        )

    def _redriven(self, queue: str, found: Sequence[RawEntry], redrive_id: str) -> None:
        """Count a published batch; decode its letters only if somebody subscribed."""
        self._measuring.redriven(queue, len(found))
        if not self._events.wanted(Redriven):
            return
        for each in found:
            with suppress(CorruptLetter):
                self._events.emit(
                    Redriven(at=self._clock(), letter=each.letter(), redrive_id=redrive_id)
                )

    def _run(
        self,
        run: JobRun,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        *,
        edit: Edit | None = None,
    ) -> Any:
        """Run a job, planned or not; for an edit whose change the job does not keep, pass it."""
        action = _ACTIONS[run.job.kind]
        report: RedriveReport | DiscardReport
        try:
            with _noting(self, run, action):
                if run.job.kind == "release":
                    report = self._release(run, progress, scanned)
                elif run.job.kind in _REDRIVES:
                    report = self._redrive(run, progress, scanned, edit)
                else:
                    report = Discarder(self._store).discard(
                        run,
                        LetterFilter.from_json(run.job.filter),
                        DiscardOptions.from_json(run.job.options),
                        progress=progress,
                        scanned=scanned,
                    )
        finally:
            self._store.done()
            self._measuring.close()
        self._ended(run, report, action)
        return report

    def _redrive(
        self,
        run: JobRun,
        progress: Progress | None,
        scanned: Progress | None,
        edit: Edit | None,
    ) -> RedriveReport:
        job, transform = run.job, None
        where = LetterFilter.from_json(job.filter)
        if job.kind == "edit":
            edit = edit or Edit.from_text(job.change)
            transform = self._edited(edit)
        options = RedriveOptions.from_json(job.options)
        if "due" in job.options and not self._policies.in_force().auto_redrive_of(job.queue):
            raise DLQError("the policy of the queue has no auto_redrive any more")
        report = self._redriver().redrive(
            run,
            where,
            options,
            canary=Canary.from_json(job.options.get("canary")),
            transform=transform,
            loss=None if options.force else self._loss(options.to_queue),
            due=Due.from_json(job.options.get("due")),
            progress=progress,
            scanned=scanned,
        )
        run.tell(failed=first_failures(report))
        if job.kind == "edit" and report.published + report.finished:
            (letter_id,) = where.ids or ("",)
            changed = {
                "letter": letter_id,
                "redrive": report.redrive_id,
                "changed": job.options.get("changed", []),
            }
            self._record(Action.EDITED, job.queue, 1, changed)
        return report

    def _release(
        self, run: JobRun, progress: Progress | None, scanned: Progress | None
    ) -> RedriveReport:
        marker, loss = str(run.job.options.get("marker", "")), self._loss(None)
        if marker:
            loss = self._while_admitted(run.job.queue, marker, loss)
        message_of = partial(released, marker=marker)
        return Redriver(self._app, self._held, self._clock, message_of=message_of).redrive(
            run,
            LetterFilter(),
            RedriveOptions.from_json(run.job.options),
            loss=loss,
            progress=progress,
            scanned=scanned,
        )

    def _while_admitted(self, hold_id: str, marker: str, loss: Loss) -> Loss:
        """End a release once its circuit breaker opens again: workers would hold the messages."""
        looked_at = float("-inf")

        def checked(found: RawEntry) -> str:
            nonlocal looked_at
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                looked_at, now = time.monotonic(), self._holds.now()
                for hold in self._holds.all():
                    if hold.id == hold_id and hold.in_force(now) and not hold.admits(marker):
                        raise CancelledError
            return loss(found)

        return checked

    def _discard(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: DiscardOptions,
        export_first: str | Path | None,
        progress: Progress | None,
        scanned: Progress | None,
    ) -> DiscardReport:
        self._reading.check_queue(queue)
        if not options.forever:
            self._check_bin()
        run = self._new_job(kind, queue, where, options.to_json())
        if export_first is not None:
            path = _parquet_path(Path(export_first), run.job.id)
            options = replace(options, export_path=str(path.absolute()))
            run.tell(options=options.to_json())
        report: DiscardReport = self._run(run, progress, scanned)
        return report

    def _planned_options(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if kind in _REDRIVES:
            kept = _redrive_options(**options)
            self._check_target(kept.get("to_queue"))
            return kept
        if kind not in _PLANNED:
            raise DLQError(f"expected a kind of job ({', '.join(_PLANNED)}), got {kind!r}")
        removal = DiscardOptions(**{**options, **({"forever": True} if kind == "purge" else {})})
        if not removal.forever:
            self._check_bin()
        return removal.to_json()

    def _previewed(self, job: Job, where: LetterFilter, seconds: float) -> Job:
        """A job with what a dry run finds, and the number of its letters."""
        limit, span = job.options.get("limit"), PositionRange(until=job.until)

        def matching(scanned: Progress) -> Iterator[RawEntry]:
            found = select(self._store, job.queue, where, span=span, scanned=scanned)
            return islice(found, limit)

        preview = Preview(matching, seconds=seconds)
        if job.kind in _REDRIVES:
            seen = dry_run(preview.entries(), self._targets(job.options.get("to_queue")))
        else:
            seen = preview.removal()
        total = seen.letters + seen.corrupt if preview.exact else job.total
        if total is not None and limit is not None:
            total = min(total, limit)
        return replace(job, preview=preview.to_json(seen), total=total)

    def _check_change(self, job: Job) -> None:
        if job.kind == "edit" and not job.change:
            raise DLQError(
                f"job {job.id} is an edit that was too long to be kept, so it cannot be resumed; "
                f"edit the letter again"
            )

    def _check_edit(self, change: Edit, found: RawEntry, options: Mapping[str, Any]) -> str:
        """Apply an edit, to see if it fits; return it as its job keeps it, empty if too long."""
        self._check_target(options.get("to_queue"))
        message = self._message(found, options)
        self._edited(change)(message)
        text = change.to_text()
        return text if len(text) <= MAX_CHANGE_CHARS else ""

    def _edited(self, change: Edit, actor: str | None = None) -> Callable[[Outgoing], Outgoing]:
        """A function that applies an edit; values that people cannot see stay as they are."""
        redaction = Redaction.of(self._settings)
        return edited(change, actor=actor or whoami(), now=self._clock(), redaction=redaction)

    def _message(self, found: RawEntry, options: Mapping[str, Any]) -> Outgoing:
        return outgoing(found, RedriveOptions.from_json(options), redrive_id="", now=self._clock())

    def _new_job(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: Mapping[str, Any],
        change: str = "",
    ) -> JobRun:
        total: int | None = None
        if where.ids is not None:
            total = len(where.ids)
        elif not where:
            total = self._store.length(queue)
        return self._jobs.new(
            kind,
            queue,
            where=where.to_json(),
            options=options,
            until=self._store.last_position(queue),
            total=total,
            change=change,
            broker=self._broker() if kind in _REDRIVES else "",
        )

    def _ended(self, run: JobRun, report: RedriveReport | DiscardReport, action: Action) -> None:
        if not run.begun:
            return  # nothing matched
        counts = _numbers(report.to_json())
        note = ""
        if isinstance(report, RedriveReport) and report.state in (STOPPED, FAILED):
            note = "the canary died" if report.state == STOPPED else "the broker took nothing"
        elif report.state == DONE and run.job.preview.get("exact") and run.job.run == 1:
            gone = (run.job.total or 0) - report.touched
            note = f"{gone:,} of the {run.job.total:,} planned letters had gone" if gone > 0 else ""
        if run.end(report.state, counts, note).state != WAITING:
            self._record_job(run, action, counts)

    def _record_job(self, run: JobRun, action: Action, counts: Mapping[str, int]) -> None:
        done = counts.get("published", 0) + counts.get("finished", 0) + counts.get("removed", 0)
        detail = {
            "job": run.job.id,
            "state": run.job.state,
            "filter": _short_filter(run.job.filter),
            "options": dict(run.job.options),
            "counts": {name: count for name, count in counts.items() if count},
        }
        self._record(action, run.job.queue, done, detail)

    def _record(self, action: Action, target: str, letters: int, detail: Mapping[str, Any]) -> None:
        change = Change(
            at=self._clock(),
            action=action,
            actor=whoami(),
            target=target,
            letters=letters,
            detail=detail,
        )
        self._registry.record(change)
        self._events.emit(change)

    def _targets(self, to_queue: str | None) -> Targets:
        """The queues and tasks of a redrive."""
        return Targets(
            self._app,
            self._registry.workers(),
            configured=self._policies.configured_queues(),
            guarded=self._policies.guarded_queues(),
            to_queue=to_queue,
        )

    def _loss(self, to_queue: str | None) -> Callable[[RawEntry], str]:
        """What says why the message of a letter would be lost.

        Raises:
            RedriveError: All would be, because nobody knows the queue.
        """
        targets = self._targets(to_queue)
        if to_queue is not None:
            there, why = targets.queue(to_queue)
            check = Check(name=to_queue, letters=0, found=there, why=why)
            refuse_lost(DryRun(queues=(check,)))
        return targets.loss

    def _check_target(self, to_queue: str | None) -> None:
        if to_queue is None:
            return
        if to_queue in self._store.names() or self._policies.is_dead_letter_queue(to_queue):
            raise DLQError(
                f"expected to_queue to be a queue of tasks, got the dead-letter queue {to_queue!r}"
            )

    def _check_bin(self) -> None:
        if not self._store.capabilities.bin:
            raise NotSupported(
                f"expected a store that keeps discarded letters for 24 hours, got dlq_store = "
                f"{self._settings.store!r}, which has no bin; use --forever (or purge), and "
                f"--export-first to keep a copy"
            )


class _noting:  # noqa: N801 - used as a context manager only
    """Records the result of a job that ends with an error or Ctrl-C."""

    def __init__(self, operator: Operations, run: JobRun, action: Action) -> None:
        self._operator, self._run, self._action = operator, run, action

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, *_: object
    ) -> None:
        if exc is None or not self._run.begun:
            return
        counts = dict(self._run.job.counts)
        with suppress(DLQError):  # the first error is the one to raise
            self._run.end(FAILED, counts, f"{type(exc).__name__}: {exc}"[:500])
            self._operator._record_job(self._run, self._action, counts)  # noqa: SLF001 - its part


def _refuse_lost(job: Job) -> None:
    """Refuse a plan of which nothing would be left; else the letters that would be lost stay."""
    plan = dry_run_of(job.preview)
    lost = (
        sum(check.letters for check in checks if check.found is False)
        for checks in (plan.queues, plan.tasks)
    )
    if job.kind in _REDRIVES and plan.letters and max(lost) >= plan.letters:
        refuse_lost(plan, force=bool(job.options.get("force")))


def _arguments(message: Outgoing) -> dict[str, Any]:
    args, kwargs, _links = arguments(message.content_type, message.body, message.headers)
    return {"args": args, "kwargs": kwargs}


def _redrive_options(
    *,
    delay: float | timedelta = 0,
    canary: int | None = None,
    max_failures: int = 0,
    canary_wait: float | timedelta = 60,
    **options: Any,
) -> dict[str, Any]:
    """The checked options of a redrive, as its job keeps them."""
    kept = RedriveOptions(delay_seconds=_seconds(delay), **options).to_json()
    if canary is not None:
        wait_seconds = _seconds(canary_wait)
        trial = Canary(letters=canary, max_failures=max_failures, wait_seconds=wait_seconds)
        kept["canary"] = trial.to_json()
    return kept


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _numbers(report: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: value
        for name, value in report.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _short_filter(where: Mapping[str, Any], max_ids: int = 20) -> dict[str, Any]:
    short = dict(where)
    if len(short.get("ids", ())) > max_ids:
        short["ids"] = [*short["ids"][:max_ids], f"and {len(short['ids']) - max_ids} more"]
    return short


def _parquet_path(path: Path, job_id: str) -> Path:
    if path.suffix != ".parquet":
        path /= f"discarded-{job_id}.parquet"
    if path.exists():
        raise DLQError(
            f"expected {path} to be a new file, got one that exists; choose another name"
        )
    return path
