"""Starts that are counted, and that no pool process has accepted yet.

A prefork pool gets a job from the main process, which must count it before. A lost connection
and a shutdown drop jobs that no process has taken: those never start, and are not charged.
What was written to a process whole, it will start.

Source: ``AsynPool.flush`` in
https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py and ``ApplyResult`` in
https://github.com/celery/billiard/blob/main/billiard/pool.py
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery_dlq.worker.lifecycle import GuardedRequest

_RUN = 0  # billiard.pool.RUN

# Pools that run a job in this process, and say so right before, in the place where it runs.
_HERE = frozenset(f"celery.concurrency.{name}" for name in ("solo", "thread", "gevent", "eventlet"))


def starts_here(pool_class: Any) -> bool:
    """Whether a pool's ``accept_callback`` runs right before the task, where the task runs.

    Source: ``apply_target`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/base.py
    """
    return getattr(pool_class, "__module__", None) in _HERE


def is_closed(pool: Any) -> bool:
    """Whether a prefork pool drops what it is given; see ``Pool.apply_async`` of billiard."""
    return getattr(getattr(pool, "_pool", None), "_state", _RUN) != _RUN


def drop_failed(pool: Any, task_id: Any) -> None:
    """Forget a job that could not be made ready for a process; a shutdown would wait for it."""
    cache = getattr(getattr(pool, "_pool", None), "_cache", None)
    for job in list((cache or {}).values()):
        if job.correlation_id == task_id and not hasattr(job, "_payload"):
            job.discard()


class Dispatched:
    """The requests that were counted and given to a prefork pool, until a process accepts them."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[GuardedRequest, Any]] = {}

    def add(self, request: GuardedRequest, job: Any) -> None:
        """A pool was given a request.

        Args:
            request: Celery's request.
            job: What the pool's ``apply_async`` returned.
        """
        self._jobs[id(request)] = (request, job)

    def accepted(self, request: GuardedRequest) -> None:
        """A process accepted it, or it came to an end otherwise."""
        self._jobs.pop(id(request), None)

    def requests(self) -> list[GuardedRequest]:
        """All that wait to be accepted."""
        return [request for request, _job in list(self._jobs.values())]

    def before_flush(self, pool: Any) -> list[GuardedRequest]:
        """Celery is about to drop the jobs that no process has accepted.

        A job that was written to a live process starts all the same: the pool keeps it, as
        it keeps accepted ones, so that its start and its end are seen.

        Returns:
            The requests that never start.
        """
        inner: Any = getattr(pool, "_pool", None)
        if not hasattr(inner, "outbound_buffer"):
            return []  # nothing is dropped but by the pool of the event loop
        never: list[GuardedRequest] = []
        for request, job in list(self._jobs.values()):
            process = getattr(job, "_write_to", None)
            if process is not None and not process._is_alive():  # noqa: SLF001 - as the pool asks
                _read_what_it_said(inner, process)
            elif process is not None and (_is_written(job) or inner._state == _RUN):  # noqa: SLF001
                job._accepted = True  # noqa: SLF001 - the only word that `flush` listens to
                continue
            if self._jobs.pop(id(request), None) is not None:
                never.append(request)
        return never

    def lost(self, pool: Any) -> list[GuardedRequest]:
        """The requests whose process died before it took the job, which the pool had kept."""
        inner: Any = getattr(pool, "_pool", None)
        never: list[GuardedRequest] = []
        for request, job in list(self._jobs.values()):
            process: Any = getattr(job, "_write_to", None)
            kept = process is not None and job._accepted  # noqa: SLF001
            if not kept or process._is_alive():  # noqa: SLF001
                continue
            _read_what_it_said(inner, process)
            if self._jobs.pop(id(request), None) is not None:
                job.discard()
                never.append(request)
        return never

    def all_lost(self) -> list[GuardedRequest]:
        """The pool is gone, and with it all that it never started."""
        never = self.requests()
        self._jobs.clear()
        return never


def _is_written(job: Any) -> bool:
    writer = getattr(job, "_writer", None)
    generator = writer() if writer is not None else None
    return generator is None or generator.gi_frame is None


def _read_what_it_said(inner: Any, process: Any) -> None:
    """A process may have accepted its job and died before anybody read that."""
    with suppress(OSError, ValueError):
        inner.process_flush_queues(process)
