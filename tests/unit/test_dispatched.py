"""Starts that were counted and never happened: what a prefork pool does with its jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlq.worker.dispatched import Dispatched, drop_failed, is_closed, starts_here


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
