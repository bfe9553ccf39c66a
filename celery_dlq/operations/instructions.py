"""What operators' instructions share: the names that are known, and the audit of what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.store.workers import OpenChange, WorkerRegistry

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters


class Audit:
    """Writes changes into the audit log, and lets observers see them."""

    def __init__(self, registry: WorkerRegistry, events: Events) -> None:
        self.registry = registry
        self._events = events

    def record(
        self, action: Action, target: str, detail: Mapping[str, Any], *, letters: int = 0
    ) -> Change:
        """Record what is about to be done, before it is: so no change is untraceable."""
        change = self.change(action, target, detail, letters=letters)
        self.registry.record_change(change)
        self.emit_change(change)
        return change

    def emit_change(self, change: Change) -> None:
        """Let observers see a change that is recorded."""
        self._events.emit(change)

    def change(
        self, action: Action, target: str, detail: Mapping[str, Any], *, letters: int = 0
    ) -> Change:
        """A change of whoever acts, now; not recorded."""
        now, actor = self.registry.now(), whoami()
        return Change(
            at=now, action=action, actor=actor, target=target, letters=letters, detail=detail
        )

    def end_killed(self, operation: str, shown: Callable[[str, OpenChange], Change | None]) -> None:
        """Record the change of an operation whose process was killed, as it is shown."""
        opened = self.registry.open_change(operation)
        if opened is not None:
            change = shown(operation, opened)
            if self.registry.end_change(operation, opened, change) and change is not None:
                self.emit_change(change)

    def counted(
        self,
        letters: Letters,
        operation: str,
        action: Action,
        target: str,
        detail: Mapping[str, Any],
    ) -> CountedChange:
        """A change whose letters are counted in the steps that change them."""
        return CountedChange(self, letters, operation, self.change(action, target, detail))


class CountedChange:
    """A change that is open while its operation changes letters, and recorded at its end.

    The store counts the letters in the step that changes them. So the audit also says what a
    process did that was killed: see `change_so_far`. Each run of an operation has an entry of its
    own.
    """

    def __init__(self, audit: Audit, letters: Letters, operation: str, change: Change) -> None:
        self._audit = audit
        self._letters = letters
        self.operation = operation
        self.action = change.action
        self._change = change
        self._opened: OpenChange | None = None

    def open(self) -> None:
        """Open it, before the first letter is changed; ends that of a run that was killed."""
        operation = self.operation
        done = self._letters.claims.changed(self._change.target, operation)
        self._audit.end_killed(
            operation, lambda _id, one: change_so_far(one, done, state="interrupted")
        )
        self._opened = self._audit.registry.begin_change(operation, self._change, done)

    def close(self, **detail: Any) -> Change | None:
        """Record it with what is known at its end; ``None`` if it changed no letter."""
        opened, registry = self._opened, self._audit.registry
        if opened is None:
            return None
        done = self._letters.claims.changed(self._change.target, self.operation)
        ended = opened._replace(change=replace(opened.change, at=registry.now()))
        change = change_so_far(ended, done, **detail)
        if registry.end_change(self.operation, opened, change) and change is not None:
            self._audit.emit_change(change)
        if "job" not in opened.change.detail:  # a job may be resumed
            self._letters.claims.forget(self._change.target, self.operation)
        return change


def change_so_far(opened: OpenChange, done: int, **detail: Any) -> Change | None:
    """An open change with the letters that its operation has changed; ``None`` without any."""
    own = done - opened.before
    if own <= 0:
        return None
    whole = {"letters_of_job": done} if opened.before else {}
    detail = {**opened.change.detail, **detail, **whole}
    return replace(opened.change, letters=own, detail=detail)
