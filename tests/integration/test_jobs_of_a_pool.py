"""What the processes of a real prefork pool are given, turn by turn of a real event loop."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.concurrency import prefork
from celery.concurrency.asynpool import SCHED_STRATEGY_FCFS
from kombu.asynchronous import Hub

from celery_dlq.worker.bootsteps import read_before_put_back, write_at_once

LARGE = 300_000  # bytes: more than a pipe holds


class Counts:
    """The connection to the store, as far as turns use it: notes what happens to the counts."""

    waits = False

    def gather(self) -> None:
        """A result was read: what it starts is counted with what others start."""
        self.waits = True

    def send_gathered(self) -> None:
        """One write."""
        self.waits = False


class Loop:
    """A pool of two processes, and the event loop of a worker's main process."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.counts = Counts()
        app = Celery("jobs", set_as_current=False)
        self.pool = prefork.TaskPool(
            2, app=app, initargs=(app, "jobs@host"), threads=False, putlocks=False
        )
        self.pool.start()
        self.inner: Any = self.pool._pool
        self.done: list[Any] = []
        read_before_put_back(self.pool, self.hub)
        self.connect()

    def connect(self) -> None:
        """As at the beginning of a worker, and after a lost connection."""
        write_at_once(self.pool, self.hub, self.counts)  # type: ignore[arg-type]
        self.pool.register_with_event_loop(self.hub)
        self.loop = self.hub.create_loop()

    def give(self, call: Callable[..., Any], *args: Any) -> None:
        """A job."""
        self.pool.apply_async(call, args, callback=self.done.append)

    def until(self, number: int, turns: int = 1000) -> None:
        """Turn until so many jobs have ended."""
        until = time.monotonic() + 20
        while len(self.done) < number and turns and time.monotonic() < until:
            next(self.loop)
            turns -= 1
        assert len(self.done) >= number

    def watched(self) -> set[int]:
        """The pipes to processes that the event loop watches."""
        return self.inner._all_inqueues & {*self.hub.writers}


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop whose processes are up."""
    made = Loop()
    made.give(os.getpid)
    made.give(os.getpid)
    made.until(2)
    made.done.clear()
    yield made
    made.pool.terminate()
    made.hub.close()


def test_a_job_is_written_in_the_next_turn_and_no_pipe_is_watched(loop: Loop) -> None:
    """Celery would register the pipe, and take it out again when the job is written."""
    calls: list[int] = []
    register = loop.hub.poller.register
    loop.hub.poller.register = lambda fd, events: calls.append(fd) or register(fd, events)
    for number in range(20):
        loop.give(operator.neg, number)
        next(loop.loop)
        assert not loop.inner.outbound_buffer
        assert not loop.watched()
        loop.until(number + 1)
    assert sorted(loop.done) == [-number for number in reversed(range(20))]
    assert not loop.inner._all_inqueues & {*calls}


def test_counts_are_sent_before_a_process_gets_what_they_are_of(loop: Loop) -> None:
    """All of a turn with one write; a result that is read begins to gather them."""
    seen: list[tuple[str, bool]] = []
    write = loop.hub.consolidate_callback

    def note_write(pipes: list[int]) -> None:
        seen.append(("written", loop.counts.waits))
        write(pipes)

    def start_another(_result: Any) -> None:
        seen.append(("counted", loop.counts.waits))
        loop.give(operator.neg, 2)

    loop.hub.consolidate_callback = note_write
    loop.pool.apply_async(operator.neg, (1,), callback=start_another)
    loop.until(1)
    assert seen == [("written", False), ("counted", True), ("written", False)]


def test_what_a_pipe_cannot_take_at_once_is_written_when_it_can(loop: Loop) -> None:
    """By Celery, to its end."""
    for number in range(6):
        loop.give(len, str(number) * LARGE)
    loop.until(6)
    assert loop.done == [LARGE] * 6
    next(loop.loop)
    assert not loop.watched()


def test_while_celery_may_write_no_count_waits(loop: Loop) -> None:
    """It writes in the midst of a turn, when a pipe can take something again."""
    started: list[tuple[bool, bool]] = []

    def start_another(_result: Any) -> None:
        started.append((loop.counts.waits, bool(loop.watched())))
        loop.pool.apply_async(len, ("x" * LARGE,), callback=start_another)

    loop.inner.sched_strategy = SCHED_STRATEGY_FCFS  # writes to processes that are busy, too
    loop.hub.reset()
    loop.connect()
    for _ in range(8):
        loop.pool.apply_async(len, ("x" * LARGE,), callback=start_another)
    until = time.monotonic() + 20
    while len(started) < 100 and time.monotonic() < until:
        next(loop.loop)
    assert any(watched for _, watched in started)
    assert (True, True) not in started


def test_more_jobs_than_processes_run_one_after_the_other(loop: Loop) -> None:
    """A process that is busy gets none: another one may be done sooner."""
    loop.give(time.sleep, 0.5)
    for number in range(10):
        loop.give(operator.neg, number)
    loop.until(10)
    assert None not in loop.done
    loop.until(11)


def test_after_a_lost_connection_jobs_are_written_as_before(loop: Loop) -> None:
    """Celery makes new handlers, and the event loop forgets all that it watched."""
    for number in range(3):
        loop.hub.reset()
        loop.connect()
        loop.give(operator.neg, number)
        next(loop.loop)
        assert not loop.inner.outbound_buffer
        loop.until(number + 1)
    assert loop.inner.on_poll_start not in loop.hub.on_tick


def test_a_process_that_is_killed_leaves_its_job_to_another(loop: Loop) -> None:
    """Nothing waits for a pipe that nobody reads."""
    for process in list(loop.inner._pool):
        os.kill(process.pid, 9)
    for number in range(4):
        loop.give(operator.neg, number)
    loop.until(4)
    assert sorted(loop.done) == [-3, -2, -1, 0]
