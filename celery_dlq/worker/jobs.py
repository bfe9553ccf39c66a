"""Jobs that workers run: those that wait for a process, and automatic redrives.

In a thread of the main process with connections of its own, one job at a time. The heartbeat tells
if a job waits, so that a worker without one asks nothing and connects to nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger
from celery_dlq.operations.runner import run_next
from celery_dlq.operations.running import Running
from celery_dlq.policies.table import PolicyTable

logger = get_logger("celery_dlq.worker")

LOOK_SECONDS = 60.0
"""Seconds between two looks for letters that are due; fewer if they wait less than ten minutes."""

_NOT_FOR_US_SECONDS = 10.0  # after a wake-up by a job that only others may run


class WorkerJobs:
    """Runs jobs on behalf of those who started them, while this worker lives."""

    def __init__(
        self,
        make: Callable[[], AbstractContextManager[Running]],
        table: Callable[[], PolicyTable],
    ) -> None:
        self._make = make
        self._table = table
        self._woken = threading.Event()
        self._rest_until = 0.0
        self._look_at = 0.0
        # A pool child that dropped its copy of a connection would close it for this process.
        self._running: Running | None = None
        self._looking: Running | None = None

    def wake(self) -> None:
        """Look for a job that waits; called with each heartbeat while there is one."""
        if time.monotonic() >= self._rest_until:
            self._woken.set()

    def end(self) -> None:
        """Let `run` see that its event is set."""
        self._woken.set()

    def run(self, stop: threading.Event) -> None:
        """Run jobs until the event is set; an unfinished job waits for the next worker."""
        self._look_at = time.monotonic() + self._pause()
        while not stop.is_set():
            self._woken.wait(max(0.0, self._look_at - time.monotonic()))
            try:
                self._run_waiting(stop)
                if time.monotonic() >= self._look_at:
                    self._look(stop)
            except DLQError as exc:
                logger.warning("Jobs are put off: %s", exc)
            except Exception:
                logger.exception("Running jobs failed")

    def _run_waiting(self, stop: threading.Event) -> None:
        """Run the jobs that wait."""
        if not self._woken.is_set() or stop.is_set():
            return
        self._woken.clear()
        with self._make() as self._running:
            ran = run_next(self._running, stop.is_set)
            if not ran:
                self._rest_until = time.monotonic() + _NOT_FOR_US_SECONDS
            while ran and not stop.is_set():
                ran = run_next(self._running, stop.is_set)

    def _look(self, stop: threading.Event) -> None:
        """Redrive what is due; in between, run the jobs that wait."""
        self._look_at = time.monotonic() + self._pause()
        table = self._table()
        if not table.values("auto_redrive"):
            return
        with (
            self._make() as running,
            closing(running.redrive_due(table, stop.is_set)) as jobs,
        ):
            self._looking = running
            for _ in jobs:
                self._run_waiting(stop)

    def _pause(self) -> float:
        shortest = min(
            (rule.after for rule in self._table().values("auto_redrive")), default=LOOK_SECONDS
        )
        return min(LOOK_SECONDS, max(1.0, shortest / 10))
