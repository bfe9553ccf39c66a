"""Counted starts that no pool process has accepted yet.

The main process counts a job before it hands it to a prefork pool. A lost connection or a
shutdown drops jobs that no process has taken: these never start and are not charged. A job that
was written to a process completely will start.

Source: ``AsynPool.flush`` in
https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py and ``ApplyResult`` in
https://github.com/celery/billiard/blob/main/billiard/pool.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import isgenerator
from typing import Any

from celery import VERSION
from celery.concurrency import prefork

from celery_dlq.worker.lifecycle import GuardedRequest

_RUN, _TERMINATE = 0, 2  # billiard.pool.RUN and TERMINATE

FLUSHES_QUEUES = VERSION >= (5, 5)
"""True if ``AsynPool.process_flush_queues`` reads what a dead process reported.

In Celery 5.4 it waits for errors of the pipe and not for data, because its ``_select`` registers
a descriptor once for each, and the second time counts: it always finds nothing.
"""

# Pools that run a job in this process and report its start right before, where it runs.
_HERE = frozenset(f"celery.concurrency.{name}" for name in ("solo", "thread", "gevent", "eventlet"))


def starts_here(pool_class: Any) -> bool:
    """True if a pool's ``accept_callback`` runs right before the task, where the task runs.

    Source: ``apply_target`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/base.py
    """
    return getattr(pool_class, "__module__", None) in _HERE


def is_closed(pool: Any) -> bool:
    """True if a prefork pool drops new jobs; see ``Pool.apply_async`` of billiard.

    The handler of a cold shutdown ends the pool wherever it interrupts the main thread; the pool
    that is gone by then still takes jobs, and drops them.

    Source: ``TaskPool.on_stop`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/prefork.py
    """
    inner = getattr(pool, "_pool", None)
    if inner is None:
        return isinstance(pool, prefork.TaskPool)
    return bool(getattr(inner, "_state", _RUN) != _RUN)


def drop_failed(pool: Any, task_id: Any) -> None:
    """Forget a job that could not be serialized; a shutdown would wait for it."""
    cache = getattr(getattr(pool, "_pool", None), "_cache", None)
    for job in list((cache or {}).values()):
        if job.correlation_id == task_id and not hasattr(job, "_payload"):
            job.discard()


class Dispatched:
    """Requests that were counted and handed to a prefork pool, until a process accepts them."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[GuardedRequest, Any]] = {}

    def add(self, request: GuardedRequest, job: Any) -> None:
        """Track a request that was handed to a pool.

        Args:
            request: Celery's request.
            job: What the pool's ``apply_async`` returned.
        """
        self._jobs[id(request)] = (request, job)

    def accepted(self, request: GuardedRequest) -> None:
        """Forget a request: a process accepted it, or it ended."""
        self._jobs.pop(id(request), None)

    def requests(self) -> list[GuardedRequest]:
        """All requests that no process has accepted."""
        return [request for request, _job in list(self._jobs.values())]

    def before_flush(self, pool: Any) -> list[GuardedRequest]:
        """Find the requests that Celery is about to drop because no process has accepted them.

        A job that was written to a live process starts all the same: it is marked as accepted,
        so that the pool keeps it and reports its start and its end.

        Returns:
            The requests that never start.
        """
        inner: Any = getattr(pool, "_pool", None)
        if not hasattr(inner, "outbound_buffer"):
            return []  # only the event loop's pool drops jobs
        never: list[GuardedRequest] = []
        for request, job in list(self._jobs.values()):
            process = getattr(job, "_write_to", None)
            if process is not None and not process._is_alive():  # noqa: SLF001 - as the pool checks
                _read_pending(inner, process)
            elif process is not None and (_is_written(job) or inner._state == _RUN):  # noqa: SLF001
                job._accepted = True  # noqa: SLF001 - all that `flush` checks
                continue
            if self._jobs.pop(id(request), None) is not None:
                never.append(request)
        return never

    def lost(self, pool: Any) -> list[GuardedRequest]:
        """Forget and return kept requests whose process died before it took the job."""
        inner: Any = getattr(pool, "_pool", None)
        never: list[GuardedRequest] = []
        for request, job in list(self._jobs.values()):
            process: Any = getattr(job, "_write_to", None)
            kept = process is not None and job._accepted  # noqa: SLF001
            if not kept or process._is_alive():  # noqa: SLF001
                continue
            _read_pending(inner, process)
            if self._jobs.pop(id(request), None) is not None:
                job.discard()
                never.append(request)
        return never

    def all_lost(self) -> list[GuardedRequest]:
        """Forget and return all requests: the pool is gone."""
        never = self.requests()
        self._jobs.clear()
        return never


def flush_queues(inner: Any, hub: Any, process: Any) -> None:
    """Read what a dead process reported; takes the place of ``AsynPool.process_flush_queues``.

    Args:
        inner: The pool's ``AsynPool``.
        hub: The worker's event loop, which may have read a part of the next message.
        process: A process of the pool.
    """
    for message in _reported(inner, hub, process.outq._reader):  # noqa: SLF001 - as the pool does
        inner._result_handler.on_state_change(message)  # noqa: SLF001


def _reported(inner: Any, hub: Any, reader: Any) -> Iterator[Any]:
    with suppress(OSError, EOFError):  # closed, or its last message is cut off
        read_in_part, _ = hub.readers.get(reader.fileno(), (None, ()))
        if isgenerator(read_in_part) and next(read_in_part, StopIteration) is not StopIteration:
            return  # the rest was never written
        while inner._state != _TERMINATE and reader.poll(0):  # noqa: SLF001
            yield reader.recv()


def _is_written(job: Any) -> bool:
    writer = getattr(job, "_writer", None)
    generator = writer() if writer is not None else None
    return generator is None or generator.gi_frame is None


def _read_pending(inner: Any, process: Any) -> None:
    """Read what a dead process reported: it may have accepted its job."""
    with suppress(OSError, ValueError):
        inner.process_flush_queues(process)
