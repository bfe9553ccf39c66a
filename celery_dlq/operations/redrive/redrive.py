"""Redrive: publish the original messages of letters again, then remove the letters.

1. The letters are selected, oldest first, up to the newest of when the job was made.
2. Those whose messages would be lost stay, and are counted by what they lack.
3. A canary, if there is one, redrives a few of them and watches how they end.
4. The others go in batches: in one step where broker and letters share a Redis database
   (`one_step`), with claims elsewhere (`claimed`).
5. After each batch the job's heartbeat saves the results, and the position up to which all is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from celery_dlq.errors import BrokerUnavailable
from celery_dlq.events import Action
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.job import FAILED, STOPPED, CancelledError, JobRun
from celery_dlq.operations.redrive.canary import chosen, watch
from celery_dlq.operations.redrive.claimed import Claimed
from celery_dlq.operations.redrive.message import Canary
from celery_dlq.operations.redrive.one_step import OneStep
from celery_dlq.operations.redrive.publisher import GrowingPace, Pace, Publisher
from celery_dlq.operations.redrive.select import Progress, RawEntry, batches, select
from celery_dlq.operations.redrive.work import LettersWork, RedriveReport, Work

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs

_MAX_REFUSED_BATCHES = 20
MOST_AT_ONCE = 100


class _BrokerGoneError(Exception):
    """The broker refused many batches in a row; raised instead of claiming more letters."""


def redrive(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> RedriveReport:
    """Redrive the letters of a job; see `DeadLetters.redrive`."""
    report = carried_out(LettersWork(jobs, run), progress, scanned)
    if run.job.kind == "edit" and report.done:
        (letter_id,) = run.where.ids or ("",)
        changed = {"redrive": report.redrive_id, "changed": list(run.options.changed)}
        jobs.record(Action.EDITED, run.job.queue, {"letter": letter_id, **changed}, letters=1)
    return report


def carried_out(work: Work, progress: Progress | None, scanned: Progress | None) -> RedriveReport:
    """Publish the messages of letters and remove the letters."""
    report, canary, limit = work.report, work.options.canary, work.options.limit
    with Publisher(work.app) as publisher:
        claimed = Claimed(work, publisher)
        way = OneStep.of(work, publisher, claimed) or claimed
        try:
            if canary is not None and not canary.passed and not _canary(work, way, canary):
                report.state = STOPPED
            else:
                left = None if limit is None else max(0, limit - report.touched)
                _all(work, way, islice(work.safe(work.selected(scanned)), left), progress)
        except CancelledError as exc:
            report.state = exc.state
        except (_BrokerGoneError, BrokerUnavailable):
            report.state = FAILED
        finally:
            way.close()
        claimed.wait()
    work.run.tell(failed=report.first_failures())
    return report


def _all(
    work: Work, way: OneStep | Claimed, found: Iterable[RawEntry], progress: Progress | None
) -> None:
    report, rate = work.report, work.options.rate
    if work.options.growing:
        pace: Pace = GrowingPace(work.beat)
        parts = _growing(found, pace)
    else:
        pace = Pace(rate, work.beat)
        most = way.batch_size if rate is None else max(1, min(MOST_AT_ONCE, int(rate)))
        parts = batches(found, most, way.max_bytes)
    refusals, settled = 0, work.run.job.position
    for batch in parts:
        work.beat()
        pace.wait(len(batch))  # before the claim, whose lease is short
        before = report.done
        way.start(batch)
        work.beat(settled)  # of a batch that is still on its way, nothing is certain
        settled = batch[-1].position
        refusals = refusals + 1 if report.done == before and report.failures else 0
        if refusals >= _MAX_REFUSED_BATCHES:
            raise _BrokerGoneError
        if progress is not None:
            progress(len(batch))
    way.wait()


def _growing(found: Iterable[RawEntry], pace: Pace) -> Iterator[list[RawEntry]]:
    """Batches of what may be published within about a second."""
    entries = iter(found)
    while batch := list(islice(entries, max(1, min(MOST_AT_ONCE, int(pace.rate or 1))))):
        yield batch


def _canary(work: Work, way: OneStep | Claimed, canary: Canary) -> bool:
    """Redrive a few letters and watch them; true to continue."""
    letters = min(canary.letters, work.options.limit or canary.letters)
    few = chosen((one for one in work.selected() if not work.loss(one)), letters)
    if not few:
        return True
    work.beat()
    work.watched = []
    only = LetterFilter(ids=frozenset(few))
    found = select(work.store, work.run.job.queue, only)
    for batch in batches(found, way.batch_size, way.max_bytes):
        way.start(batch)
    way.wait()
    messages, work.watched = work.watched, None
    return watch(work, [(work.key_of(message), message) for message in messages], canary)
