"""The runner: runs the jobs that wait, in threads of a process that is asked to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.operations.job import WAITING, Job

logger = get_logger("celery_dlq")

THREADS = 2
_POLL_SECONDS = 2.0


class RunsJobs(Protocol):
    """What a thread of the runner needs of `Running`."""

    def run_next(self, stopping: Callable[[], bool]) -> Job | None:
        """Run the job that waits longest; ``None`` if none waits."""


class Runner:
    """Runs waiting jobs, two at a time, on behalf of those who started them.

    Several processes may have one: each job is run by one of them. A job whose runner was closed
    waits for another; a job whose process was killed is ``interrupted`` until it is resumed.
    """

    def __init__(
        self, make: Callable[[], AbstractContextManager[RunsJobs]], *, threads: int = THREADS
    ) -> None:
        self._make = make
        self._closing = threading.Event()
        self._wake = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._work, name=f"dlq-jobs-{number}", daemon=True)
            for number in range(1, threads + 1)
        ]

    def start(self) -> Runner:
        """Run jobs from now on, until `close`."""
        for thread in self._threads:
            thread.start()
        return self

    def wake(self) -> None:
        """Look for a waiting job now; otherwise that is done every 2 seconds."""
        self._wake.release()

    def close(self, timeout: float = 30.0) -> bool:
        """End after the current batches; unfinished jobs wait for the next runner."""
        self._closing.set()
        for _ in self._threads:
            self._wake.release()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        with self._make() as running:
            while not self._closing.is_set():
                if not run_next(running, self._closing.is_set):
                    self._wake.acquire(timeout=_POLL_SECONDS)


def run_next(running: RunsJobs, stopping: Callable[[], bool]) -> bool:
    """Run one job, whose note gets its error; false to wait before the next one."""
    try:
        job = running.run_next(stopping)
    except StoreUnavailable as exc:
        logger.warning("Cannot run jobs until the store answers: %s", exc)
    except DLQError as exc:
        logger.warning("A job failed: %s", exc)
    except Exception:
        logger.exception("A job failed")
    else:
        if job is not None:
            said = "waits for the next process" if job.state == WAITING else f"is {job.state}"
            logger.info("Job %s, a %s of %s, %s", job.id, job.kind, job.queue, said)
        return job is not None
    return False
