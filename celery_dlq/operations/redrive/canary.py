"""The canary: a redrive first redrives a few letters and watches how they end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.operations.redrive.message import Canary, Outgoing
from celery_dlq.operations.redrive.select import RawEntry, died_again
from celery_dlq.store.records import MessageKey, RedriveOutcome

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.work import Work

MOST_DIED_IDS = 20
_MAX_ENTRIES_SCANNED = 100_000
_MAX_GROUPS = 1000

PASSED = "passed"


def watch(work: Work, messages: list[tuple[MessageKey, Outgoing]], canary: Canary) -> bool:
    """Wait until messages have ended, too many died, or time is over; true if the canary passed.

    The job shows how it does meanwhile, the report what came of it.
    """
    died_ids: list[str] = []
    began, seen = time.monotonic(), 0
    while True:
        outcomes = _outcomes(work, messages)
        left = [one for one, o in zip(messages, outcomes, strict=True) if o is RedriveOutcome.OPEN]
        holds = work.held(left)
        died, succeeded = map(outcomes.count, (RedriveOutcome.DIED, RedriveOutcome.SUCCEEDED))
        if died > seen and len(died_ids) < MOST_DIED_IDS:
            job = work.run.job
            again = filter(None, died_again(work.store, job.queue, job.id, job.until))
            died_ids = [*islice(again, MOST_DIED_IDS)]
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
        work.run.tell(canary=shown)
        if ended:
            break
        work.beat()
        time.sleep(timing.current.canary_look)
    work.report.canary = {"redriven": len(messages), **counts, "verdict": verdict}
    if verdict == PASSED:
        work.run.tell(options=replace(work.run.options, canary=replace(canary, passed=True)))
        work.run.beat(now=True)
    else:
        work.run.tell(note=_why_stopped(shown))
    return verdict == PASSED


def _outcomes(work: Work, messages: list[tuple[MessageKey, Outgoing]]) -> list[RedriveOutcome]:
    """How messages ended; queues without a policy record no successes, so ask for results."""
    found = work.store.claims.outcomes([key for key, _ in messages])
    return [
        RedriveOutcome.SUCCEEDED
        if outcome is RedriveOutcome.OPEN and _has_result(work.app, message.task_id)
        else outcome
        for (_, message), outcome in zip(messages, found, strict=True)
    ]


def _has_result(app: Any, task_id: str) -> bool:
    try:
        return bool(app.AsyncResult(task_id).state == "SUCCESS")
    except Exception:  # noqa: BLE001 - no result backend, or no answer: unknown
        return False


def _verdict(counts: dict[str, Any], max_failures: int) -> str:
    failed = counts["died"] + counts["open"]
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
        return f"the canary is held by {holds}; after its release, resume this job"
    unfinished, seconds = canary["open"], canary["wait_seconds"]
    return f"{unfinished:,} of {letters:,} letters of the canary did not end in {seconds:g} s"


def chosen(entries: Iterable[RawEntry], letters: int) -> list[str]:
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
