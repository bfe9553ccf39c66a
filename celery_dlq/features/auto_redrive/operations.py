"""Automatic redrives: find the letters that are due, and redrive them as a job.

A letter is due once it was stored longer ago than its policy says; that is longer for one whose
message was redriven more often. Letters lie in the order of storing, so those of one number of
redrives become due in this order, too: a cursor for each number leaves out what was seen before.
Each letter is read once for each number, however many there are.

One process at a time works on a queue: it holds a lease in the store, whose state has the cursors
and the id of the job. The clock is the store's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from celery_dlq.errors import DLQError, NotFound, StoreUnavailable
from celery_dlq.events import on_behalf_of
from celery_dlq.features.auto_redrive.policy import AutoRedrive
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import to_micros
from celery_dlq.logs import get_logger
from celery_dlq.operations.job import DONE, INTERRUPTED, RUNNING, WAITING, Job, JobRun
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.redrive.message import Canary, RedriveOptions
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.lease import Lease
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import QueueStatus, position_at

logger = get_logger("celery_dlq")

ACTOR = "auto_redrive"
"""Who redrives, in jobs and audit."""

RATE = 100.0
"""At most this many letters a second."""

MOST_LETTERS = 5000
"""At most this many letters a job; the next look goes on."""

MOST_SCANNED = 20_000
"""At most this many letters are read a look to find the first one that is due."""

JOBS_KEPT = 100
LEASE_SECONDS = 30.0
"""After a process that was killed, another one goes on when this time is over."""

CANARY_SECONDS = 60.0
MOST_CANARY_SECONDS = 300.0

_PLACE = "auto_redrive"
_PAGE = 500
_MOST_CURSORS = 200
_KEEP_SECONDS = LEASE_SECONDS / 3
_REDRIVEN = ("published", "finished")
_LEFT = ("refused", "failures", "skipped")

Stopping = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Which letters a job takes."""

    redrives: int  # Those of messages that were redriven so often
    reasons: tuple[str, ...] | None = None  # Those with these reasons; `None` for all

    def __call__(self, found: RawEntry) -> bool:
        """True if a job takes an entry."""
        return (
            found.is_letter
            and found.fields.get(b"redrives", b"0") == b"%d" % self.redrives
            and (self.reasons is None or found.text("reason") in self.reasons)
        )

    @property
    def name(self) -> str:
        """Names its cursor."""
        return f"{self.redrives} {' '.join(self.reasons or ())}".strip()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, for the job."""
        return {
            "redrives": self.redrives,
            "reasons": None if self.reasons is None else list(self.reasons),
        }

    @classmethod
    def from_json(cls, value: Any) -> Due | None:
        """Read what `to_json` wrote; ``None`` if the job was not made by a policy."""
        if not isinstance(value, Mapping):
            return None
        reasons = value.get("reasons")
        return cls(redrives=int(value["redrives"]), reasons=reasons and tuple(reasons))


class Cursor(NamedTuple):
    """How far the letters of one number of redrives are done."""

    position: str | None = None  # They are done up to here; `None`: from the beginning
    # Go back to here later, because letters were left behind; empty: to the beginning
    back_to: str = ""
    back_at: int = 0  # When, in microseconds since 1970; 0 for never
    # The queue rests until then, in microseconds; the canary died, or a person or the broker
    # stopped the job
    pause_until: int = 0

    def at(self, now: datetime) -> Cursor:
        """The cursor to begin at, now."""
        if self.back_at and self.back_at <= to_micros(now):
            return self._replace(position=self.back_to or None, back_to="", back_at=0)
        return self

    def after(self, job: Job, begun: str | None, wait: float, now: datetime) -> Cursor:
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


class AutoRedrives:
    """Redrives the letters that are due, a job at a time."""

    def __init__(self, jobs: Jobs) -> None:
        self._store: Letters = jobs.backend.letters
        self._jobs = jobs

    def due(
        self, rule_of: Callable[[str], AutoRedrive | None], stopping: Stopping
    ) -> Generator[Job, None, None]:
        """Visit each queue once, and run a job for what is due there; yields it when it ended."""
        rules = {name: rule for name in self._store.names() if (rule := rule_of(name)) is not None}
        for status in self._store.overviews.statuses(list(rules)):
            if stopping():
                return
            rule = rules[status.name]
            if _may_have_due(status, rule):
                lease = _Visit(self._store, status.name)
                yield from self._visit(status.name, rule, lease, stopping)

    def _visit(
        self, queue: str, rule: AutoRedrive, lease: _Visit, stopping: Stopping
    ) -> Iterator[Job]:
        """Work on one queue, unless another process does."""
        state = lease.take()
        if state is None:
            return
        try:
            last = self._last(state)
            if last is not None and last.state == INTERRUPTED:
                with on_behalf_of(ACTOR):
                    last = self._finished(self._jobs.again(last.id), lease, stopping)
            if last is not None and last.state in (RUNNING, WAITING):
                return
            self._settle(state, last, rule, lease)
            for due in self._not_resting(state, rule):
                if stopping() or not lease.keep():
                    return
                with on_behalf_of(ACTOR):
                    run = self._next(queue, rule, due, state, lease)
                    if run is None:
                        continue
                    job = self._finished(run, lease, stopping)
                if job.state == WAITING:
                    return
                self._settle(state, job, rule, lease)
                yield job
                if job.state != DONE:  # else the next number would send a canary of its own
                    return
        finally:
            lease.end()

    def _last(self, state: Mapping[str, Any]) -> Job | None:
        """The job that some process ran, and may not have finished."""
        try:
            return self._jobs.get(state["job"]) if "job" in state else None
        except NotFound:  # its process died before it began, or it was forgotten
            return None

    def _not_resting(self, state: dict[str, Any], rule: AutoRedrive) -> list[Due]:
        """The numbers of redrives, least recently used first; none while the queue rests."""
        cursors = state.setdefault("cursors", {})
        order = {name: place for place, name in enumerate(cursors, 1)}
        found = sorted(numbers(rule), key=lambda due: order.get(due.name, 0))
        rests = [Cursor(*cursors[due.name]).pause_until for due in found if due.name in cursors]
        return [] if max(rests, default=0) > to_micros(self._store.now()) else found

    def _next(
        self, queue: str, rule: AutoRedrive, due: Due, state: dict[str, Any], lease: _Visit
    ) -> JobRun | None:
        """A job for what is due of one number of redrives; ``None`` if nothing is."""
        now = self._store.now()
        before = Cursor(*state["cursors"].get(due.name, ()))
        cursor = before.at(now)
        longest = timedelta(seconds=rule.wait_seconds(due.redrives))
        until = position_at(now - longest)
        begun, found = self._first(queue, due, cursor.position, until, lease)
        cursor = cursor._replace(position=begun)
        if not found:
            if cursor != before:
                _keep(state, due, cursor)
                lease.note(state)
            return None
        run = self._jobs.new("redrive", queue, LetterFilter(), _options(rule, due))
        run.tell(until=until, position=begun, total=None)
        _keep(state, due, cursor)
        state |= {"job": run.job.id, "begun": begun}
        if not lease.note(state):  # before the job: whoever is next must find it
            return None
        run.beat(now=True)
        self._jobs.forget(ACTOR, JOBS_KEPT)
        return run

    def _finished(self, run: JobRun, lease: _Visit, stopping: Stopping) -> Job:
        """Run a job to its end, or until this process is to stop."""
        run.stopping = lambda: stopping() or not lease.keep()
        try:
            self._jobs.run(run)
        except StoreUnavailable:
            raise
        except DLQError as exc:  # it is in the job's note, too
            logger.warning("The automatic redrive %s failed: %s", run.job.id, exc)
        else:
            done, state = sum(run.job.counts.get(name, 0) for name in _REDRIVEN), run.job.state
            logger.info(
                "%s of %s (job %s) is %s: %d letters", ACTOR, run.job.queue, run.job.id, state, done
            )
        return run.job

    def _settle(
        self, state: dict[str, Any], job: Job | None, rule: AutoRedrive, lease: _Visit
    ) -> None:
        """Move the cursor behind what a job has done."""
        due = None if job is None else Due.from_json(job.options.get("due"))
        if job is not None and due is not None:
            cursor = Cursor(*state["cursors"].get(due.name, ()))
            # Of a job that did not end well, all numbers wait: not as long as the latest of them.
            wait = rule.wait_seconds(due.redrives) if job.state == DONE else rule.after
            now = self._store.now()
            _keep(state, due, cursor.after(job, state.get("begun"), wait, now))
        if state.pop("job", None) is not None:
            state.pop("begun", None)
            lease.note(state)

    def _first(
        self, queue: str, due: Due, after: str | None, until: str, lease: _Visit
    ) -> tuple[str | None, bool]:
        """The position before the first letter that is due; true if there is one."""
        scanned = 0
        for page in self._store.fields(queue, after=after, until=until, page_size=_PAGE):
            for position, fields in page:
                if due(RawEntry(position, fields)):
                    return after, True
                after = position
            scanned += len(page)
            if scanned >= MOST_SCANNED or not lease.keep():
                break
        return after, False


class _Visit:
    """The right to redrive a queue's letters automatically, and what the processes know of it."""

    def __init__(self, store: Letters, queue: str) -> None:
        self._lease = Lease(store.leases, queue, _PLACE, uuid4().hex, LEASE_SECONDS)
        self._kept_at = time.monotonic()

    def take(self) -> dict[str, Any] | None:
        """The state, or ``None`` if another process has the lease."""
        reply = self._lease.acquire()
        if not reply.acquired:
            return None
        try:
            found = json.loads(reply.state or "{}")
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def keep(self) -> bool:
        """Renew the lease, now and then; false if another process has it."""
        if time.monotonic() - self._kept_at < _KEEP_SECONDS:
            return True
        self._kept_at = time.monotonic()
        return self._lease.renew()

    def note(self, state: Mapping[str, Any]) -> bool:
        """Keep the state; false if another process has the lease."""
        return self._lease.note(json.dumps(state)).acquired

    def end(self) -> None:
        """Let the next process take it."""
        self._lease.release()


def _keep(state: dict[str, Any], due: Due, cursor: Cursor) -> None:
    """Keep a cursor; forget the one that was not used for longest if policies changed often."""
    cursors = state["cursors"]
    cursors.pop(due.name, None)
    cursors[due.name] = list(cursor)
    for name in list(cursors)[:-_MOST_CURSORS]:
        del cursors[name]


def _may_have_due(status: QueueStatus, rule: AutoRedrive) -> bool:
    oldest = status.oldest_stored_at
    return oldest is not None and oldest <= status.at - timedelta(seconds=rule.after)


def numbers(rule: AutoRedrive) -> Iterator[Due]:
    """Which letters a rule redrives, by the number of their redrives."""
    reasons = None if rule.reasons is None else tuple(sorted(map(str, rule.reasons)))
    return (Due(redrives=number, reasons=reasons) for number in range(rule.times))


def _options(rule: AutoRedrive, due: Due) -> RedriveOptions:
    canary = None
    if rule.canary is not None:
        wait = min(max(CANARY_SECONDS, rule.after), MOST_CANARY_SECONDS)
        canary = Canary(letters=rule.canary, wait_seconds=wait)
    return RedriveOptions(rate=RATE, limit=MOST_LETTERS, due=due.to_json(), canary=canary)


def redrive_due(jobs: Jobs, table: PolicyTable, stopping: Stopping) -> Generator[Job, None, None]:
    """Redrive what is due by the policies; yields each job when it ended."""

    def rule_of(queue: str) -> AutoRedrive | None:
        # Nothing while a change of the policy has yet to begin.
        return None if table.rests(queue) else table.value_of(queue, "auto_redrive")

    return AutoRedrives(jobs).due(rule_of, stopping)


def chooses(
    policy: Policy | None, due: Mapping[str, Any] | None
) -> Callable[[RawEntry], bool] | None:
    """Which letters a policy redrives, or a job that it made; ``None`` if it redrives none."""
    rule = None if policy is None else policy.of("auto_redrive")
    if not rule:
        return None
    every = list(numbers(rule))
    if due is None:
        return lambda found: any(one(found) for one in every)
    mine = Due.from_json(due)
    return mine if mine in every else None
