"""Jobs: long operations that can be watched, cancelled, and resumed after a crash."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from celery_dlq.backends.base import JobStore
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import whoami
from celery_dlq.record import from_micros, iso, to_micros

SILENT = timedelta(seconds=15)
"""A running job without a heartbeat for this long has died."""

_BEAT_SECONDS = 1.0

RUNNING, DONE, CANCELLED, STOPPED, FAILED, INTERRUPTED = (
    "running",
    "done",
    "cancelled",
    "stopped",
    "failed",
    "interrupted",
)
_TIMES = ("started_at", "updated_at", "ended_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One operation on many letters.

    Attributes:
        id: Begins with the time, so ids sort by age.
        kind: ``redrive``, ``discard`` or ``purge``.
        queue: The dead-letter queue.
        state: ``running``, ``done``, ``cancelled``, ``stopped`` (by its canary), ``failed``, or
            ``interrupted``: running, but its process has died.
        actor: ``user@host``.
        started_at: Time of its start.
        updated_at: Time of its last heartbeat.
        ended_at: Time of its end.
        filter: The letters it works on, from `LetterFilter.to_json`.
        options: Its options by name.
        until: The last position that it may touch; letters that arrive later are left out.
        position: The last position that is done.
        total: Number of letters to work on; ``None`` if unknown.
        counts: Its results so far, by the names of its report.
        note: The reason why it stopped or failed.
        run: Number of its starts: 1, plus 1 for each time it was resumed.
        pid: Id of its process.
        host: Host of that process.
    """

    id: str
    kind: str
    queue: str
    state: str = RUNNING
    actor: str = ""
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    filter: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    until: str | None = None
    position: str | None = None
    total: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    run: int = 1
    pid: int = 0
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {**asdict(self), **{name: iso(getattr(self, name)) for name in _TIMES}}

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with times in microseconds since 1970."""
        times = {name: getattr(self, name) for name in _TIMES}
        return {
            **asdict(self),
            **{name: None if at is None else to_micros(at) for name, at in times.items()},
        }

    @classmethod
    def from_stored(cls, value: Mapping[str, Any]) -> Job:
        """Read the result of `to_stored`; ignores keys of later versions."""
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for name in _TIMES:
            if known.get(name) is not None:
                known[name] = from_micros(known[name])
        return cls(**known)


class CancelledError(Exception):
    """The job was cancelled, or another process resumed it; raised between two batches."""


class Jobs:
    """The jobs of an app.

    Args:
        store: Keeps them; its clock decides which have died.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def all(self) -> list[Job]:
        """All jobs in the store, newest first."""
        states = self._store.all()
        now = self._store.now()
        return [_seen(Job.from_stored(state), now) for state in states]

    def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            NotFound: The store has no job with this id (any more).
        """
        state = self._store.read(job_id)
        if state is None:
            raise NotFound(f"expected the id of a job, got {job_id!r}; `dlq jobs` lists them")
        return _seen(Job.from_stored(state), self._store.now())

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job has ended.
        """
        job = self.get(job_id)
        if job.state == INTERRUPTED:
            ended = replace(job, state=CANCELLED, ended_at=self._store.now())
            self._store.write(job_id, ended.to_stored())
            return ended
        if job.state != RUNNING:
            raise DLQError(f"expected a running job, got {job_id}, which is {job.state}")
        self._store.cancel(job_id)
        return job

    def new(
        self,
        kind: str,
        queue: str,
        *,
        where: Mapping[str, Any],
        options: Mapping[str, Any],
        until: str | None,
        total: int | None,
    ) -> JobRun:
        """Start a job; the store has nothing of it before its first `JobRun.beat`."""
        now = self._store.now()
        moment = f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}"
        job = Job(
            id=f"{moment}-{uuid4().hex[:6]}",
            kind=kind,
            queue=queue,
            actor=whoami(),
            started_at=now,
            updated_at=now,
            filter=where,
            options=options,
            until=until,
            total=total,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        return JobRun(self._store, job)

    def again(self, job_id: str) -> JobRun:
        """Resume a job whose process has died, or that was cancelled or stopped.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job is running or done.
        """
        job = self.get(job_id)
        if job.state in (RUNNING, DONE):
            raise DLQError(
                f"expected a job that was interrupted, got {job_id}, which is {job.state}"
            )
        if not self._store.acquire_run(job_id, job.run + 1):
            raise DLQError(f"another process has just resumed job {job_id}")
        self._store.cancel(job_id, wanted=False)
        job = replace(
            job,
            state=RUNNING,
            run=job.run + 1,
            ended_at=None,
            note="",
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        run = JobRun(self._store, job)
        run.beat(now=True)
        return run


class JobRun:
    """One run of a job, in one process.

    Args:
        store: Keeps the job.
        job: The job in its current state.
    """

    def __init__(self, store: JobStore, job: Job) -> None:
        self._store = store
        self.job = job
        self._token = uuid4().hex
        self._written_at: float | None = None

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
        now: bool = False,
    ) -> None:
        """Send a heartbeat with the results so far, at most once a second.

        Raises:
            CancelledError: The job was cancelled, or another process resumed it.
        """
        self.job = replace(
            self.job,
            counts=self.job.counts if counts is None else dict(counts),
            position=position or self.job.position,
        )
        at = time.monotonic()
        if self._written_at is None or now or at - self._written_at >= _BEAT_SECONDS:
            self._written_at = at
            self.job = replace(self.job, updated_at=self._store.now())
            if self._write():
                raise CancelledError

    def keep(self, **options: Any) -> None:
        """Save options for a later run of the job."""
        self.job = replace(self.job, options={**self.job.options, **options})
        self.beat(now=True)

    def end(self, state: str, counts: Mapping[str, int], note: str = "") -> Job:
        """Save the result."""
        at = self._store.now()
        self.job = replace(
            self.job, state=state, counts=dict(counts), note=note, updated_at=at, ended_at=at
        )
        if self.begun:
            self._write()
        return self.job

    def _write(self) -> bool:
        known = self._store.read(self.job.id)
        if known is not None and int(known.get("run", 1)) > self.job.run:
            raise CancelledError  # our heartbeat was late, and another process resumed the job
        return self._store.write(self.job.id, self.job.to_stored())


def _seen(job: Job, now: datetime) -> Job:
    """The job, as ``interrupted`` if it is running without a heartbeat or a process."""
    if job.state == RUNNING and (now - job.updated_at > SILENT or _is_dead(job)):
        return replace(job, state=INTERRUPTED)
    return job


def _is_dead(job: Job) -> bool:
    """True if its process has certainly ended; only its own host can know."""
    if job.host != socket.gethostname() or not job.pid:
        return False
    try:
        os.kill(job.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
