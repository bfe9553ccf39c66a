"""Starts that were counted and never happened: what a prefork pool does with its jobs."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.queues import _SimpleQueue
from celery.concurrency import prefork, solo
from celery.concurrency.asynpool import AsynPool, ResultHandler

from celery_dlq.worker.bootsteps import read_before_put_back
from celery_dlq.worker.dispatched import (
    Dispatched,
    drop_failed,
    flush_queues,
    is_closed,
    starts_here,
)


class Process:
    """A pool process."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive

    def _is_alive(self) -> bool:
        return self.alive


class Inner:
    """The part of Celery's ``AsynPool`` that is used."""

    def __init__(self, state: int = 0) -> None:
        self._state = state
        self.outbound_buffer: list[Any] = []
        self.said: list[Any] = []

    def process_flush_queues(self, process: Process) -> None:
        """Handle what the process sent before it died."""
        for handle in self.said:
            handle()


def a_job(process: Process | None = None, *, writing: bool = False) -> Any:
    """A job, maybe written to a process, whole or in part."""
    generator = SimpleNamespace(gi_frame=object() if writing else None)
    return SimpleNamespace(
        _write_to=process,
        _accepted=False,
        _writer=lambda: generator,
        discarded=[],
        discard=lambda: None,
    )


def before_flush(job: Any, inner: Inner | None = None) -> tuple[bool, bool]:
    """Return if the job never starts, and if the pool keeps it."""
    dispatched, request = Dispatched(), SimpleNamespace(name="request")
    dispatched.add(request, job)
    never = dispatched.before_flush(SimpleNamespace(_pool=inner or Inner()))
    assert dispatched.requests() == ([] if never else [request])
    return never == [request], job._accepted


@pytest.mark.parametrize(
    ("job", "state", "expected"),
    [
        (a_job(), 0, (True, False)),  # not written: dropped
        (a_job(Process()), 0, (False, True)),  # written: it will start
        (a_job(Process()), 1, (False, True)),  # the same in a pool that closes
        (a_job(Process(), writing=True), 0, (False, True)),  # Celery writes the rest of it
        (a_job(Process(), writing=True), 1, (True, False)),  # it does not, once the pool closes
        (a_job(Process(alive=False)), 0, (True, False)),  # nobody is left to start it
    ],
)
def test_what_is_dropped_before_it_starts(
    job: Any, state: int, expected: tuple[bool, bool]
) -> None:
    """Only what no process can start any more is given back."""
    assert before_flush(job, Inner(state)) == expected


def test_a_process_that_took_its_job_before_it_died_has_started_it() -> None:
    """It says so with its last words, which are read first."""
    dispatched, request, inner = Dispatched(), SimpleNamespace(), Inner()
    dispatched.add(request, a_job(Process(alive=False)))
    inner.said.append(lambda: dispatched.accepted(request))
    assert dispatched.before_flush(SimpleNamespace(_pool=inner)) == []


def test_a_process_that_dies_before_it_takes_a_job_that_was_kept_never_starts_it() -> None:
    """Noticed within a second."""
    dispatched, request, process = Dispatched(), SimpleNamespace(), Process()
    pool = SimpleNamespace(_pool=Inner())
    dispatched.add(request, a_job(process))
    assert dispatched.lost(pool) == []
    dispatched.before_flush(pool)
    assert dispatched.lost(pool) == []
    process.alive = False
    assert dispatched.lost(pool) == [request]
    assert dispatched.requests() == []


def test_nothing_is_given_back_in_pools_that_drop_nothing() -> None:
    """A pool with threads of its own works off what it has; only its end is the end."""
    dispatched, request = Dispatched(), SimpleNamespace()
    dispatched.add(request, a_job())
    assert dispatched.before_flush(SimpleNamespace(_pool=SimpleNamespace(_state=0))) == []
    assert dispatched.all_lost() == [request]
    assert dispatched.requests() == []


def test_a_closed_pool_is_known() -> None:
    """Only billiard's pools have that state."""
    assert is_closed(SimpleNamespace(_pool=Inner(1)))
    assert not is_closed(SimpleNamespace(_pool=Inner(0)))
    assert is_closed(prefork.TaskPool(1)), "expected a pool that is gone to be closed"
    assert not is_closed(solo.TaskPool(1))
    assert not is_closed(SimpleNamespace(_pool=None))
    assert not is_closed(SimpleNamespace())


def test_a_job_that_could_not_be_made_ready_is_forgotten() -> None:
    """Otherwise a shutdown would wait for it; others stay."""
    cache: dict[int, Any] = {}
    for number, more in enumerate([{}, {"_payload": b"x"}]):
        cache[number] = SimpleNamespace(
            correlation_id="a", discard=lambda number=number: cache.pop(number), **more
        )
    drop_failed(SimpleNamespace(_pool=SimpleNamespace(_cache=cache)), "a")
    assert list(cache) == [1]
    drop_failed(SimpleNamespace(_pool=None), "a")


def test_pools_that_run_tasks_in_this_process_are_known() -> None:
    """The others are counted when they are given the task."""
    thread = pytest.importorskip("celery.concurrency.thread")
    prefork = pytest.importorskip("celery.concurrency.prefork")
    solo = pytest.importorskip("celery.concurrency.solo")
    assert [starts_here(m.TaskPool) for m in (thread, solo, prefork)] == [True, True, False]


class Reading:
    """An ``AsynPool`` and a process of it that is dead; what it reported is still in its pipe."""

    process_flush_queues = AsynPool.process_flush_queues
    _state = 0

    def __init__(self) -> None:
        self.outq = _SimpleQueue(rnonblock=True)
        self.fd = self.outq._reader.fileno()
        self.readers: dict[int, Any] = {}  # the event loop's
        self.read: list[Any] = []
        self.put_back: list[Any] = []
        self._result_handler = SimpleNamespace(on_state_change=self.on_state_change)
        self.job = SimpleNamespace(_accepted=False)

    def on_state_change(self, message: Any) -> None:
        self.read.append(message)
        self.job._accepted = True

    def on_partial_read(self, job: Any, _process: Any) -> None:
        if not job._accepted:
            self.put_back.append(job)

    def report(self, data: bytes) -> None:
        """The process writes to its pipe."""
        os.write(self.outq._writer.fileno(), data)

    def read_in_part(self) -> None:
        """The event loop reads what there is of a message, and goes on when there is more."""
        reader = ResultHandler._recv_message(
            SimpleNamespace(handle_event=None), self.add_reader, self.fd, self.on_state_change
        )
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
    flush_queues(dead, dead, dead)
    assert dead.read == ["x" * 3000, "next"]


@pytest.mark.parametrize("started", [True, False])
def test_a_message_that_a_process_died_over_is_not_read(dead: Reading, *, started: bool) -> None:
    """Its rest never comes, whether the event loop has read its beginning or not."""
    dead.report(message("x" * 3000)[:1000])
    if started:
        dead.read_in_part()
    flush_queues(dead, dead, dead)
    assert dead.read == []


def test_an_error_of_a_callback_is_not_taken_for_one_of_the_pipe(dead: Reading) -> None:
    """A lost connection, say, is for the worker to handle, as it does in Celery's own reading."""
    dead.report(message("accepted"))

    def lose_connection(_message: Any) -> None:
        raise ConnectionResetError

    dead._result_handler.on_state_change = lose_connection
    with pytest.raises(ConnectionResetError):
        flush_queues(dead, dead, dead)


def test_nothing_is_read_from_a_pipe_that_is_closed(dead: Reading) -> None:
    """The pool closes it once it has put the job back."""
    dead.outq._reader.close()
    flush_queues(dead, dead, dead)
    assert dead.read == []
