"""Automatic redrives: find the letters that are due, and make a job that redrives them.

A letter is due once it was stored longer ago than its policy says; that is longer for one whose
message was redriven more often. Letters lie in the order of storing, so those of one number of
redrives become due in this order, too: a cursor for each number leaves out what was seen before.
Each letter is read once for each number, however many there are.

One process at a time looks at a queue: it holds a lease in the store, whose state has the cursors
and the id of the queue's job, of which there is one at a time.

1. The job of an earlier look runs or waits: nothing is done. Its process died: it waits again, for
   the next process that runs jobs.
2. It has ended: its cursor moves behind what it has done.
3. Letters of some number are due: cursor and id of a job are saved, then the job waits for a
   process that runs jobs, as those of people do. Who dies in between leaves an id without a job.

The clock is the store's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from celery_dlq.errors import NotFound
from celery_dlq.events import on_behalf_of
from celery_dlq.features.auto_redrive.policy import AutoRedrive
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import to_micros
from celery_dlq.operations.job import DONE, INTERRUPTED, RUNNING, WAITING, Job
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.redrive.message import Canary, RedriveOptions
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.policies.table import PolicyTable
from celery_dlq.registry import interval
from celery_dlq.store.records import position_at

ACTOR = "auto_redrive"
"""Who redrives, in jobs and audit."""

RATE = 100.0
"""At most this many letters a second."""

MOST_LETTERS = 5000
"""At most this many letters a job; the next look goes on."""

MOST_SCANNED = 20_000
"""At most this many letters are read a look to find the first one that is due."""

JOBS_KEPT = 100

_PLACE = "auto_redrive"
_PAGE = 500
_MOST_CURSORS = 200
_REDRIVEN = ("published", "finished")
_LEFT = ("refused", "failures", "skipped")


class Cursor(NamedTuple):
    """How far the letters of one number of redrives are done."""

    position: str | None = None  # They are done up to here; `None`: from the beginning
    # Go back to here later, because letters were left behind; empty: to the beginning
    back_to: str = ""
    back_at: int = 0  # When, in microseconds since 1970; 0 for never
    # The queue rests until then, in microseconds; the canary died, or a person or the broker
    # stopped the job
    pause_until: int = 0

    def starting_at(self, now: datetime) -> Cursor:
        """The cursor to begin at, now."""
        if self.back_at and self.back_at <= to_micros(now):
            return self._replace(position=self.back_to or None, back_to="", back_at=0)
        return self

    def after_job(self, job: Job, begun: str | None, wait: float, now: datetime) -> Cursor:
        """The cursor after a job that began at this position."""
        later = to_micros(now + timedelta(seconds=wait))
        if job.state != DONE:
            return self._replace(position=begun, pause_until=later)
        counts = {name: job.counts.get(name, 0) for name in (*_REDRIVEN, *_LEFT)}
        if sum(counts.values()) >= MOST_LETTERS and any(counts[name] for name in _REDRIVEN):
            return self._replace(position=begun)  # there may be more
        if any(counts[name] for name in _LEFT) and not self.back_at:
            return self._replace(position=job.until, back_to=begun or "", back_at=later)
        return self._replace(position=job.until)


def look_for_due(jobs: Jobs, table: PolicyTable, stopping: Callable[[], bool] = bool) -> bool:
    """Visit each queue once, and make a job for what is due there; true if a queue has a job."""
    store, busy = jobs.backend.letters, False
    rules: dict[str, AutoRedrive] = {}
    for name in store.names():
        rule = table.value_of(name, "auto_redrive")
        if rule and not table.never_trims(
            name
        ):  # nothing while a change of the policy has yet to begin
            rules[name] = rule
    for status in store.overviews.statuses(list(rules)):
        rule, oldest = rules[status.name], status.oldest_stored_at
        may_have_due = oldest and oldest <= status.at - timedelta(seconds=rule.after)
        if may_have_due and not stopping():
            busy |= _Visit(jobs, status.name, rule).visit()
    return busy


class _Visit:
    """One look at one queue, and what the processes know of it."""

    def __init__(self, jobs: Jobs, queue: str, rule: AutoRedrive) -> None:
        self._jobs = jobs
        self._store = jobs.backend.letters
        self._queue = queue
        self._rule = rule
        self._lease = self._store.lease(queue, _PLACE, uuid4().hex, interval("redrive_lease"))
        self._state: dict[str, Any] = {}

    def visit(self) -> bool:
        """Make a job for what is due, unless another process looks; true if the queue has one."""
        reply = self._lease.acquire()
        if not reply.acquired:
            return False
        try:
            found = json.loads(reply.state or "{}")
            self._state = found if isinstance(found, dict) else {}
            with on_behalf_of(ACTOR):
                return self._has_job() or any(map(self._make_job, self._not_resting()))
        finally:
            self._lease.release()

    def _has_job(self) -> bool:
        """True if the last job has not ended; else the cursor moves behind what it has done."""
        if "job" not in self._state:
            return False
        try:
            job = self._jobs.get(self._state["job"])
        except NotFound:  # its maker died before it was there, or it was forgotten
            job = None
        if job is not None and job.state == INTERRUPTED:
            job = self._jobs.resume_in_background(job.id)
        if job is not None and job.state in (RUNNING, WAITING):
            return True
        if job is not None:
            # Of a job that did not end well, all numbers wait: not as long as the latest of them.
            rule, due = self._rule, job.options["due"]
            wait = rule.wait_seconds(due["redrives"]) if job.state == DONE else rule.after
            begun, name = self._state.get("begun"), _cursor_name(due)
            self._keep_cursor(
                name, self._cursor(name).after_job(job, begun, wait, self._store.now())
            )
        self._state.pop("begun", None)
        del self._state["job"]
        return not self._save_state()

    def _not_resting(self) -> list[int]:
        """The numbers of redrives, least recently used first; none while the queue rests."""
        names = {
            _cursor_name(self._rule.due_filter(number)): number
            for number in range(self._rule.times)
        }
        order = {name: place for place, name in enumerate(self._cursors, 1)}
        rests = max(self._cursor(name).pause_until for name in names)
        found = sorted(names, key=lambda name: order.get(name, 0))
        return [] if rests > to_micros(self._store.now()) else [names[name] for name in found]

    def _make_job(self, redrives: int) -> bool:
        """Make a job for what is due of one number of redrives; false if nothing is."""
        name = _cursor_name(self._rule.due_filter(redrives))
        now, before = self._store.now(), self._cursor(name)
        cursor = before.starting_at(now)
        until = position_at(now - timedelta(seconds=self._rule.wait_seconds(redrives)))
        begun, found = self._first_due(redrives, cursor.position, until)
        cursor = cursor._replace(position=begun)
        if found or cursor != before:
            self._keep_cursor(name, cursor)
        if not found:
            if cursor != before:
                self._save_state()
            return False
        run = self._jobs.new("redrive", self._queue, LetterFilter(), _options(self._rule, redrives))
        run.update(until=until, position=begun, total=None, state=WAITING, run=0)
        self._state |= {"job": run.job.id, "begun": begun}
        if self._save_state():  # before the job: whoever is next must find it
            self._jobs.backend.jobs.write(run.job.id, run.job.to_stored())
            self._jobs.forget(ACTOR, JOBS_KEPT)
        return True

    def _first_due(self, redrives: int, after: str | None, until: str) -> tuple[str | None, bool]:
        """The position before the first letter that is due; true if there is one."""
        scanned = 0
        pages = self._store.fields(self._queue, after=after, until=until, page_size=_PAGE)
        for page in pages:
            for position, fields in page:
                if self._rule.takes_letter(RawEntry(position, fields), redrives):
                    return after, True
                after = position
            scanned += len(page)
            if scanned >= MOST_SCANNED:
                break
        return after, False

    @property
    def _cursors(self) -> dict[str, Any]:
        found: dict[str, Any] = self._state.setdefault("cursors", {})
        return found

    def _cursor(self, name: str) -> Cursor:
        return Cursor(*self._cursors.get(name, ()))

    def _keep_cursor(self, name: str, cursor: Cursor) -> None:
        """Keep a cursor; forget the one that was not used for longest if policies changed often."""
        self._cursors.pop(name, None)
        self._cursors[name] = list(cursor)
        for old in list(self._cursors)[:-_MOST_CURSORS]:
            del self._cursors[old]

    def _save_state(self) -> bool:
        """Save the state; false if another process has the lease by now."""
        return self._lease.save_state(json.dumps(self._state)).acquired


def _cursor_name(due: Mapping[str, Any]) -> str:
    """Names the cursor of the letters that a job takes."""
    return " ".join([str(due["redrives"]), *(due["reasons"] or ())])


def _options(rule: AutoRedrive, redrives: int) -> RedriveOptions:
    canary = None
    if rule.canary is not None:
        wait = min(max(interval("canary"), rule.after), interval("max_canary"))
        canary = Canary(letters=rule.canary, wait_seconds=wait)
    return RedriveOptions(
        rate=RATE, limit=MOST_LETTERS, due=rule.due_filter(redrives), canary=canary
    )
