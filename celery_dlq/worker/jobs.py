"""Jobs that workers run on behalf of those who started them.

One at a time, in a thread with connections of its own. The heartbeat says if a job waits, so that a
worker without one asks nothing and connects to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from celery_dlq.operations.jobs import run_next

_NOT_FOR_US_SECONDS = 10.0  # after a wake-up by a job that only others may run


class WorkerJobs:
    """Runs jobs while this worker lives; an unfinished one waits for the next worker."""

    def __init__(self, separate: Callable[[], AbstractContextManager[Any]]) -> None:
        self._separate = separate
        self._woken = False
        self._pause_until = 0.0
        # A pool child that dropped its copy of a connection would close it for this process.
        self._own: Any = None

    def wake(self) -> None:
        """Look for a job that waits; called with each heartbeat while there is one."""
        self._woken = self._woken or time.monotonic() >= self._pause_until

    def is_due(self) -> bool:
        """True if a job may wait."""
        return self._woken

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run the jobs that wait."""
        self._woken = False
        with self._separate() as self._own:
            running = self._own.jobs()
            ran = run_next(running, stopping)
            if not ran:
                self._pause_until = time.monotonic() + _NOT_FOR_US_SECONDS
            while ran and not stopping():
                ran = run_next(running, stopping)
