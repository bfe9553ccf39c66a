"""Celery's handlers of shutdowns run where they meet no code of ours."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import intervals
import pytest
from celery import platforms
from celery.worker import state
from waiting import poll

from celery_dlq.worker import shutdown_signals


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a handler of SIGTERM says, installed as Celery installs its own."""
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    platforms.signals["SIGTERM"] = lambda *_: said.append(
        f"handler, nothing starts: {shutdown_signals.nothing_starts()}"
    )
    shutdown_signals.install()
    yield said
    signal.signal(signal.SIGTERM, before)
    state.reset_state()


def run(said: list[str], *modules: str, code: str = "signal.raise_signal(15)") -> None:
    """Run code in the last module, called by that before it, and so on."""
    for module in reversed(modules):
        names: dict[str, Any] = {"__name__": module, "signal": signal, "said": said, "run": run}
        code = f"exec({code!r}, {{**globals(), '__name__': {module!r}}}); said.append({module!r})"
    exec(code, names)  # noqa: S102 - a module of a name


HANDLED = "handler, nothing starts: True"


@pytest.mark.parametrize(
    "modules", [["celery_dlq.worker.x"], ["celery.worker.x", "celery_dlq.transport.x", "redis.x"]]
)
def test_a_handler_waits_for_our_code(said: list[str], modules: list[str]) -> None:
    """And for what our code waits for; nothing starts from the signal on."""
    run(said, *modules)
    ours = [*reversed(modules)]
    assert said == ours
    assert shutdown_signals.nothing_starts()
    poll(lambda: len(said) > len(ours))
    assert said == [*ours, HANDLED]
    assert not shutdown_signals.nothing_starts()


@pytest.mark.parametrize(
    "modules",
    [["kombu.x"], ["celery_dlq.worker.x", "celery.worker.x"], ["celery_dlq.x", "celery.app.trace"]],
)
def test_a_handler_interrupts_celery_and_tasks_at_once(said: list[str], modules: list[str]) -> None:
    """Our code may have called them: it holds no lock then."""
    run(said, *modules)
    assert said == [HANDLED, *reversed(modules)]


def test_a_handler_waits_until_a_pool_of_threads_has_taken_a_task(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds a lock which Celery's cold shutdown takes again: it would wait for ever."""

    class Interrupted(futures.Future[None]):
        def __init__(self) -> None:
            super().__init__()
            signal.raise_signal(signal.SIGTERM)

    pool = futures.ThreadPoolExecutor(1)
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures._base.Future", Interrupted)
        pool.submit(said.append, "task").result(5)
    poll(lambda: len(said) == 2)
    assert said == ["task", HANDLED]
    pool.shutdown()


def test_each_of_several_signals_is_handled(said: list[str]) -> None:
    """Ctrl-C twice is a cold shutdown."""
    run(said, "celery_dlq.worker.x", code="[signal.raise_signal(15) for _ in range(3)]")
    poll(lambda: len(said) == 4)
    assert said == ["celery_dlq.worker.x", *[HANDLED] * 3]


def test_a_handler_waits_for_a_bounded_time(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that hangs can still be shut down."""
    intervals.change(monkeypatch, signal_wait=0.0)
    run(said, "celery_dlq.worker.x")
    assert said == [HANDLED, "celery_dlq.worker.x"]


def test_nothing_starts_in_a_cold_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's flag is an exit code."""
    assert not shutdown_signals.nothing_starts()
    monkeypatch.setattr(state, "should_terminate", 0)
    assert shutdown_signals.nothing_starts()


def test_other_handlers_are_left_alone(said: list[str]) -> None:
    """SIGUSR1 has Celery print where all threads are, ours too; Ctrl-C in a program is its own."""
    before, interrupt = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
    try:
        platforms.signals["SIGUSR1"] = handler = lambda *_: None
        platforms.signals.ignore("SIGTERM")
        shutdown_signals.install()
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_a_handler_installs_waits_too(said: list[str]) -> None:
    """The first shutdown is a warm one, the next a cold one."""

    def warm(*_: Any) -> None:
        said.append("warm")
        platforms.signals["SIGTERM"] = lambda *_: said.append("cold")
        raise KeyError

    platforms.signals["SIGTERM"] = warm
    shutdown_signals.install()
    with pytest.raises(KeyError):
        signal.raise_signal(signal.SIGTERM)
    run(said, "celery_dlq.worker.x")
    assert said == ["warm", "celery_dlq.worker.x"]
    poll(lambda: said[-1] == "cold")


def test_in_another_thread_no_handler_is_installed(said: list[str]) -> None:
    """Python refuses it; a worker within a program has none of Celery's either."""
    handler = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, handler)
    thread = threading.Thread(target=shutdown_signals.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not said


def test_a_process_that_dies_of_a_signal_is_interrupted_by_a_shutdown_only(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the shutdown's own signal: one that runs out of memory meanwhile is a crash."""
    intervals.change(monkeypatch, signal_follows=0.02)
    terminated = "Worker exited prematurely: signal 15 (SIGTERM) Job: 3."
    assert not shutdown_signals.ended_by_shutdown(terminated)
    monkeypatch.setattr(state, "should_stop", 0)
    assert shutdown_signals.ended_by_shutdown(terminated)
    assert shutdown_signals.ended_by_shutdown("Worker exited prematurely: exitcode 70 Job: 3.")
    assert not shutdown_signals.ended_by_shutdown(terminated.replace("15 (SIGTERM)", "9 (SIGKILL)"))
    assert not shutdown_signals.ended_by_shutdown("Worker exited prematurely: exitcode 1 Job: 3.")
    assert not said


def test_a_shutdown_whose_signal_comes_later_is_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the pool was faster."""
    intervals.change(monkeypatch, signal_follows=20)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    names: dict[str, Any] = {"__name__": "celery_dlq.worker.x", "ended": shutdown_signals}
    exec("found = ended.ended_by_shutdown('signal 15 (SIGTERM)')", names)  # noqa: S102
    assert names["found"]
    poll(lambda: said == [HANDLED])
