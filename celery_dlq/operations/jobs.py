"""Jobs: long operations that are planned, watched, cancelled, and resumed after a crash."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import whoami
from celery_dlq.letters.record import iso
from celery_dlq.logs import get_logger, readable
from celery_dlq.operations.job import (
    CANCELLED,
    DONE,
    EXPIRED,
    FAILED,
    INTERRUPTED,
    PLANNED,
    RUNNING,
    STOPPED,
    WAITING,
    Job,
)
from celery_dlq.store.jobs import JobStore

logger = get_logger("celery_dlq")

PLAN_VALID = timedelta(minutes=15)
_MAX_AHEAD = timedelta(days=366)
"""A plan can be started for this long: the letters may become others."""

MOST_PLANS = 50
"""Plans that are kept; the oldest one makes room."""

_EXPIRED_KEPT = timedelta(hours=1)  # so that who comes late reads what happened
_BEAT_SECONDS = 1.0


class CancelledError(Exception):
    """The job was cancelled or paused."""

    state = CANCELLED


class TakenOverError(CancelledError):
    """The job was silent for so long that another process, or a person, went on with it."""

    state = INTERRUPTED


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
    """The jobs of an app."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def all(self) -> list[Job]:
        """All jobs in the store, newest first."""
        return [job for _, job in self._readable()]

    def _readable(self) -> Iterator[tuple[Mapping[str, Any], Job]]:
        states, now = self._store.all(), self._store.now()
        for state in states:
            job = _job(state, now)
            if job is not None:
                yield state, job

    def get(self, job_id: str) -> Job:
        """One job."""
        return self._read(job_id)[1]

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch; one that does not run, at once."""
        while True:
            state, job = self._read(job_id)
            if job.state == RUNNING:
                self._store.cancel(job_id)
                return job
            if job.state not in (PLANNED, WAITING, INTERRUPTED):
                raise DLQError(f"expected a running job, got {job_id}, which is {job.state}")
            ended = replace(job, state=CANCELLED, ended_at=self._store.now())
            if self._store.replace(job_id, state, ended.to_stored()):
                return ended

    def new(
        self,
        kind: str,
        queue: str,
        *,
        where: Mapping[str, Any],
        options: Mapping[str, Any],
        until: str | None,
        total: int | None,
        change: str = "",
        broker: str = "",
    ) -> JobRun:
        """Start a job; the store has nothing of it before its first `JobRun.beat`."""
        job = self._job(kind, queue, options)
        job = replace(job, filter=where, until=until, total=total, change=change, broker=broker)
        return JobRun(self._store, job)

    def unlisted(self, kind: str, queue: str, *, options: Mapping[str, Any]) -> JobRun:
        """As `new`, a small job that the store never has."""
        return _UnlistedRun(self._store, self._job(kind, queue, options))

    def _job(self, kind: str, queue: str, options: Mapping[str, Any]) -> Job:
        now = self._store.now()
        moment = f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}"
        return Job(
            id=f"{moment}-{uuid4().hex[:6]}",
            kind=kind,
            queue=queue,
            actor=whoami(),
            started_at=now,
            updated_at=now,
            options=options,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    # -- plans --------------------------------------------------------------------

    def plan(self, job: Job) -> Job:
        """Keep a new job as a plan; forget plans that expired long ago, or are too many."""
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

    def start(self, job_id: str, check: Callable[[Job], object], at: datetime | None = None) -> Job:
        """Let a plan wait for a process that runs jobs; a job that was started is only returned."""
        if at is not None:
            check_start(at, self._store.now())
        state, job = self._read(job_id)
        if job.state == EXPIRED:
            raise DLQError(
                f"expected a plan of the last {PLAN_VALID.seconds // 60} minutes, got {job_id}, "
                f"which expired at {job.expires_at:%H:%M} UTC; make a new one"
            )
        if job.state != PLANNED:
            return job
        check(job)
        now = self._store.now()
        started = replace(
            job,
            state=WAITING,
            actor=whoami(),
            started_at=now,
            updated_at=now,
            expires_at=None,
            start_at=at,
        )
        if self._store.replace(job_id, state, started.to_stored()):
            return started
        return self.get(job_id)  # another operator was faster

    # -- running ------------------------------------------------------------------

    def again(self, job_id: str) -> JobRun:
        """Resume a job whose process has died, or that waits, was cancelled or stopped."""
        state, job = self._resumable(job_id)
        run = self._take(state, replace(job, actor=whoami()))
        if run is None:
            raise DLQError(f"another process has just resumed job {job_id}")
        return run

    def wait_again(self, job_id: str) -> Job:
        """As `again`, but by a process that runs jobs; one that waits or runs is only returned."""
        while True:
            job = self.get(job_id)
            if job.state in (WAITING, RUNNING):
                return job
            state, job = self._resumable(job_id)
            waiting = replace(
                job, state=WAITING, actor=whoami(), updated_at=self._store.now(), ended_at=None
            )
            if self._store.replace(job_id, state, waiting.to_stored()):
                return waiting

    def next_run(self, may_run: Callable[[Job], bool]) -> JobRun | None:
        """Begin the job that waits longest; ``None`` if none waits."""
        for job_id in self._store.due():
            try:
                state, job = self._read(job_id)
            except DLQError:
                continue  # it is forgotten, or damaged
            if job.state != WAITING:
                continue  # another process was faster
            run = self._take(state, job) if may_run(job) else None
            if run is not None:
                return run
        return None

    def forget(self, actor: str, keep: int) -> None:
        """Forget the ended jobs of an actor that is no person, all but the newest."""
        ended = (DONE, CANCELLED, STOPPED, FAILED)
        old = [state for state in self._store.all() if state.get("actor") == actor][keep:]
        for state in old:
            if state.get("state") in ended:
                self._store.replace(state["id"], state, None)

    def _read(self, job_id: str) -> tuple[Mapping[str, Any], Job]:
        state = self._store.read(job_id)
        job = None if state is None else _job(state, self._store.now())
        if state is None or job is None:
            raise NotFound(f"expected the id of a job, got {job_id!r}; `dlq jobs` lists them")
        return state, job

    def _resumable(self, job_id: str) -> tuple[Mapping[str, Any], Job]:
        state, job = self._read(job_id)
        never_started = job.state == CANCELLED and job.expires_at is not None
        if job.state in (PLANNED, EXPIRED, RUNNING, DONE) or never_started:
            what = "a plan that was cancelled; make a new one" if never_started else job.state
            raise DLQError(f"expected a job that was interrupted, got {job_id}, which is {what}")
        if job.state != WAITING:  # a request to cancel one that waits was made since
            self._store.cancel(job_id, wanted=False)
        return state, job

    def _take(self, state: Mapping[str, Any], job: Job) -> JobRun | None:
        """Begin a run of a job; ``None`` if another process was faster."""
        now = self._store.now()
        job = replace(
            job,
            state=RUNNING,
            run=job.run + 1,
            started_at=job.started_at if job.start_at is None or job.run else now,
            updated_at=now,
            ended_at=None,
            note="",
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        if not self._store.replace(job.id, state, job.to_stored()):
            return None
        return JobRun(self._store, job, begun=True)


class JobRun:
    """One run of a job, in one process."""

    def __init__(self, store: JobStore, job: Job, *, begun: bool = False) -> None:
        self._store = store
        self.job = job
        self.stopping: Callable[[], bool] | None = None
        self._paused = False
        self._token = uuid4().hex
        self._written_at = time.monotonic() if begun else None

    @property
    def owner(self) -> str:
        """The owner of this run's claims; different for each run of the job.

        Long on purpose: Redis searches small hashes of short values linearly.
        """
        return f"{self.job.id}:{self.job.run}@{self.job.host}:{self.job.pid}#{self._token}"

    @property
    def previous_run_prefix(self) -> str:
        """The prefix of the owners of earlier runs; empty in the first run."""
        return f"{self.job.id}:" if self.job.run > 1 else ""

    @property
    def begun(self) -> bool:
        """True once the store has the job."""
        return self._written_at is not None

    def beat(
        self,
        counts: Mapping[str, int] | None = None,
        position: str | None = None,
        *,
        failed: Mapping[str, str] | None = None,
        now: bool = False,
    ) -> None:
        """Send a heartbeat with the results so far, at most once a second."""
        self.job = replace(
            self.job,
            counts=self.job.counts if counts is None else dict(counts),
            position=position or self.job.position,
            failed=self.job.failed if failed is None else failed,
        )
        at = time.monotonic()
        if self._written_at is None or now or at - self._written_at >= _BEAT_SECONDS:
            self._written_at = at
            self.job = replace(self.job, updated_at=self._store.now())
            if self._write():
                raise CancelledError
        if self.stopping is not None and self.stopping():
            self._paused = True
            raise CancelledError

    def tell(self, **changes: Any) -> None:
        """Change fields of the job; the next heartbeat saves them."""
        self.job = replace(self.job, **changes)

    def keep(self, **options: Any) -> None:
        """Save options for a later run of the job."""
        self.job = replace(self.job, options={**self.job.options, **options})
        self.beat(now=True)

    def end(self, state: str, counts: Mapping[str, int], note: str = "") -> Job:
        """Save the result; a job that was paused waits instead, for the next process."""
        at = self._store.now()
        paused = self._paused and state == CANCELLED
        self.job = replace(
            self.job,
            state=WAITING if paused else state,
            counts=dict(counts),
            note="its process has ended; the next one goes on" if paused else note,
            updated_at=at,
            ended_at=None if paused else at,
        )
        if self.begun:
            with suppress(CancelledError):  # another process goes on with it
                self._write()
        return self.job

    def _write(self) -> bool:
        known = self._store.read(self.job.id)
        ours = (self.job.run, RUNNING)
        if known is not None and (int(known.get("run", 1)), known.get("state")) != ours:
            if self.job.state == RUNNING:
                logger.warning(
                    "Job %s: another process goes on with it or has ended it, because this one "
                    "gave no sign of life for a while. It ends here",
                    self.job.id,
                )
            raise TakenOverError
        return self._store.write(self.job.id, self.job.to_stored())


class _UnlistedRun(JobRun):
    """A run of a job that the store never has."""

    def _write(self) -> bool:
        return False


def _job(state: Mapping[str, Any], now: datetime) -> Job | None:
    return readable(f"the job {state.get('id')}", lambda: Job.from_stored(state, now))
