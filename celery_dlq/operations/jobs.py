"""Jobs: long operations that are made, run, watched, cancelled, and resumed after a crash.

1. A job is made on the letters that are there now; the store has nothing of it yet.
2. It is run here and now; or kept as a plan until somebody starts it; or it waits for a process
   that runs jobs.
3. While it runs, its process sends a heartbeat with the results so far, at most every second. A job
   without one is ``interrupted``: whoever resumes it makes another run, which goes on behind the
   last position that was done.
4. Its end is saved, then recorded in the audit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError, NotFound, StoreUnavailable
from celery_dlq.events import Action, Change, Redriven, on_behalf_of, whoami
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import get_logger, readable
from celery_dlq.letters.record import REDRIVEN_FIELDS, from_micros, iso
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.files import check_reachable, opened
from celery_dlq.operations.instructions import Audit, CountedChange, change_so_far
from celery_dlq.operations.job import (
    CANCELLED,
    DONE,
    EXPIRED,
    FAILED,
    INTERRUPTED,
    PLANNED,
    REDRIVES,
    REMOVALS,
    RUNNING,
    STOPPED,
    WAITING,
    Job,
    JobOptions,
    JobRun,
    counts_of,
)
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.redrive.select import MOST_SEARCHED, Progress, Source, died_again
from celery_dlq.store.endless import repeat_until
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import position_at
from celery_dlq.store.workers import OpenChange
from celery_dlq.transport.publications import broker_name

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq")

PLAN_VALID = timedelta(minutes=15)
"""A plan can be started for this long: the letters may become others."""

MOST_PLANS = 50
"""Plans that are kept; the oldest one makes room."""

THREADS = 2
_MAX_AHEAD = timedelta(days=366)
_EXPIRED_KEPT = timedelta(hours=1)  # so that who comes late reads what happened
_MOST_IDS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of job: what it is called in the audit, what its options are, and what it does."""

    action: Action
    options: type[JobOptions]
    operation: Callable[[Jobs, JobRun, Progress | None, Progress | None], Any]


def check_start(at: datetime, now: datetime) -> None:
    """Refuse a time at which no job can start."""
    if at <= now:
        raise DLQError(
            f"expected a time in the future to start the job at, got {iso(at)}; now it is "
            f"{iso(now)}"
        )
    if at - now > _MAX_AHEAD:
        raise DLQError(
            f"expected a time at most {_MAX_AHEAD.days} days ahead to start the job at, got "
            f"{iso(at)}"
        )


class Jobs:
    """The jobs of an app; safe against crashes and other operators."""

    def __init__(self, assembly: Assembly, kinds: Mapping[str, JobKind]) -> None:
        self.app = assembly.app
        self.settings = assembly.settings
        self.backend = assembly.backend
        self.policies = PolicyAdmin(assembly)
        self.events = assembly.events
        self.measuring = assembly.measuring
        self.clock = assembly.clock
        self.audit = Audit(self.backend.workers, self.events)
        self._kinds = kinds
        self._store = self.backend.jobs

    # -- what operators see -------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs, newest first; at least the newest 500 are kept, and at most 50 plans."""
        return [self._counted(job) for _, job in self._readable()]

    def job(self, job_id: str, *, most_searched: int = MOST_SEARCHED) -> Job:
        """One job; for a redrive also how many of its messages ``died_again`` and ``succeeded``.

        And the ``new_letters`` of other messages since it began: of its cause, if it is about one.
        A new letter's header names the redrive of its message; one that has left its queue is not
        counted any more. Workers count successes, on guarded queues only. If there are more new
        letters than may be searched, ``searched`` is their number: later ones may have died
        again, too.
        """
        job = self.get(job_id)
        if job.kind not in REDRIVES or not job.run:
            return job
        letters = self.backend.letters
        new = [*died_again(letters, job.queue, job.id, job.until, most_searched)]
        digits = str(job.filter.get("fingerprint") or "")
        others = sum(not again and cause.startswith(digits) for again, cause in new)
        died, succeeded = sum(bool(again) for again, _ in new), self._store.succeeded(job_id)
        searched = {"searched": len(new)} if len(new) >= most_searched else {}
        ends = {"died_again": died, "succeeded": succeeded, "new_letters": others, **searched}
        return replace(job, counts={**job.counts, **ends})

    def get(self, job_id: str) -> Job:
        """One job, as the store has it."""
        return self._read_state(job_id)[1]

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch; no letter is left half done."""
        while True:
            state, job = self._read_state(job_id)
            if job.state == RUNNING:
                self._store.cancel(job_id, whoami())
                return job
            if job.state not in (PLANNED, WAITING, INTERRUPTED):
                raise DLQError(f"expected a running job, got {job_id}, which is {job.state}")
            ended = self._save_changed(
                state,
                job,
                state=CANCELLED,
                note=f"cancelled by {whoami()}",
                ended_at=self._store.now(),
            )
            if ended is not None:
                self.audit.end_killed(job.id, self._so_far)
                return ended

    def changes(self, limit: int = 100) -> list[Change]:
        """The audit, newest first: who changed what; the newest 10,000 changes are kept.

        Also what jobs have changed so far that still run, or whose process was killed.
        """
        ended, open_ones = self.backend.workers.changes_and_open(limit=limit)
        so_far = (self._so_far(operation, one) for operation, one in open_ones.items())
        found = [*filter(None, so_far), *ended]
        return sorted(found, key=lambda change: change.at, reverse=True)[:limit]

    # -- making and planning them -------------------------------------------------

    def new(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: JobOptions,
        change: Edit | None = None,
        source: Source | None = None,
    ) -> JobRun:
        """Make a job on the letters of a queue that are there now; listed once it has begun."""
        # In this order: a letter that arrives in between is counted, but not worked on.
        until = self.backend.letters.last_position(queue) or position_at(from_micros(0))
        total: int | None = None
        if where.ids is not None:
            total = len(where.ids)
        elif not where:
            total = (source or self.backend.letters).length(queue)
        run = self.make(kind, queue, where, options, change=change)
        run.source = source
        run.update(until=until, total=total, filter=where.to_json())
        return run

    def make(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: JobOptions,
        *,
        change: Edit | None = None,
        listed: bool = True,
    ) -> JobRun:
        """Make a job that does not name its letters, on whatever has a queue's name."""
        now = self._store.now()
        job = Job(
            id=f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}-{uuid4().hex[:6]}",
            kind=kind,
            queue=queue,
            actor=whoami(),
            started_at=now,
            updated_at=now,
            options=options.to_json(),
            pid=os.getpid(),
            host=socket.gethostname(),
            broker="" if kind in (*REMOVALS, "restore") else broker_name(self.app),
            change="" if change is None else change.to_text(),
        )
        return JobRun(self._store, job, where, options, change=change, listed=listed)

    def source(self, run: JobRun, *also: str) -> Source:
        """Where the letters of a job are read: in Redis, or in the files of an export.

        Of files only the fields of which a message is made, and those that are named. An edit, the
        history of a kept count, and an event are of whole letters.
        """
        files = getattr(run.options, "files", "")
        if not files:
            return self.backend.letters
        if run.source is None:  # another process made the job
            source = opened(files, self.backend.letters).source
            source.refuse_redacted()
            run.source = source.until(run.options.files_end)
        whole = run.change is not None or run.options.keep_count or self.events.wanted(Redriven)
        return run.source.narrowed(run.where, None if whole else {*REDRIVEN_FIELDS, *also})

    def keep_plan(self, job: Job) -> Job:
        """Keep a job as a plan; forget plans that expired long ago, or are too many."""
        check_reachable(job.options.get("files", ""))
        now = self._store.now()
        plans = (pair for pair in self._readable() if pair[0].get("state") == PLANNED)
        for place, (state, plan) in enumerate(plans):
            expires_at = plan.expires_at or now
            if place >= MOST_PLANS - 1 or now - expires_at > _EXPIRED_KEPT:
                self._store.replace(plan.id, state, None)
        planned = replace(
            job, state=PLANNED, run=0, pid=0, host="", updated_at=now, expires_at=now + PLAN_VALID
        )
        self._store.write(planned.id, planned.to_stored())
        return planned

    def start(
        self, job_id: str, checked: Callable[[Job], Job], *, at: datetime | None = None
    ) -> Job:
        """Let a plan wait for a process that runs jobs; a job that was started is only returned."""
        if at is not None:
            check_start(at, self._store.now())
        state, job = self._read_state(job_id)
        if job.state == EXPIRED:
            raise DLQError(
                f"expected a plan of the last {PLAN_VALID.seconds // 60} minutes, got {job_id}, "
                f"which expired at {job.expires_at:%H:%M} UTC; make a new one"
            )
        if job.state != PLANNED:
            return job
        job = checked(job)
        new = {"actor": whoami(), "started_at": self._store.now(), "expires_at": None}
        started = self._save_changed(state, job, state=WAITING, start_at=at, **new)
        return started or self.get(job_id)  # another operator was faster

    # -- running them -------------------------------------------------------------

    def run(
        self, run: JobRun, progress: Progress | None = None, scanned: Progress | None = None
    ) -> Any:
        """Run a job to its end, and record that in the audit."""
        kind = self._kinds[run.job.kind]
        change = self._counted_change(run, kind.action)
        run.began = change.open
        try:
            if run.is_begun:
                change.open()
            report = kind.operation(self, run, progress, scanned)
        except BaseException as exc:
            self._record_failure(run, change, exc)
            raise
        finally:
            self.measuring.close()
        if run.is_begun:  # else nothing matched
            counts = {name: n for name, n in report.to_json().items() if type(n) is int}
            report.note = run.end(report.state, counts, _result_note(run.job, report)).note
            self._record_end(run, change)
        return report

    def resume(
        self, job_id: str, *, progress: Progress | None = None, scanned: Progress | None = None
    ) -> Any:
        """Continue a job here whose process died, or that waits, was cancelled or stopped.

        A redrive that has not passed its canary starts with a new canary.
        """
        return self.run(self.begin_again(job_id), progress, scanned)

    def resume_in_background(self, job_id: str) -> Job:
        """Like `resume`, but by a process that runs jobs; also from there if it has ended."""
        while True:
            job = self.get(job_id)
            if job.state in (WAITING, RUNNING):
                return job
            state, job = self._resumable(job_id)
            waiting = self._save_changed(state, job, state=WAITING, actor=whoami(), ended_at=None)
            if waiting is not None:
                return waiting

    def begin_again(self, job_id: str) -> JobRun:
        """Begin another run of a job whose process died, or that waits, was cancelled or stopped.

        The caller runs it.
        """
        state, job = self._resumable(job_id)
        run = self._begin_run(state, replace(job, actor=whoami()))
        if run is None:
            raise DLQError(f"another process has just resumed job {job_id}")
        return run

    def run_next(self, stopping: Callable[[], bool]) -> Job | None:
        """Run the job that waits longest, on behalf of who started it; ``None`` if none waits.

        Leaves jobs to others that are of a later version or of another broker.
        """
        for job_id in self._store.startable_ids():
            try:
                state, job = self._read_state(job_id)
            except DLQError:
                continue  # it is forgotten, or damaged
            ours = job.kind in self._kinds and job.broker in ("", broker_name(self.app))
            run = self._begin_run(state, job) if ours and job.state == WAITING else None
            if run is None:  # or another process was faster
                continue
            run.stopping = stopping
            with on_behalf_of(job.actor):
                self.run(run)
            return run.job
        return None

    def run_one(self, stopping: Callable[[], bool]) -> bool:
        """Run one job, whose note gets its error; false to wait before the next one."""
        try:
            job = self.run_next(stopping)
        except StoreUnavailable as exc:
            logger.warning("Cannot run jobs until the store answers: %s", exc)
        except DLQError as exc:
            logger.warning("A job failed: %s", exc)
        except Exception:
            logger.exception("A job failed")
        else:
            if job is not None:
                now = "waits for the next process" if job.state == WAITING else f"is {job.state}"
                logger.info("Job %s, a %s of %s, %s", job.id, job.kind, job.queue, now)
            return job is not None
        return False

    def forget(self, actor: str, keep: int) -> None:
        """Forget the ended jobs of an actor that is no person, all but the newest."""
        ended = (DONE, CANCELLED, STOPPED, FAILED)
        old = [state for state in self._store.all() if state.get("actor") == actor][keep:]
        for state in old:
            if state.get("state") in ended:
                self._store.replace(state["id"], state, None)

    # -- internals ----------------------------------------------------------------

    def _readable(self) -> Iterator[tuple[Mapping[str, Any], Job]]:
        states, now = self._store.all(), self._store.now()
        for state in states:
            job = _parsed_job(state, now)
            if job is not None:
                yield state, job

    def _read_state(self, job_id: str) -> tuple[Mapping[str, Any], Job]:
        state = self._store.read(job_id)
        job = None if state is None else _parsed_job(state, self._store.now())
        if state is None or job is None:
            raise NotFound(f"expected the id of a job, got {job_id!r}; `dlq jobs` lists them")
        return state, self._counted(job)

    def _counted(self, job: Job) -> Job:
        """A job with what the store has counted: its process may die before it has said so."""
        if job.state not in (RUNNING, INTERRUPTED):
            return job
        letters = self._letters(self._kinds[job.kind].action) if job.kind in self._kinds else None
        return job if letters is None else replace(job, counts=counts_of(job, letters.claims))

    def _resumable(self, job_id: str) -> tuple[Mapping[str, Any], Job]:
        state, job = self._read_state(job_id)
        never_started = job.state == CANCELLED and job.expires_at is not None
        if job.state in (PLANNED, EXPIRED, RUNNING, DONE) or never_started:
            what = "a plan that was cancelled; make a new one" if never_started else job.state
            raise DLQError(f"expected a job that was interrupted, got {job_id}, which is {what}")
        if job.state != WAITING:  # a request to cancel one that waits was made since
            self._store.cancel(job_id)
        return state, job

    def _begin_run(self, state: Mapping[str, Any], job: Job) -> JobRun | None:
        """Begin a run of a job; ``None`` if another process was faster."""
        kind, now = self._kinds.get(job.kind), self._store.now()
        if kind is None:
            raise DLQError(f"job {job.id} is a {job.kind}, which this version does not know")
        where, options = LetterFilter.from_json(job.filter), kind.options.from_json(job.options)
        change = Edit.from_text(job.change) if job.change else None
        first = job.start_at is not None and not job.run
        taken = self._save_changed(
            state,
            job,
            state=RUNNING,
            run=job.run + 1,
            started_at=now if first else job.started_at,
            ended_at=None,
            note="",
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        if taken is None:
            return None
        return JobRun(self._store, taken, where, options, change=change, begun=True)

    def _save_changed(self, known: Mapping[str, Any], job: Job, /, **changes: Any) -> Job | None:
        """Save a change of a job's state; ``None`` if another process was faster."""
        moved = replace(job, updated_at=self._store.now(), **changes)
        return moved if self._store.replace(job.id, known, moved.to_stored()) else None

    def _record_failure(self, run: JobRun, change: CountedChange, exc: BaseException) -> None:
        """Record the result of a job that ends with an error, or is interrupted, as by Ctrl-C."""
        if not run.is_begun:
            return
        failed = isinstance(exc, Exception)
        why = f"{type(exc).__name__}: {exc}"[:500] if failed else ""
        with suppress(DLQError):  # the first error is the one to raise
            # A batch may have been removed and not counted here.
            counts = counts_of(run.job, self._letters(change.action).claims)
            run.end(FAILED if failed else INTERRUPTED, counts, why)
            self._record_end(run, change)
        if isinstance(exc, KeyboardInterrupt):  # the command prints it
            job = run.job.id
            exc.args = (f"Job {job} is interrupted; `dlq jobs resume {job}` continues it.",)

    def _counted_change(self, run: JobRun, action: Action) -> CountedChange:
        """What the audit says of a run; its letters are counted where they are changed."""
        detail = _audit_detail(run.job)
        return self.audit.counted(
            self._letters(action), run.operation, action, run.job.queue, detail
        )

    def _record_end(self, run: JobRun, change: CountedChange) -> None:
        counts = {name: count for name, count in run.job.counts.items() if count}
        end = {"state": run.job.state, "options": _options(run.job), "counts": counts}
        if change.close(**end) is None:
            detail = {**_audit_detail(run.job), **end}
            self.audit.record(change.action, run.job.queue, detail)

    def _so_far(self, operation: str, opened: OpenChange) -> Change | None:
        """What a change shows whose operation runs, or whose process was killed."""
        change, state = opened.change, "unfinished"
        done = self._letters(change.action).claims.changed(change.target, operation)
        with suppress(NotFound):
            job = self.get(operation)
            state, done = job.state, max(done, job.changed)
        return change_so_far(opened, done, state=state)

    def _letters(self, action: Action) -> Letters:
        """Where the letters of a change are counted."""
        return self.backend.held if action is Action.RELEASED else self.backend.letters


class Runner:
    """Runs waiting jobs, two at a time, in threads of this process, on behalf of who started them.

    Several processes may have one: each job is run by one of them. A job whose runner was closed
    waits for another; a job whose process was killed is ``interrupted`` until it is resumed.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._closing = threading.Event()
        self._wake = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run_jobs, name=f"dlq-jobs-{number}", daemon=True)
            for number in range(1, THREADS + 1)
        ]

    def start(self) -> Runner:
        """Run jobs from now on, until `close`."""
        for thread in self._threads:
            thread.start()
        return self

    def look_now(self) -> None:
        """Look for a waiting job now; otherwise that is done every 2 seconds."""
        self._wake.release()

    def close(self, timeout: float = 30.0) -> bool:
        """End after the current batches; unfinished jobs wait for the next runner."""
        self._closing.set()
        for _ in self._threads:
            self._wake.release()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_jobs(self) -> None:
        repeat_until(self._run_waiting, self._closing.is_set, "Jobs that wait are not run")

    def _run_waiting(self) -> None:
        with self._assembly.separate() as own:  # each thread has connections of its own
            jobs = own.jobs()
            while not self._closing.is_set():
                if not jobs.run_one(self._closing.is_set):
                    self._wake.acquire(timeout=timing.current.job_look)


def _audit_detail(job: Job) -> dict[str, Any]:
    """What the audit says of a job from its beginning on."""
    ids, shown = job.filter.get("ids", ()), job.readable_filter()
    if len(ids) > _MOST_IDS_SHOWN:
        shown["ids"] = [*ids[:_MOST_IDS_SHOWN], f"and {len(ids) - _MOST_IDS_SHOWN} more"]
    note = {"note": job.options["note"]} if job.options.get("note") else {}
    return {"job": job.id, **note, "state": RUNNING, "filter": shown, "options": _options(job)}


def _options(job: Job) -> dict[str, Any]:
    return {name: value for name, value in job.options.items() if name != "note"}


def _result_note(job: Job, report: Any) -> str:
    """What the result of a job does not say."""
    if report.state in (STOPPED, FAILED):
        return job.note or "the broker took nothing"
    if report.state == CANCELLED:
        return job.note
    if report.state == DONE and job.preview.get("exact") and job.run == 1:
        gone = (job.total or 0) - report.touched - getattr(report, "refused", 0)
        return f"{gone:,} of the {job.total:,} planned letters had gone" if gone > 0 else ""
    return ""


def _parsed_job(state: Mapping[str, Any], now: datetime) -> Job | None:
    return readable(f"the job {state.get('id')}", lambda: Job.seen(state, now))
