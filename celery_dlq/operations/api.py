"""Redriving and editing letters; the jobs and the audit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from celery_dlq.events import Change
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.job import REDRIVES, Job
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.reading import Progress, Reading
from celery_dlq.operations.redrive.checks import redrive_options
from celery_dlq.operations.redrive.dry_run import DryRun, dry_run, refuse_lost
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.redrive.redrive import died_again
from celery_dlq.operations.results import RedriveReport
from celery_dlq.operations.running import Running
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Operations:
    """Redrives and edits letters; shows and cancels jobs, and shows the audit.

    The methods are those of `DeadLetters`, which describes the arguments that they share.
    """

    def __init__(self, backend: Store, reading: Reading, running: Running) -> None:
        self._store = backend.letters
        self._registry = backend.workers
        self._jobs = Jobs(backend.jobs)
        self._successes = backend.jobs.succeeded
        self._reading = reading
        self._running = running
        self._checks = running.checks

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
        **fields: Unpack[FilterFields],
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
        """
        where = filter_of(where, fields)
        options = redrive_options(
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
        self._checks.check_target(to_queue)
        self._reading.check_queue(dead_letter_queue)
        run = self._running.new("redrive", dead_letter_queue, where, options)
        report: RedriveReport = self._running.run(run, progress, scanned)
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
        """
        options = redrive_options(
            to_queue=to_queue, delay=delay, new_id=new_id, keep_count=keep_count, force=force
        )
        queue, found = self._reading.entry(letter_id, dead_letter_queue)
        change_kept = self._checks.check_edit(change, found, options)
        if not force:
            refuse_lost(dry_run([found], self._checks.targets(to_queue)))
        where = LetterFilter(ids=frozenset({found.key}))
        options["changed"] = change.paths()
        run = self._running.new("edit", queue, where, options, change_kept)
        report: RedriveReport = self._running.run(run, edit=change)
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
        **fields: Unpack[FilterFields],
    ) -> DryRun:
        """Report what a redrive would do, and whether its queues and tasks exist."""
        RedriveOptions(limit=limit, to_queue=to_queue)  # checks them
        self._checks.check_target(to_queue)
        found = self._reading.entries(
            dead_letter_queue, where, limit=limit, scanned=scanned, **fields
        )
        return dry_run(found, self._checks.targets(to_queue))

    # -- jobs and audit -----------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs, newest first; at least the newest 500 are kept, and at most 50 plans."""
        return self._jobs.all()

    def job(self, job_id: str) -> Job:
        """One job; for a redrive also how many of its messages ``died_again`` and ``succeeded``.

        A new letter's header names the redrive of its message. Workers count successes, on
        guarded queues only.
        """
        job = self._jobs.get(job_id)
        if job.kind not in REDRIVES or not job.run:
            return job
        died = sum(1 for _ in died_again(self._store, job))
        ends = {"died_again": died, "succeeded": self._successes(job_id)}
        return replace(job, counts={**job.counts, **ends})

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch; no letter is left half done."""
        return self._jobs.cancel(job_id)

    def changes(self, limit: int = 100) -> list[Change]:
        """The audit, newest first: who changed what; the newest 10,000 changes are kept."""
        return self._registry.changes(limit=limit)
