"""What a pool was given: the pool says whether it still has it.

The main process counts a job before it hands it to a prefork pool. A lost connection or a
shutdown drops jobs that no process was given: these never start and are not charged. A job that
was written to a process will start. A task that the pool has no more, while its message is not
settled, has an end that Celery never reports: in the pools of this process, an error outside the
task's body (its result cannot be stored, say) passes all callbacks by.

Source: ``AsynPool.flush`` in
https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py, ``ApplyResult`` in
https://github.com/celery/billiard/blob/main/billiard/pool.py and ``apply_target`` in
https://github.com/celery/celery/blob/main/celery/concurrency/base.py
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.pool import EX_OK, EX_RECYCLE
from celery import signals
from celery.app import trace
from celery.concurrency import prefork

from celery_dlq import timing
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.worker.shutdown_signals import LEFT_BY_SIGNAL, SHUTDOWN_SIGNALS
from celery_dlq.writing.lifecycle import DeliveryState

_LEFT = frozenset({EX_OK, EX_RECYCLE, LEFT_BY_SIGNAL})  # e.g. after its last task
_LENGTH = Struct(">i")  # before each message of a process
_READ_BYTES = 1 << 16  # all that a pipe holds: a failure may have dozens of KB
_MOST_BYTES = 1 << 20
_WAIT_SECONDS = 0.5  # for a result at a shutdown, as Celery
_BEING_SETTLED = (DeliveryState.ENDING, DeliveryState.WAITING_FOR_STORE)

ENDED: Future[None] = Future()
"""What stands for a job that has ended, or never was one."""
ENDED.set_result(None)

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

    Source: ``BasePool.close`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/base.py
    """
    return isinstance(pool, prefork.TaskPool) and not pool.active


def drop_failed(pool: Any, task_id: Any) -> None:
    """Forget the newest job, which could not be serialized; a shutdown would wait for it."""
    cache = getattr(getattr(pool, "_pool", None), "_cache", None) or {}
    for number, job in list(cache.items())[-1:]:
        if job.correlation_id == task_id and job._write_to is None:  # noqa: SLF001
            cache.pop(number, None)


class AtWork:
    """Requests that a pool was given, until their messages are settled.

    With threads, greenlets and solo, from the moment at which their thread begins them.
    """

    def __init__(self) -> None:
        self._requests: set[Any] = set()
        self._missed: set[Any] = set()
        self._looked_at = float("-inf")
        self.add = self._requests.add  # every task pays for these two
        self.over = self._requests.discard

    def requests(self) -> list[Any]:
        """All of them."""
        return list(self._requests)

    def keep_jobs(self, pool: Any) -> list[tuple[int, Any, Any]] | None:
        """Keep jobs that Celery is about to forget though they run, or will run.

        It discards a job that was written to a process and not accepted yet, and version 5.4 every
        job.
        """
        inner: Any = getattr(pool, "_pool", None)
        if not hasattr(inner, "dlq_results"):
            return None  # only the event loop's pool drops jobs
        jobs = [found for found in list(inner._cache.items()) if _is_kept(pool, found[1])]  # noqa: SLF001
        for _, job in jobs:
            job.discard = lambda: None
        return [(number, job, job._write_to) for number, job in jobs]  # noqa: SLF001

    def give_back_jobs(self, pool: Any, jobs: list[tuple[int, Any, Any]] | None) -> list[Any]:
        """Let the pool have the kept jobs as before, and find what it dropped.

        A process that retires leaves the job that it did not take to another one.
        """
        if jobs is None:
            return []
        inner = pool._pool  # noqa: SLF001
        for number, job, process in jobs:
            del job.discard
            if not job.ready():
                inner._cache.setdefault(number, job)  # noqa: SLF001 - Celery 5.4 clears it
                if not is_closed(pool) and process not in inner._pool:  # noqa: SLF001
                    inner.on_partial_read(job, process)
        has_task = asked_for_tasks(pool)
        given = [one for one in self.requests() if one.dlq_job is not None]
        return [one for one in given if one.time_start is None and not has_task(one)]

    def take_missed(self, pool: Any) -> list[Any]:
        """Forget and return requests that their pool has no more, though nobody settled them.

        Found twice in a row, a tick apart: another thread, which reads results, may be settling
        one now.
        """
        now = time.monotonic()
        if now - self._looked_at < timing.current.tick / 2:
            return []  # a busy loop catches up
        self._looked_at = now
        if is_closed(pool):
            return []  # a shutdown gives all back
        has_task, found = asked_for_tasks(pool), set()
        for request in self.requests():
            if request.acknowledged:
                self.over(request)
            elif request.dlq_state not in _BEING_SETTLED and not has_task(request):
                found.add(request)
        missed, self._missed = self._missed & found, found
        for request in missed:
            self.over(request)
        return list(missed)

    def all_dispatched(self) -> list[Any]:
        """Those that no process has accepted."""
        return [one for one in self.requests() if one.dlq_state is DeliveryState.DISPATCHED]


def has_crashed(request: Any) -> bool:
    """True if the pool process that runs a request was killed, or left with an error.

    Its end is left to the pool to read. A signal of a shutdown is left to it, too.

    Source: https://docs.python.org/3/library/os.html#os.waitid
    """
    if request.dlq_starts_here or request.worker_pid is None:
        return False
    try:
        found = os.waitid(os.P_PID, request.worker_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (OSError, AttributeError):  # the pool has read it; Windows, older macOS
        return False
    if found is None:
        return False
    how = found.si_status
    return how not in (_LEFT if found.si_code == os.CLD_EXITED else SHUTDOWN_SIGNALS)


def asked_for_tasks(pool: Any) -> Callable[[Any], bool]:
    """Ask a pool which tasks it still has: queued, written to a process, or running."""
    cache = getattr(getattr(pool, "_pool", None), "_cache", None)
    jobs = None if cache is None else {*cache.values()}

    def has_task(request: Any) -> bool:
        """True if the pool has a request's task, or if that is not known."""
        job = request.dlq_job
        if job is None:
            return True
        if isinstance(job, Future):
            return not job.done()
        job = job()  # else a weak reference
        if request.dlq_starts_here:
            return job is not None and not job.dead  # a greenlet
        return jobs is None or job in jobs

    return has_task


def _is_kept(pool: Any, job: Any) -> bool:
    generator = getattr(job, "_writer", lambda: None)()
    if generator is not None and generator.gi_frame is not None and is_closed(pool):
        return False  # else what was written in part is written to its end
    return job._write_to is not None  # noqa: SLF001 - also if a process has accepted it


class Report(ExceptionInfo):
    """A failure as a process of a prefork pool sends it: its traceback begins with the task.

    From Python 3.11 on billiard sends where each instruction of a frame's function stands. Of the
    function in which Celery calls the task, which nobody asks for, that is 31 KB: more to pickle,
    to read and to collect than all else of a failure. The text of the traceback is whole, and so is
    the traceback that the process itself logs.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        tb = self.tb
        while tb and tb.tb_next and tb.tb_frame.f_code.co_filename == trace.__file__:
            tb = tb.tb_next
        return object.__new__, (ExceptionInfo,), {**vars(self), "tb": tb}


def shorten_reports() -> None:
    """Let the processes of pools that start from now on send a `Report` of each failure and retry.

    A second call changes nothing.
    """
    for signal in (signals.task_failure, signals.task_retry):
        signal.connect(_shorten, weak=False, dispatch_uid="celery_dlq.reports")


def _shorten(einfo: Any = None, **_: object) -> None:
    if type(einfo) is ExceptionInfo:
        einfo.__class__ = Report


class Results:
    """What the processes of a prefork pool report: one call reads all of it that has arrived.

    Celery reads length and body of a message apart, two messages a task, and registers the pipe
    with the event loop after each. What it has read of a message whose rest has not arrived, it
    forgets when a connection is lost, when the process dies, and before version 5.7 at a shutdown:
    then it takes the rest for the beginning of another one, and never handles a result of that
    process again, hangs, or ends the worker.

    Source: ``Hub.reset`` in https://github.com/celery/kombu/blob/main/kombu/asynchronous/hub.py,
    ``ResultHandler`` and ``AsynPool.process_flush_queues`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.begin_turn: Callable[[], object] = bool
        self._begun: dict[int, bytearray] = {}  # by pipe: what has arrived of its next message
        handler = inner._result_handler  # noqa: SLF001
        handler._recv_message = self.receive  # noqa: SLF001
        handler._flush_outqueue = self.read_at_shutdown  # noqa: SLF001
        inner.process_flush_queues = self.read_of_dead

    def receive(self, add_reader: Any, fd: int, callback: Any) -> Iterator[None]:
        """Handle what has arrived; a generator that goes on while a message is not whole."""
        self.begin_turn()
        messages, waited = self._read(fd), False
        while fd in self._begun:
            self._call_for_each(callback, messages)
            waited = True
            yield  # which registers this generator instead of the handler
            messages = self._read(fd)
        if waited:
            add_reader(fd, self._inner._result_handler.handle_event, fd)  # noqa: SLF001
        self._call_for_each(callback, messages)

    def read_of_dead(self, process: Any) -> None:
        """Handle all that a dead process reported; the rest of its last message never comes."""
        messages: list[bytearray] = []
        reader = process.outq._reader  # noqa: SLF001 - as the pool does
        with suppress(OSError, EOFError):  # closed
            while reader.poll(0):
                messages += self._read(reader.fileno())
        if not reader.closed:
            self._begun.pop(reader.fileno(), None)
        self._call_for_each(self._inner._result_handler.on_state_change, messages)  # noqa: SLF001

    def read_at_shutdown(self, fd: int, remove: Any, processes: Any, callback: Any) -> None:
        """Handle what a process reports within half a second; ``remove`` if it is gone."""
        messages: list[bytearray] = []
        try:
            if processes[fd].outq._reader.poll(_WAIT_SECONDS):  # noqa: SLF001
                messages = self._read(fd)
        except (KeyError, OSError, EOFError):
            remove(fd)
        self._call_for_each(callback, messages)

    def _read(self, fd: int) -> list[bytearray]:
        """Read without waiting; an error at the end, as Celery raises it.

        Again if the last message is there in part: a process writes the length of a long one apart,
        and what waits for the rest is registered with the event loop, twice.
        """
        data, messages = self._begun.pop(fd, None) or bytearray(), list[bytearray]()
        for _ in range(2):
            try:
                more = os.read(fd, min(max(_READ_BYTES, _missing(data)), _MOST_BYTES))
            except BlockingIOError:
                break
            if not more and not messages:
                raise OSError("End of file during message") if data else EOFError
            data += more
            while len(data) >= _LENGTH.size and not _missing(data):
                end = _LENGTH.unpack_from(data)[0] + _LENGTH.size
                messages.append(data[_LENGTH.size : end])
                del data[:end]
            if not data:
                break
        if data:
            self._begun[fd] = data
        return messages

    def _call_for_each(self, callback: Callable[[Any], object], messages: list[bytearray]) -> None:
        """Handle all messages that were read; then raise the first error: a lost connection, say.

        What they start is counted before a process gets it: that is written after all of them.
        """
        error: BaseException | None = None
        for one in messages:
            try:
                message = pickle.loads(one)  # noqa: S301 - of our own processes, as Celery does
                if message:
                    callback(message)
            except BaseException as exc:  # noqa: BLE001 - raised below
                error = error or exc
            # A failure is thousands of tuples: Python uses them again if they are free by then.
            message = None
        if error is not None:
            raise error


class Jobs:
    """What the processes of a prefork pool are given: once a turn, after all that it counted.

    Celery registers the pipes of its processes with the event loop, asks which of them can be
    written to, writes, and takes all of them out again, in each turn. Of a pipe that is not in,
    that is a system call that fails, and an exception.

    Source: ``AsynPool._create_write_handlers`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py and
    ``Hub.remove_writer`` in
    https://github.com/celery/kombu/blob/main/kombu/asynchronous/hub.py
    """

    def __init__(self, inner: Any, hub: Any, counted: PipelinedConnection) -> None:
        self._inner = inner
        self._hub = hub
        self._counted = counted
        inner.dlq_results.begin_turn = self.begin
        hub.on_tick.add(self.write)
        if "remove_writer" not in vars(hub):
            hub.remove_writer = partial(_remove_writer, hub, hub.remove_writer)

    def begin(self) -> None:
        """Gather the counts of a turn, unless Celery may write what they are of before its end."""
        if not self._hub.writers:
            self._counted.gather()

    def write(self) -> None:
        """Write to idle processes; what is left, Celery writes when a pipe can take it."""
        self._counted.send_gathered()
        watch, queued = self._inner.on_poll_start, self._inner.outbound_buffer
        self._hub.on_tick.discard(watch)  # a connection has another one
        if queued:
            self._hub.consolidate_callback([*self._inner._all_inqueues])  # noqa: SLF001
        if queued or self._hub.writers:
            watch()


def _remove_writer(hub: Any, remove: Callable[[Any], object], fd: Any) -> None:
    """Take a pipe out of the event loop, if it is in."""
    if not isinstance(fd, int) or fd in hub.writers:
        remove(fd)


def _missing(data: bytearray) -> int:
    """How many bytes of a message that has begun have not arrived; 0 if its length has not."""
    if len(data) < _LENGTH.size:
        return 0
    length: int = _LENGTH.unpack_from(data)[0]
    return max(0, length + _LENGTH.size - len(data))
