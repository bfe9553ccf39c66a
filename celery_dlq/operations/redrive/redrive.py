"""Redrive: publish the original messages of letters again, then remove the letters.

1. The letters are selected, oldest first, up to the newest of when the job was made.
2. Those whose messages would be lost stay, and are counted by what they lack.
3. A canary, if there is one, redrives a few of them and watches how they end.
4. The others go in batches: in one step where broker and letters share a Redis server
   (`one_step`), with claims elsewhere (`claimed`).
5. After each batch the job's heartbeat saves the results, and the position up to which all is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.job import FAILED, STOPPED, CancelledError, JobRun
from celery_dlq.operations.redrive.claimed import ByClaims
from celery_dlq.operations.redrive.message import Canary, Outgoing
from celery_dlq.operations.redrive.one_step import OneStep
from celery_dlq.operations.redrive.publisher import GrowingPace, Pace, Publisher
from celery_dlq.operations.redrive.select import (
    Progress,
    RawEntry,
    batches,
    died_again,
    select_entries,
    without,
)
from celery_dlq.operations.redrive.watching import Unfinished, has_result
from celery_dlq.operations.redrive.work import LettersWork, RedriveReport, RedriveWork
from celery_dlq.store.records import RedriveOutcome
from celery_dlq.store.worker_records import MessageKey

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs
    from celery_dlq.operations.redrive.work import RedriveWork

MOST_DIED_IDS = 20
_MAX_ENTRIES_SCANNED = 100_000
_MAX_GROUPS = 1000

PASSED = "passed"
NOTHING_TRIED = "nothing tried"


def watch_canary(
    work: RedriveWork, messages: list[tuple[MessageKey, Outgoing]], canary: Canary
) -> bool:
    """Wait until messages have ended, too many died, or time is over; true if the canary passed.

    The job shows how it does meanwhile, the report what came of it.
    """
    died_ids: list[str] = []
    began, seen = time.monotonic(), 0
    while True:
        outcomes = _outcomes(work, messages)
        left = [one for one, o in zip(messages, outcomes, strict=True) if o is RedriveOutcome.OPEN]
        holds = work.matching_holds(left)
        died, succeeded = map(outcomes.count, (RedriveOutcome.DIED, RedriveOutcome.SUCCEEDED))
        if died > seen and len(died_ids) < MOST_DIED_IDS:
            job = work.run.job
            new = died_again(work.deaths, job.queue, job.id, job.until)
            died_ids = [*islice((letter_id for letter_id, _ in new if letter_id), MOST_DIED_IDS)]
        seen, waited = died, time.monotonic() - began
        counts = {
            "succeeded": succeeded,
            "died": died,
            "open": len(left),
            "held": len(holds),
            "holds": sorted(set(holds)),
        }
        ended = len(left) <= len(holds) or died > canary.max_failures
        ended = ended or waited >= canary.wait_seconds
        verdict = _verdict(counts, canary.max_failures) if ended else "running"
        shown = {
            "letters": len(messages),
            **counts,
            "waited_seconds": round(waited, 1),
            "wait_seconds": canary.wait_seconds,
            "verdict": verdict,
            "died_ids": died_ids,
        }
        work.run.update(canary=shown)
        if ended:
            break
        work.send_heartbeat()
        time.sleep(timing.current.short_look)
    work.report.canary = {"redriven": len(messages), **counts, "verdict": verdict}
    if verdict == PASSED:
        work.run.update(options=replace(work.run.options, canary=replace(canary, passed=True)))
        work.run.send_heartbeat(now=True)
    else:
        work.run.update(note=_why_stopped(shown))
    return verdict == PASSED


def _outcomes(
    work: RedriveWork, messages: list[tuple[MessageKey, Outgoing]]
) -> list[RedriveOutcome]:
    """How messages ended; queues without a policy record no successes, so ask for results."""
    found = work.store.claims.outcomes([key for key, _ in messages])
    return [
        RedriveOutcome.SUCCEEDED
        if outcome is RedriveOutcome.OPEN and has_result(work.app, message.task_id)
        else outcome
        for (_, message), outcome in zip(messages, found, strict=True)
    ]


def _verdict(counts: dict[str, Any], max_failures: int) -> str:
    failed = counts["died"] + counts["open"]
    if not counts["succeeded"] + failed:
        return NOTHING_TRIED
    if failed <= max_failures:
        return PASSED
    if counts["died"] > max_failures:
        return "died again"
    return "held" if failed - counts["held"] <= max_failures else "not finished"


def _why_stopped(canary: dict[str, Any]) -> str:
    letters = canary["letters"]
    if canary["verdict"] == "died again":
        return f"{canary['died']:,} of {letters:,} letters of the canary died again"
    if canary["verdict"] == "held":
        holds = ", ".join(canary["holds"])
        return f"the canary is held by {holds}: release that first, then resume this job"
    if canary["verdict"] == NOTHING_TRIED:
        return "the canary found no letter to try: others work on them, or publishing them failed"
    unfinished, seconds = canary["open"], canary["wait_seconds"]
    return f"{unfinished:,} of {letters:,} letters of the canary did not end in {seconds:g} s"


def chosen_ids(entries: Iterable[RawEntry], letters: int) -> list[str]:
    """Ids of letters, one group after the other in turn; scans a bounded number of entries."""
    groups: dict[str, list[str]] = {}
    for found in islice(entries, _MAX_ENTRIES_SCANNED):
        fingerprint = found.text("fingerprint")
        if not found.is_letter or (fingerprint not in groups and len(groups) >= _MAX_GROUPS):
            continue
        group = groups.setdefault(fingerprint, [])
        if len(group) < letters:
            group.append(found.key)
    in_turn = (group[n] for n in range(letters) for group in groups.values() if n < len(group))
    return [*islice(in_turn, letters)]


_MAX_REFUSED_BATCHES = 20
MOST_AT_ONCE = 100


class _BrokerGoneError(Exception):
    """The broker refused many batches in a row; raised instead of claiming more letters."""


def redrive(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> RedriveReport:
    """Redrive the letters of a job; see `DeadLetters.redrive`."""
    return carried_out(LettersWork(jobs, run), progress, scanned)


def carried_out(
    work: RedriveWork, progress: Progress | None, scanned: Progress | None
) -> RedriveReport:
    """Publish the messages of letters and remove the letters."""
    report, canary, limit = work.report, work.options.canary, work.options.limit
    with closing(Publisher(work.app)) as publisher:
        claimed = ByClaims(work, publisher)
        way = OneStep.of(work, publisher, claimed) or claimed
        try:
            if canary is not None and not canary.passed and not _redrive_canary(work, way, canary):
                report.state = STOPPED
            else:
                before = report.touched - (report.gone if work.options.files else 0)
                left = None if limit is None else max(0, limit - before)
                found = work.safe_entries(work.selected(scanned, work.skip_gone))
                _redrive_all(work, way, islice(found, left), progress)
        except CancelledError as exc:
            report.state = exc.state
        except (_BrokerGoneError, BrokerUnavailable):
            report.state = FAILED
        finally:
            way.close()
        claimed.wait_for_batch()
    work.run.update(failed=report.first_failures())
    return report


def _redrive_all(
    work: RedriveWork, way: OneStep | ByClaims, found: Iterable[RawEntry], progress: Progress | None
) -> None:
    report, rate, bound = work.report, work.options.rate, unfinished_of(work)
    most = way.batch_size if rate is None else max(1, min(MOST_AT_ONCE, int(rate)))
    pace = Pace(rate, work.send_heartbeat)
    if work.options.growing:
        pace = growing = GrowingPace(work.send_heartbeat)
        parts = _as_there_is_room(found, lambda _first: int(growing.rate), MOST_AT_ONCE)
    elif bound is not None:
        parts = _as_there_is_room(found, bound.room_for, min(most, MOST_AT_ONCE))
    else:
        parts = batches(found, most, way.max_bytes)
    refusals, settled = 0, work.run.job.position
    for batch in parts:
        work.send_heartbeat()
        pace.wait_for_turn(len(batch))  # before the claim, whose lease is short
        before = report.done
        work.watched = None if bound is None else []
        way.redrive_batch(batch)
        if bound is not None:
            way.wait_for_batch()
            bound.settle(work.watched or ())
        work.send_heartbeat(settled)  # of a batch that is still on its way, nothing is certain
        settled = batch[-1].position
        refusals = refusals + 1 if report.done == before and report.failures else 0
        if refusals >= _MAX_REFUSED_BATCHES:
            raise _BrokerGoneError
        if progress is not None:
            progress(len(batch))
    way.wait_for_batch()


def unfinished_of(work: RedriveWork) -> Unfinished | None:
    """The messages that have not ended, of a redrive that is bound by them."""
    return None if work.options.at_most is None else Unfinished(work, work.backend)


def _as_there_is_room(
    found: Iterable[RawEntry], room: Callable[[str], int], most: int
) -> Iterator[list[RawEntry]]:
    """Batches of what may be published at once; nothing waits for room that is not needed."""
    entries = iter(found)
    for first in entries:
        yield [first, *islice(entries, max(1, min(most, room(first.key))) - 1)]


def _redrive_canary(work: RedriveWork, way: OneStep | ByClaims, canary: Canary) -> bool:
    """Redrive a few letters and watch them; true to continue."""
    letters = min(canary.letters, work.options.limit or canary.letters)
    bound = unfinished_of(work)
    if bound is not None:  # an earlier canary may still run
        letters = min(letters, bound.wait_for_room())
    work.watched, tried = [], set[str]()
    held, prefix = work.store.claims.held_by_others, work.run.previous_run_prefix
    claimed = partial(held, work.run.job.queue, previous_run_prefix=prefix)  # by others
    for _ in range(_MAX_REFUSED_BATCHES):  # others may be faster, or publishing may fail
        found = (
            one for one in work.selected() if one.key not in tried and not work.reason_of_loss(one)
        )
        few = chosen_ids(without(found, claimed), letters)
        if not few:
            break
        tried.update(few)
        work.send_heartbeat()
        only = LetterFilter(ids=frozenset(few))
        for batch in batches(
            select_entries(work.store, work.run.job.queue, only), way.batch_size, way.max_bytes
        ):
            way.redrive_batch(batch)
        way.wait_for_batch()
        if bound is not None:
            bound.settle(work.watched)
        if work.watched:
            break
    messages, work.watched = work.watched, None
    if not messages and all(map(work.reason_of_loss, work.selected())):
        return True  # what is left stays anyway, and is counted
    work.send_heartbeat()  # also a job that tried nothing can be resumed
    return watch_canary(work, [(work.key_of(message), message) for message in messages], canary)
