"""All that is periodic in a worker: one list and one clock.

Short work runs in the consumer's tick, once a second, in order: the heartbeat first, what waits for
servers of its own last. A call to a hanging store costs a time-out, during which the user's tasks
wait; so after an outage of the store the tasks from the one that failed on pause, longer each time.
Those before it go on: its place may be away alone, e.g. one master of a cluster, and a worker whose
heartbeat pauses counts as gone.

Long work (a job, a release, copies to a slow broker) must not delay the heartbeat. It runs in a
thread that the tick starts when the work is due and that ends with it, at most one for each task,
with connections of its own; a task that failed pauses alone, longer each time. So a worker in which
nothing is due has no such thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from celery_dlq import timing
from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.printable import get_logger

logger = get_logger("celery_dlq.worker")

MAX_BACKOFF_TICKS = 30
_STOP_SECONDS = 5.0

Stopping = Callable[[], bool]
"""True once the worker stops: return soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Periodic work of a worker."""

    name: str  # For the log, and of its thread
    work: Callable[[], object]  # Short: the event loop waits for it
    every: int = 1  # Ticks, of a second each
    close: Callable[[], object] = bool  # Release resources when the worker stops; never raises


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTask:
    """Periodic work of a worker that may take long: it gets a thread."""

    name: str
    work: Callable[[Stopping], object]
    every: int = 1
    is_due: Callable[[], object] = lambda: True  # Cheap, and without the store: called in the tick
    close: Callable[[], object] = bool


class Pause:
    """The pause after a failure, in ticks."""

    def __init__(self, first: int = 1, longest: int = MAX_BACKOFF_TICKS) -> None:
        self._left, self._backoff = 0, timing.Backoff(first, longest)

    def count_tick(self) -> bool:
        """Count a tick; True if no pause is left."""
        self._left = max(0, self._left - 1)
        return self._left == 0

    def failed(self) -> None:
        """Begin a pause."""
        self._left = round(self._backoff.failed()) + 1

    def worked(self) -> None:
        """Begin with the shortest pause again."""
        self._backoff.worked()


class Housekeeping:
    """Runs the periodic work of one worker."""

    def __init__(self) -> None:
        self._short: list[Task] = []
        self.long: list[_Thread] = []
        self._pause, self._paused_from = Pause(), 0
        self._ticks = 0
        self._stop = threading.Event()

    def add(self, *tasks: Task | LongTask) -> None:
        """Add tasks, to run after the others."""
        for task in tasks:
            if isinstance(task, LongTask):
                self.long.append(_Thread(task, self._stop))
            else:
                self._short.append(task)

    def tick(self) -> None:
        """Do what is due; an error of one task does not stop the others."""
        self._ticks += 1
        for thread in self.long:
            thread.tick(self._ticks)
        tasks = self._short
        if not self._pause.count_tick():
            tasks = tasks[: self._paused_from]
        for number, task in enumerate(tasks):
            if self._ticks % task.every:
                continue
            try:
                task.work()
            except StoreUnavailable as exc:
                logger.debug("%s is put off: %s", task.name, exc)
                self._pause.failed()
                self._paused_from = number
                return
            except Exception:
                logger.exception("%s failed", task.name)
        if tasks is self._short:
            self._pause.worked()

    def stop(self) -> None:
        """Let long work end, and wait a few seconds for it."""
        self._stop.set()
        until = time.monotonic() + _STOP_SECONDS
        for thread in self.long:
            thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stop, then close and forget all tasks."""
        self.stop()
        tasks: Sequence[Task | LongTask] = [*self._short, *(each.task for each in self.long)]
        self._short.clear()
        self.long.clear()
        for task in tasks:
            task.close()


class _Thread:
    """The thread of one long task, while it works."""

    def __init__(self, task: LongTask, stop: threading.Event) -> None:
        self.task = task
        self._stop = stop
        self._pause = Pause()
        self._thread: threading.Thread | None = None

    def tick(self, ticks: int) -> None:
        """Start the thread if the work is due and none works."""
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        if self._pause.count_tick() and ticks % self.task.every == 0 and self.task.is_due():
            self._thread = threading.Thread(
                target=self._run, name=f"dlq-{self.task.name}", daemon=True
            )
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.task.work(self._stop.is_set)
        except DLQError as exc:
            logger.warning("%s is put off: %s", self.task.name, exc)
        except BaseException:  # it would end the thread, without a pause before the next one
            logger.exception("%s failed", self.task.name)
        else:
            self._pause.worked()
            return
        self._pause.failed()


class WorkerJobs:
    """Runs jobs on behalf of those who started them; an unfinished one waits for the next worker.

    One at a time, with connections of its own. The heartbeat says if a job waits, so that a worker
    without one asks nothing and connects to nothing.
    """

    def __init__(self, separate: Callable[[], AbstractContextManager[Any]]) -> None:
        self._separate = separate
        self._woken = False
        # A pool child that dropped its copy of a connection would close it for this process.
        self._own: Any = None

    def wake(self) -> None:
        """Look for a job that waits; called with a heartbeat while there is one."""
        self._woken = True

    def is_due(self) -> bool:
        """True if a job may wait."""
        return self._woken

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run the jobs that wait."""
        self._woken = False
        with self._separate() as self._own:
            running = self._own.jobs()
            while running.run_one(stopping) and not stopping():
                pass
