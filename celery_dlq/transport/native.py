"""Threads that run while the worker's event loop is busy, in every pool.

gevent and eventlet replace `threading`: there, a thread is a greenlet, and waits for the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a thread of the operating system, as a daemon."""
    _original("_thread", "start_new_thread")(run, ())


def sleep(seconds: float) -> None:
    """Sleep in such a thread."""
    _original("time", "sleep")(seconds)


def _original(module: str, name: str) -> Any:
    # To be imported is not to be in use: sentry_sdk imports both where they are installed.
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return getattr(eventlet.original(module), name)
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original(module, name)
    return getattr(import_module(module), name)


def seconds_since_boot() -> float:
    """A clock that nobody sets and that goes on while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
