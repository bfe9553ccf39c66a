"""The phases of a job, as the page of a job shows them and its title says in a few words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from celery_dlq.features.phases.steps import Steps
from celery_dlq.operations.job import DONE, EXPIRED, PLANNED, REDRIVES, RUNNING, WAITING, Job
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.templating import duration, plain

_LONG = 5.0  # seconds without an end, from which that is said


class Phase(NamedTuple):
    """One phase: what it is called, what is known of it, and whether it is over, on or to come."""

    name: str
    text: str
    state: str  # `done`, `now`, `next`, or `stopped` where the job ended


def phases(_call: Call, job: Job) -> Panel:
    """Where a redrive is; of other jobs nothing."""
    shown = [*phases_of(job, datetime.now(timezone.utc))] if job.kind in REDRIVES else []
    new = job.counts.get("new_letters", 0) if job.run else 0
    return "phases.html", {"phases": shown, "new": new}


def next_steps(call: Call, job: Job) -> Panel:
    """What is next after a job, each step with its command."""
    steps = [*Steps(call.dlq.assembly).after(job)]
    incident = next((one.incident for one in steps if one.incident is not None), None)
    return "next_steps.html", {"steps": steps, "incident": incident}


def phases_of(job: Job, now: datetime) -> Iterator[Phase]:
    """The phases of a redrive or an edit, in turn; at most one of them is on."""
    planned, watching = job.state in (PLANNED, EXPIRED), job.state == DONE
    on = job.state in (RUNNING, WAITING)
    text = "" if job.total is None else f"{job.total:,} letter{'' if job.total == 1 else 's'}"
    yield Phase("Planned", text, "now" if planned else "done")
    tries = _is_trying(job)
    if job.options.get("canary"):
        now_or_end = "now" if on else "stopped"
        state = "next" if planned else (now_or_end if tries else "done")
        yield Phase("Canary", _canary_text(job), state)
    state = "next" if planned or tries else "done" if watching else "now" if on else "stopped"
    yield Phase("Sending", "" if state == "next" else _sending_text(job, now), state)
    known = watching or job.handled
    state = ("now" if job.unknown else "done") if watching else "next"
    yield Phase("Watching", _watching_text(job) if known else "", state)


def _is_trying(job: Job) -> bool:
    """True while its canary has not passed."""
    canary = job.options.get("canary") or {"passed": True}
    return job.state != DONE and not canary.get("passed")


def _canary_text(job: Job) -> str:
    seen = job.canary
    letters = seen.get("letters", job.options["canary"]["letters"])
    if not seen:
        return f"{letters:,} letters first"
    text = f"{seen['succeeded']:,} of {letters:,} succeeded"
    left, held = seen["open"], seen.get("held")
    text += f", {seen['died']:,} died again" if seen["died"] else ""
    text += f", {left:,} open{f' ({held:,} held)' if held else ''}" if left else ""
    if seen["verdict"] == "running":
        waited, most = duration(seen["waited_seconds"]), duration(seen["wait_seconds"])
        return f"{text}; watched for {waited} of {most}"
    return f"{text}. Verdict: {seen['verdict']}"


def _sending_text(job: Job, now: datetime) -> str:
    total = "" if job.total is None else f" of {job.total:,}"
    texts = [f"{job.handled:,}{total}"]
    pace, left = job.per_second(now), job.seconds_left(now)
    if pace is not None and job.state == RUNNING:
        texts[0] += f" at {plain(float(f'{pace:.2g}'))} a second"
    if left is not None:
        texts.append(f"{duration(left)} left")
    open_ones = job.unfinished
    if open_ones and job.state == RUNNING:
        texts.append(f"{open_ones['open']:,} of {job.options.get('at_most', 0):,} open")
        if open_ones["waited_seconds"] >= _LONG:
            waited = duration(open_ones["waited_seconds"])
            most = duration(open_ones["wait_seconds"])
            texts.append(f"no end for {waited} of {most}")
    if open_ones.get("in_doubt"):
        texts.append(f"{open_ones['in_doubt']:,} in doubt")
    return ", ".join(texts)


def _watching_text(job: Job) -> str:
    succeeded, died = (job.counts.get(name, 0) for name in ("succeeded", "died_again"))
    here = " (still here)" if died else ""  # those that were redriven once more are not counted
    left = f"{max(0, job.changed - succeeded - died):,} open"
    return f"{succeeded:,} succeeded, {died:,} died again{here}, {left}"
