"""What operators' instructions share: the names that are known, and the audit of what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_dlq.errors import NotFound
from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.store.instructions import fits
from celery_dlq.store.records import MAX_TASKS
from celery_dlq.store.workers import WorkerRegistry

_MAX_REASON_CHARS = 500

Names = Callable[[], Iterable[str]]


def reason_of(text: str) -> str:
    """The reason of an instruction, for people."""
    return shortened(one_line(text.strip()), _MAX_REASON_CHARS)


class Audit:
    """Writes changes into the audit log, and lets observers see them."""

    def __init__(self, registry: WorkerRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events

    def record(
        self, action: Action, target: str, detail: Mapping[str, Any], *, letters: int = 0
    ) -> Change:
        """Record what is about to be done, before it is: so no change is untraceable."""
        change = self.change(action, target, detail, letters=letters)
        self._registry.record(change)
        self._events.emit(change)
        return change

    def change(
        self, action: Action, target: str, detail: Mapping[str, Any], *, letters: int = 0
    ) -> Change:
        """A change of whoever acts, now; not recorded."""
        now, actor = self._registry.now(), whoami()
        return Change(
            at=now, action=action, actor=actor, target=target, letters=letters, detail=detail
        )


class KnownNames:
    """The tasks and queues that the app or a live worker knows."""

    def __init__(self, registry: WorkerRegistry, *, tasks: Names, queues: Names) -> None:
        self._registry = registry
        self._tasks = tasks
        self._queues = queues

    def is_task(self, name: str) -> bool:
        """True if the app or a live worker has a task of this name."""
        return name in {*self._tasks(), *(t for one in self._registry.workers() for t in one.tasks)}

    def matching(self, task: str | None, queue: str | None) -> tuple[list[str], list[str]]:
        """The tasks and queues that patterns match; refuses a pattern that matches none."""
        workers = self._registry.workers()
        # Else not all tasks of such a worker are listed.
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {*self._tasks(), *(one for info in workers for one in info.tasks)}
        queues = {*self._queues(), *(one for info in workers for one in info.queues)}
        found = []
        for kind, name, known in (("task", task, tasks), ("queue", queue, queues)):
            fit = sorted(one for one in known if fits(name or "*", one))
            if name is not None and not fit and (listed or kind != "task"):
                raise NotFound(
                    f"expected a {kind} that the app or a live worker knows, got {name!r}"
                    f"{did_you_mean(name, known)}"
                )
            found.append(fit)
        return found[0], found[1]

    def doubt(self, task: str | None) -> str:
        """Why a pattern may match no task; empty if a live worker has one, or that is unknown."""
        workers = self._registry.workers()
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {one for info in workers for one in info.tasks}
        if task is None or not workers or not listed:
            return ""
        if any(fits(task, one) for one in tasks):
            return ""
        return f"No live worker has registered a task {task!r}; only the app knows it."
