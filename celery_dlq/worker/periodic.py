"""What a worker does beside its tasks, once a second, in the thread of its event loop."""

from __future__ import annotations

from typing import Protocol

from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.worker")

_LONGEST_REST_TICKS = 30


class PeriodicTask(Protocol):
    """Something that a worker does in the background; it is asked once a second."""

    def tick(self) -> None:
        """Do the next bit; short, because the worker's event loop waits."""

    def close(self) -> None:
        """The worker stops; never raises."""


class PeriodicTasks:
    """Runs periodic tasks in order, until the store does not answer; then none for a while.

    A store that hangs costs a time-out a question, and the tasks of users wait meanwhile.
    """

    def __init__(self) -> None:
        self._tasks: list[PeriodicTask] = []
        self._rest_ticks, self._next_rest = 0, 1

    def add(self, *tasks: PeriodicTask) -> None:
        """Run these too, after the others."""
        self._tasks.extend(tasks)

    def tick(self) -> None:
        """Ask each; an error of one keeps no other back."""
        if self._rest_ticks > 0:
            self._rest_ticks -= 1
            return
        for task in self._tasks:
            try:
                task.tick()
            except StoreUnavailable as exc:
                logger.debug("%s is put off: %s", type(task).__name__, exc)
                self._rest_ticks = self._next_rest
                self._next_rest = min(2 * self._next_rest, _LONGEST_REST_TICKS)
                return
            except Exception:
                logger.exception("%s failed", type(task).__name__)
        self._next_rest = 1

    def close(self) -> None:
        """End all; they are not asked again."""
        for task in self._tasks:
            task.close()
        self._tasks.clear()
