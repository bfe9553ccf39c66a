"""The release of held messages, as a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.job import CancelledError, JobRun
from celery_dlq.operations.redrive.message import RedriveOptions, released
from celery_dlq.operations.redrive.redrive import Loss, Redrive
from celery_dlq.operations.redrive.select import Progress, RawEntry
from celery_dlq.operations.results import RedriveReport
from celery_dlq.store.instructions import Hold
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs

_LOOK_SECONDS = 0.5


def release(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> RedriveReport:
    """Send the messages of a hold back to their queues, as they came."""
    marker, loss = run.options.marker, jobs.checks.loss(None)
    if marker:
        loss = _while_admitted(jobs.backend, run.job.queue, marker, loss)
    return Redrive(
        jobs.app,
        jobs.backend.held,
        run,
        lambda found, _now: released(found, marker),
        clock=jobs.clock,
        loss=loss,
        # An unreadable entry at the head would be all that a limit, or a probe, ever meets.
        chooses=None if run.options.limit is None else _is_readable,
    ).redrive(progress, scanned)


def new_release(jobs: Jobs, hold_id: str, options: RedriveOptions) -> JobRun:
    """Make a job that releases held messages; the caller says which ones."""
    return jobs.make("release", hold_id, LetterFilter(), options)


def release_probe(jobs: Jobs, hold_id: str, marker: str) -> int:
    """Release the oldest message of a circuit breaker's hold; return how many were (0 or 1).

    Not listed as a job: there is one every few seconds for as long as it is open.
    """
    options = RedriveOptions(limit=1, marker=marker)
    run = jobs.make("release", hold_id, LetterFilter(), options, listed=False)
    report = release(jobs, run, None, None)
    return report.published + report.finished


def _while_admitted(backend: Store, hold_id: str, marker: str, loss: Loss) -> Loss:
    """End a release once its circuit breaker opens again: workers would hold the messages."""
    looked_at = float("-inf")

    def checked(found: RawEntry) -> str:
        nonlocal looked_at
        if time.monotonic() - looked_at > _LOOK_SECONDS:
            looked_at, now = time.monotonic(), backend.instructions.now()
            for hold in backend.instructions.of(Hold):
                if hold.id == hold_id and hold.in_force(now) and not hold.admits(marker):
                    raise CancelledError
        return loss(found)

    return checked


def _is_readable(found: RawEntry) -> bool:
    try:
        released(found)
    except CorruptLetter:
        return False
    return True
