"""Celery's handlers of SIGINT, SIGTERM and SIGQUIT, called while our code does not run.

Python calls a handler wherever the main thread is. That of a cold shutdown reads from the broker,
announces ends and waits for the pool, so it comes back into our code. In the middle of ours it
would wait for ever for a lock that the interrupted code holds, or for a thread that waits for it,
read that code's replies, or raise through it. The same goes for the lock with which py-amqp writes,
and for that of a pool of threads, which takes a task while Celery shuts it down.

Source: ``on_cold_shutdown`` and ``_shutdown_handler`` in
https://github.com/celery/celery/blob/main/celery/apps/worker.py
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, update_wrapper
from types import FrameType
from typing import Any

from celery.worker import state

from celery_dlq import timing
from celery_dlq.transport.held import sleep, start_thread

_SHUTDOWNS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_PYTHONS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)

SHUTDOWN_SIGNALS = frozenset({1, 2, 3, 15})
"""SIGHUP, which restarts a worker, SIGINT, SIGQUIT, SIGTERM."""

LEFT_BY_SIGNAL = 70
"""Exit code of billiard's own handler of a signal, which Celery leaves in place for SIGQUIT."""

_OF_SHUTDOWNS = re.compile(
    rf"\bsignal ({'|'.join(map(str, sorted(SHUTDOWN_SIGNALS)))})\b|\bexitcode {LEFT_BY_SIGNAL}\b"
)

_WHOLE = ("celery_dlq.", "amqp.method_framing")

# Celery's own code, and tasks: no lock of ours is held meanwhile, and a task may take long.
_CELERYS = (
    "celery.worker.",
    "celery.apps.",
    "celery.concurrency.",
    "celery.app.trace",
    "celery.backends.",
)

_pending: list[_AfterUs] = []
"""Handlers that run, or wait until our code is done."""


def install() -> None:
    """Wrap the handlers that are installed now; those of Celery install others."""
    if threading.current_thread() is not threading.main_thread():
        return  # of a worker within a program; there Celery installs none
    for number in _SHUTDOWNS:
        handler: Any = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _AfterUs) and handler not in _PYTHONS:
            signal.signal(number, _AfterUs(handler))


def nothing_starts() -> bool:
    """True from a signal to the end of its handler in this thread, and in a cold shutdown."""
    return is_stopping() or (
        bool(_pending) and threading.current_thread() is threading.main_thread()
    )


def is_stopping() -> bool:
    """True during a cold shutdown; Celery's flag is an exit code, which may be 0."""
    return state.should_terminate is not None and state.should_terminate is not False


def ended_by_shutdown(text: str) -> bool:
    """True if a pool process, lost with this text, died of the signal that ends this worker.

    Supervisors and terminals send it to the whole process group. A process may die of it before
    this one is told, so a shutdown is waited for, in the main thread, where handlers run.

    Source: ``Pool.mark_as_worker_lost`` in
    https://github.com/celery/billiard/blob/main/billiard/pool.py and ``_shutdown_cleanup`` in
    https://github.com/celery/billiard/blob/main/billiard/common.py
    """
    if not _OF_SHUTDOWNS.search(text):
        return False
    until = time.monotonic() + timing.current.signal_follows
    while not _shuts_down() and time.monotonic() < until:
        time.sleep(timing.current.signal_again)
    return _shuts_down()


def _shuts_down() -> bool:
    """True from the signal of any shutdown on; Celery's flags are exit codes, which may be 0."""
    warm = state.should_stop is not None and state.should_stop is not False
    return warm or is_stopping() or bool(_pending)


class _AfterUs:
    """A handler; if it interrupts our code, the signal is sent again a moment later."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        update_wrapper(self, handler)
        self._handler = handler
        self._until = 0.0
        self._waits = False
        self._more = 0  # signals while one waits: Ctrl-C twice is another shutdown than once

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self not in _pending:
            _pending.append(self)
            self._until = time.monotonic() + timing.current.signal_wait
        if _must_end_first(frame) and time.monotonic() < self._until:
            if self._waits:
                self._more += 1
            else:
                self._waits = True
                start_thread(partial(self._send_again, signum))  # which waits for no lock
            return
        more, self._more = self._more, 0
        try:
            self._handler(signum, frame)
        finally:
            install()
            if self in _pending:
                _pending.remove(self)
            for _ in range(more):
                os.kill(os.getpid(), signum)

    def _send_again(self, signum: int) -> None:
        sleep(timing.current.signal_again)
        self._waits = False
        os.kill(os.getpid(), signum)


def _must_end_first(frame: FrameType | None) -> bool:
    """True if code that must not be interrupted runs there, or waits for what it called."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_WHOLE) or frame.f_code is ThreadPoolExecutor.submit.__code__:
            return True
        if module.startswith(_CELERYS):
            return False
        frame = frame.f_back
    return False
