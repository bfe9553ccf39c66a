"""Periodic tasks of a worker, run once a second in the thread of its event loop."""

from __future__ import annotations

from typing import Protocol

from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.worker")

_MAX_REST_TICKS = 30


class PeriodicTask(Protocol):
    """A background task of a worker."""

    def tick(self) -> None:
        """Do the next step; called once a second. Keep it short: the event loop waits."""

    def close(self) -> None:
        """Release resources when the worker stops; never raises."""


class PeriodicTasks:
    """Runs periodic tasks in order; while the store is down, pauses them with a back-off.

    Each call to a hanging store costs a time-out, during which the user's tasks wait. Those before
    the one that failed go on: its place may be away alone, e.g. one master of a cluster, and a
    worker whose heartbeat rests counts as gone.
    """

    def __init__(self) -> None:
        self._tasks: list[PeriodicTask] = []
        self._rest_ticks, self._next_rest, self._resting_from = 0, 1, 0

    def add(self, *tasks: PeriodicTask) -> None:
        """Add tasks, to run after the others."""
        self._tasks.extend(tasks)

    def tick(self) -> None:
        """Tick each task; an error of one does not stop the others."""
        tasks = self._tasks
        if self._rest_ticks > 0:
            self._rest_ticks -= 1
            tasks = tasks[: self._resting_from]
        for number, task in enumerate(tasks):
            try:
                task.tick()
            except StoreUnavailable as exc:
                logger.debug("%s is put off: %s", type(task).__name__, exc)
                self._rest_ticks, self._resting_from = self._next_rest, number
                self._next_rest = min(2 * self._next_rest, _MAX_REST_TICKS)
                return
            except Exception:
                logger.exception("%s failed", type(task).__name__)
        if tasks is self._tasks:
            self._next_rest = 1

    def close(self) -> None:
        """Close and forget all tasks."""
        for task in self._tasks:
            task.close()
        self._tasks.clear()
