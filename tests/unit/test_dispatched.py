"""Starts that were counted and never happened: what a prefork pool does with its jobs."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from billiard.einfo import ExceptionInfo
from billiard.pool import ApplyResult
from billiard.queues import _SimpleQueue
from celery import Celery, signals
from celery.app.trace import build_tracer
from celery.concurrency import prefork, solo
from intervals import change
from waiting import poll

from celery_dlq.worker.bootsteps import read_before_put_back
from celery_dlq.worker.dispatched import (
    ENDED,
    AtWork,
    Results,
    asked_for_tasks,
    drop_failed,
    has_crashed,
    is_closed,
    shorten_reports,
    starts_here,
)
from celery_dlq.writing.lifecycle import DeliveryState


class Process:
    """A pool process."""


class Inner:
    """The part of Celery's ``AsynPool`` that is used."""

    def __init__(self, *processes: Process) -> None:
        self._pool = list(processes)
        self._cache: dict[int, Any] = {}
        self.dlq_results = self  # as in the pool of an event loop
        self.outbound_buffer: list[Any] = []
        self._fileno_to_outq: dict[int, Any] = {}

    def on_partial_read(self, job: Any, _process: Any) -> None:
        if not job.accepted():
            self.outbound_buffer.append(job)

    def give(
        self, process: Process | None, *, writing: bool = False, pid: int | None = None
    ) -> Any:
        """A job, maybe written to a process, whole or in part, or accepted by one."""
        job = ApplyResult(self._cache, None)
        generator = SimpleNamespace(gi_frame=object() if writing else None)
        job._write_to, job._writer = process, lambda: generator
        job._accepted, job._worker_pid = pid is not None, pid
        return job

    def flush(self) -> None:
        """Forget what no process accepted."""
        for job in list(self._cache.values()):
            if not job._accepted:
                job.discard()


def a_pool(inner: Any = None, *, closed: bool = False) -> Any:
    """A prefork pool that was started, and maybe closed."""
    pool = prefork.TaskPool(1)
    pool._pool, pool._state = inner, pool.RUN
    if closed:
        pool.on_close = Mock()
        pool.close()
    return pool


def a_request(job: Any, **more: Any) -> Any:
    """A request that a pool was given."""
    return Request(
        dlq_job=job,
        dlq_starts_here=False,
        dlq_state=DeliveryState.DISPATCHED,
        acknowledged=False,
        time_start=None,
        **more,
    )


class Request(SimpleNamespace):
    """Celery's, as far as it is looked at."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("written", "writing", "closed", "stays"),
    [
        (False, False, False, False),  # not written: dropped
        (True, False, False, True),  # written: it will start
        (True, False, True, True),  # the same in a pool that closes
        (True, True, False, True),  # Celery writes the rest of it
        (True, True, True, False),  # it does not, once the pool closes
    ],
)
def test_what_is_dropped_before_it_starts(
    *, written: bool, writing: bool, closed: bool, stays: bool
) -> None:
    """Only what no process was given; and the pool has the others as before."""
    process = Process()
    inner, at_work = Inner(process), AtWork()
    job = inner.give(process if written else None, writing=writing)
    request = a_request(weakref.ref(job))
    at_work.add(request)
    pool = a_pool(inner, closed=closed)

    kept = at_work.keep_jobs(pool)
    inner.flush()
    never = at_work.give_back_jobs(pool, kept)

    assert never == ([] if stays else [request])
    assert list(inner._cache.values()) == ([job] if stays else [])
    assert not job._accepted
    assert inner.outbound_buffer == []


def test_a_process_that_retires_meanwhile_leaves_its_job_to_another() -> None:
    """Else the job would wait for a process that is gone."""
    inner, at_work = Inner(), AtWork()
    job = inner.give(Process())
    pool = a_pool(inner)
    assert at_work.give_back_jobs(pool, at_work.keep_jobs(pool)) == []
    assert inner.outbound_buffer == [job]


def test_a_job_that_runs_is_kept_where_celery_forgets_all() -> None:
    """Celery 5.4 clears the cache of its pool; then it would not handle the result."""
    inner, at_work = Inner(), AtWork()
    job = inner.give(Process(), pid=4711)
    pool = a_pool(inner)
    kept = at_work.keep_jobs(pool)
    inner._cache.clear()
    assert at_work.give_back_jobs(pool, kept) == []
    assert (list(inner._cache.values()), job._accepted) == ([job], True)
    assert inner.outbound_buffer == []


def test_nothing_is_given_back_in_pools_that_drop_nothing() -> None:
    """A pool with threads of its own works off what it has; only its end is the end."""
    at_work, request = AtWork(), a_request(None)
    at_work.add(request)
    pool = SimpleNamespace(_pool=SimpleNamespace())
    assert at_work.give_back_jobs(pool, at_work.keep_jobs(pool)) == []
    assert at_work.all_dispatched() == [request]


class Greenlet:
    """One that has ended, or not."""

    dead = False


def test_a_pool_knows_what_it_still_has() -> None:
    """Whatever refers to the request; and where it cannot tell, it has it."""
    inner, future, greenlet = Inner(), Future[None](), Greenlet()
    pool, job = SimpleNamespace(_pool=inner), inner.give(None)
    here = a_request(weakref.ref(greenlet))
    here.dlq_starts_here = True
    requests = [a_request(weakref.ref(job)), a_request(future), here]
    unknown = [a_request(None), a_request(weakref.ref(job))]
    assert all(map(asked_for_tasks(pool), requests))
    assert asked_for_tasks(SimpleNamespace(_pool=None))(unknown[1])

    job.discard()
    future.set_result(None)
    greenlet.dead = True  # type: ignore[misc]
    assert not any(map(asked_for_tasks(pool), requests))
    assert asked_for_tasks(pool)(unknown[0])
    del job, greenlet
    gc.collect()
    assert not asked_for_tasks(pool)(requests[0])
    assert not asked_for_tasks(pool)(requests[2])


def test_a_request_whose_end_nobody_reports_is_found_at_the_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that was settled, whose end is handled right now, or whose letter waits."""
    change(monkeypatch, tick=0)
    at_work, pool = AtWork(), SimpleNamespace(_pool=None)
    missed, settled, ending, waiting = (a_request(ENDED) for _ in range(4))
    settled.acknowledged = True
    ending.dlq_state, waiting.dlq_state = DeliveryState.ENDING, DeliveryState.WAITING_FOR_STORE
    for one in (missed, settled, ending, waiting):
        at_work.add(one)
    assert at_work.take_missed(pool) == []
    assert at_work.take_missed(pool) == [missed]
    assert at_work.take_missed(pool) == []
    assert {*at_work.requests()} == {ending, waiting}
    assert at_work.take_missed(a_pool(closed=True)) == []


def test_a_closed_pool_is_known() -> None:
    """Only prefork pools drop what they are given then."""
    assert is_closed(a_pool(closed=True))
    assert not is_closed(a_pool())
    gone = a_pool()
    gone.terminate()
    assert is_closed(gone)
    assert not is_closed(solo.TaskPool(1))
    assert not is_closed(SimpleNamespace())


def test_a_job_that_could_not_be_made_ready_is_forgotten() -> None:
    """Otherwise a shutdown would wait for it; others stay, also of the same task."""
    cache: dict[int, Any] = {}
    pool = SimpleNamespace(_pool=SimpleNamespace(_cache=cache))
    earlier, other, failed = (ApplyResult(cache, None, correlation_id=one) for one in "aba")
    drop_failed(pool, "a")
    assert [*cache.values()] == [earlier, other]
    drop_failed(pool, "a")
    other.discard()
    earlier._write_to = Process()
    drop_failed(pool, "a")
    assert [*cache.values()] == [earlier]
    assert not failed.ready()
    drop_failed(SimpleNamespace(_pool=None), "a")


def test_pools_that_run_tasks_in_this_process_are_known() -> None:
    """The others are counted when they are given the task."""
    thread = pytest.importorskip("celery.concurrency.thread")
    prefork = pytest.importorskip("celery.concurrency.prefork")
    solo = pytest.importorskip("celery.concurrency.solo")
    assert [starts_here(m.TaskPool) for m in (thread, solo, prefork)] == [True, True, False]


class Reading:
    """An ``AsynPool`` and a process of it that is dead; what it reported is still in its pipe."""

    process_flush_queues: Callable[[Any], None]
    _state = 0

    def __init__(self) -> None:
        self.outq = _SimpleQueue(rnonblock=True)
        self.fd = self.outq._reader.fileno()
        self.readers: dict[int, Any] = {}  # the event loop's
        self.read: list[Any] = []
        self.put_back: list[Any] = []
        self._result_handler = SimpleNamespace(
            on_state_change=self.on_state_change,
            handle_event=None,
        )
        Results(self)
        self.job = SimpleNamespace(_accepted=False, worker_pids=list)

    def on_state_change(self, message: Any) -> None:
        self.read.append(message)
        self.job._accepted = True

    def on_partial_read(self, job: Any, _process: Any) -> None:
        if not job._accepted:
            self.put_back.append(job)

    def report(self, data: bytes) -> None:
        """The process writes to its pipe."""
        os.write(self.outq._writer.fileno(), data)

    def receive(self, callback: Any = None) -> Any:
        """The reader that the pool has, as the event loop makes it."""
        receive = self._result_handler._recv_message
        return receive(self.add_reader, self.fd, callback or self.on_state_change)

    def read_in_part(self) -> None:
        """The event loop reads what there is of a message, and goes on when there is more."""
        reader = self.receive()
        next(reader)
        self.add_reader(self.fd, reader)

    def add_reader(self, fd: int, callback: Any, *args: Any) -> None:
        self.readers[fd] = (callback, args)


@pytest.fixture
def dead() -> Iterator[Reading]:
    """A dead process."""
    reading = Reading()
    yield reading
    reading.outq.close()


def message(body: Any) -> bytes:
    """A message in a pipe of billiard."""
    pickled = pickle.dumps(body)
    return struct.pack("!i", len(pickled)) + pickled


@pytest.mark.parametrize("noticed", ["by the pool", "when it asks about its job"])
def test_a_job_that_a_process_began_before_it_died_is_not_given_to_another(
    dead: Reading, noticed: str
) -> None:
    """Else it starts a second time, uncounted; on every supported Celery."""
    dead.report(message((0, "accepted")))
    read_before_put_back(SimpleNamespace(_pool=dead), dead)
    if noticed == "by the pool":
        dead.process_flush_queues(dead)
        assert dead.job._accepted
    dead.on_partial_read(dead.job, dead)
    assert (dead.read, dead.put_back) == ([(0, "accepted")], [])


def test_a_job_that_a_process_did_not_begin_is_given_to_another(dead: Reading) -> None:
    """It reported nothing."""
    read_before_put_back(SimpleNamespace(_pool=dead), dead)
    dead.on_partial_read(dead.job, dead)
    assert (dead.read, dead.put_back) == ([], [dead.job])


def test_a_message_that_the_event_loop_has_read_in_part_is_read_to_its_end(dead: Reading) -> None:
    """What follows it too: in the midst of a message, nothing else can be read."""
    long, middle = message("x" * 3000), 1000
    dead.report(long[:middle])
    dead.read_in_part()
    dead.report(long[middle:] + message("next"))
    dead.process_flush_queues(dead)
    assert dead.read == ["x" * 3000, "next"]


@pytest.mark.parametrize("started", [True, False])
def test_a_message_that_a_process_died_over_is_not_read(dead: Reading, *, started: bool) -> None:
    """Its rest never comes, whether the event loop has read its beginning or not."""
    dead.report(message("x" * 3000)[:1000])
    if started:
        dead.read_in_part()
    dead.process_flush_queues(dead)
    assert dead.read == []


def test_an_error_of_a_callback_is_not_taken_for_one_of_the_pipe(dead: Reading) -> None:
    """A lost connection, say, is for the worker to handle, as it does in Celery's own reading."""
    dead.report(message("accepted"))

    def lose_connection(_message: Any) -> None:
        raise ConnectionResetError

    dead._result_handler.on_state_change = lose_connection
    with pytest.raises(ConnectionResetError):
        dead.process_flush_queues(dead)


def test_nothing_is_read_from_a_pipe_that_is_closed(dead: Reading) -> None:
    """The pool closes it once it has put the job back."""
    dead.outq._reader.close()
    dead.process_flush_queues(dead)
    assert dead.read == []


def test_the_rest_of_a_message_is_not_taken_for_another_when_its_process_dies(
    dead: Reading,
) -> None:
    """Whatever bytes a task returns or raises: they would end the worker as no pickle."""
    looks_like_a_message = struct.pack("!i", 4) + b"none"
    dead.report(message(looks_like_a_message * 1000)[:4000])
    dead.read_in_part()
    dead.report(looks_like_a_message * 3)
    dead.process_flush_queues(dead)
    assert dead.read == []


@pytest.mark.parametrize("retired", [False, True])
def test_a_result_is_read_after_the_event_loop_forgot_its_beginning(
    dead: Reading, *, retired: bool
) -> None:
    """Unless its process died, and another one has the pipe: its first message is a whole one."""
    whole, middle = message("x" * 3000), 1000
    dead.report(whole[:middle])
    assert next(dead.receive(), "half") is None
    if retired:
        dead.process_flush_queues(dead)
        dead.report(message("next"))
    else:
        dead.report(whole[middle:])
    assert next(dead.receive(), "whole") == "whole"
    assert dead.read == ["next" if retired else "x" * 3000]
    dead.report(message("last"))
    assert next(dead.receive(), "whole") == "whole"
    assert dead.read[1:] == ["last"]


def test_a_result_that_is_half_read_at_a_shutdown_is_read_to_its_end(dead: Reading) -> None:
    """Celery before 5.7 waits for ever for what its middle says is the length of a message."""
    removed: list[int] = []

    def flush() -> None:
        flushed = dead._result_handler._flush_outqueue
        flushed(dead.fd, removed.append, {dead.fd: dead}, dead.on_state_change)

    whole, middle = message("x" * 3000), 1000
    dead.report(whole[:middle])
    dead.read_in_part()
    dead.report(whole[middle:2000])
    flush()
    dead.report(whole[2000:] + message("next") + message(None))
    flush()
    assert (dead.read, removed) == (["x" * 3000, "next"], [])
    dead.outq._writer.close()
    flush()
    assert removed == [dead.fd]


def test_a_large_message_is_not_copied_for_each_piece_that_arrives(
    dead: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 1,024 pieces it was copied 512 times: 50 MB held the worker up for 12 seconds."""
    body, piece = b"x" * (32 << 20), 1 << 15
    data = memoryview(message(body))
    pieces = (bytes(data[start : start + piece]) for start in range(0, len(data), piece))
    monkeypatch.setattr(os, "read", lambda _fd, _size: next(pieces))
    begun = time.thread_time()
    assert [*dead.receive()][-1:] == [None]
    assert time.thread_time() - begun < 1  # a hundredth; else several seconds
    assert dead.read == [body]


def test_what_a_process_reported_is_read_by_one_call(
    dead: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a task, and its end; the event loop goes on as before."""
    reads, read = [], os.read
    monkeypatch.setattr(os, "read", lambda fd, size: reads.append(size) or read(fd, size))
    dead.report(message("started") + message("ended"))
    assert next(dead.receive(), "whole") == "whole"
    assert (dead.read, dead.readers) == (["started", "ended"], {})
    assert len(reads) == 1


def test_messages_that_arrive_in_pieces_are_read_as_they_become_whole(dead: Reading) -> None:
    """Of any size, wherever they are cut; then the event loop calls its handler again."""
    bodies = ["small", "x" * 20_000, "last"]
    data = b"".join(map(message, bodies))
    reader = dead.receive()
    for start in range(0, len(data), 999):
        dead.report(data[start : start + 999])
        ended = next(reader, "whole") == "whole"
        assert ended == (start + 999 >= len(data))
    assert dead.read == bodies
    assert list(dead.readers) == [dead.fd]


@pytest.mark.parametrize("rest", [b"", message("x" * 3000)[:1000]])
def test_an_error_at_one_message_loses_no_other_that_was_read_with_it(
    dead: Reading, rest: bytes
) -> None:
    """The connection is lost when the first task is acknowledged, say."""
    handle = dead._result_handler.on_state_change

    def lose_connection(found: Any) -> None:
        handle(found)
        if found == "first":
            raise ConnectionResetError

    dead.report(message("first") + message("second") + rest)
    with pytest.raises(ConnectionResetError):
        next(dead.receive(lose_connection))
    assert dead.read == ["first", "second"]
    dead.report(message("x" * 3000)[len(rest) :])
    assert next(dead.receive(), "whole") == "whole"
    assert dead.read[2:] == ["x" * 3000]


def test_the_end_of_a_pipe_is_told_as_celery_tells_it(dead: Reading) -> None:
    """An end between two messages is usual; the pool then stops to read."""
    dead.report(message("x" * 3000)[:1000])
    reader = dead.receive()
    next(reader)
    dead.outq._writer.close()
    with pytest.raises(OSError, match="End of file during message"):
        next(reader)
    with pytest.raises(EOFError):
        next(dead.receive())


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("kill -9 $$", True),
        ("exit 7", True),
        ("exit 0", False),
        ("exit 155", False),
        ("exit 70", False),
        ("kill -TERM $$", False),  # a shell in the background ignores others
    ],
)
def test_a_process_that_crashed_is_known_before_its_pool_reads_it(
    script: str, expected: bool
) -> None:
    """Not one that retired, or that a shutdown may have ended; the pool still reads its end."""
    with subprocess.Popen(
        ["/bin/sh", "-c", f"read line; {script}"], stdin=subprocess.PIPE
    ) as child:
        request = SimpleNamespace(dlq_starts_here=False, worker_pid=child.pid)
        assert not has_crashed(request)
        assert child.stdin is not None
        child.stdin.close()
        poll(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        assert has_crashed(request) is expected
        assert child.wait() != 0 or script == "exit 0"
        assert not has_crashed(request)


@pytest.fixture
def _short_reports() -> Iterator[None]:
    """As in the processes of a pool."""
    shorten_reports()
    yield
    for signal in (signals.task_failure, signals.task_retry):
        assert signal.disconnect(dispatch_uid="celery_dlq.reports")


def functions_of(tb: Any) -> list[str]:
    """The functions of a traceback."""
    names = []
    while tb is not None:
        names.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return names


@pytest.mark.usefixtures("_short_reports")
@pytest.mark.parametrize("retried", [False, True])
def test_what_a_process_reports_begins_with_the_task_and_what_it_logs_is_whole(
    caplog: pytest.LogCaptureFixture, *, retried: bool
) -> None:
    """The text is whole; what others put on a report goes with it."""
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.task_ignore_result = True

    @app.task(name="shop.charge", bind=True, shared=False)
    def charge(self: Any) -> None:
        def pay() -> None:
            if retried:
                raise self.retry(exc=ValueError("sold out"))
            raise ValueError("sold out")

        pay()

    request = {"id": "t-1", "hostname": "celery@web-1", "called_directly": False, "retries": 0}
    with caplog.at_level(logging.INFO, logger="celery.app.trace"):
        report = build_tracer(charge.name, charge, app=app)("t-1", (), {}, request)[0]
    report.seen = ["a name"]
    sent = pickle.loads(pickle.dumps(report))
    assert functions_of(report.tb)[:2] == ["trace_task", "charge"]
    assert functions_of(sent.tb)[:2] == ["charge", "pay"]
    assert isinstance(report, ExceptionInfo)
    report.__class__ = ExceptionInfo
    plain = pickle.loads(pickle.dumps(report))
    assert type(sent) is type(plain)
    assert "in trace_task" in sent.traceback
    assert sent.traceback == plain.traceback
    assert repr(sent.exception) == repr(plain.exception)
    others = ("type", "internal", "seen")
    assert [getattr(sent, name) for name in others] == [getattr(plain, name) for name in others]
    assert vars(sent).keys() == vars(plain).keys()
    if sys.version_info >= (3, 11):
        assert len(pickle.dumps(sent)) < len(pickle.dumps(plain)) / 3
    if not retried:
        assert "in trace_task" in caplog.text
        assert "in pay" in caplog.text


@pytest.mark.usefixtures("_short_reports")
def test_a_report_of_celery_alone_keeps_its_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of Celery's that fails itself."""
    monkeypatch.setattr("celery.app.trace.__file__", __file__)
    try:
        raise ValueError("sold out")
    except ValueError:
        report = ExceptionInfo()
    signals.task_failure.send(sender=None, einfo=report)
    assert functions_of(pickle.loads(pickle.dumps(report)).tb) == functions_of(report.tb)
    signals.task_failure.send(sender=None, einfo=None)


def test_a_message_that_is_written_in_two_parts_is_read_in_one_turn(dead: Reading) -> None:
    """Its length, and the rest: what waits for the rest is registered with the loop, twice."""
    whole, real = message("x" * 40_000), os.read
    length = whole[: struct.calcsize("!i")]
    dead.report(length)

    def read(fd: int, most: int) -> bytes:
        found = real(fd, most)
        if found == length:
            dead.report(whole.removeprefix(length))
        return found

    results = Results(dead)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "read", read)
        assert [*results.receive(dead.add_reader, dead.fd, dead.read.append)] == []
    assert dead.read == ["x" * 40_000]
    assert dead.readers == {}
