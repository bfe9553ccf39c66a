"""Automatic redrive in a worker: when it looks for letters, and what it says of the last death."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_dlq import timing
from celery_dlq.events import DeadLettered, Event
from celery_dlq.features.auto_redrive import REDRIVES_USED_UP
from celery_dlq.letters.record import DeadLetter
from celery_dlq.registry import interval
from celery_dlq.worker.housekeeping import LongTask
from celery_dlq.worker.observer import Observer, WorkerParts


def observer(parts: WorkerParts) -> Observer:
    """The observer of a worker."""
    return AutoRedriveObserver(parts)


class AutoRedriveObserver(Observer):
    """Looks for letters that are due, and describes the last death of a message."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._look_at = time.monotonic() + self._pause_seconds()
        # A pool child that dropped its copy of a connection would close it for this process.
        self._own: Any = None
        parts.events.subscribe(self._count_stored, lambda kind: kind is DeadLettered)

    @property
    def tasks(self) -> Sequence[LongTask]:
        """Make jobs for what is due."""
        return [LongTask(name="auto-redrive", is_due=self._is_due, work=self._look_for_due)]

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """Say in the letter that its message is redriven no more."""
        text = self.gives_up(letter)
        if not text:
            return letter
        description = f"{letter.description}; {text}" if letter.description else text
        return replace(letter, description=description)

    def close(self) -> None:
        """Count no more."""
        self._parts.events.unsubscribe(self._count_stored)

    def gives_up(self, letter: DeadLetter) -> str:
        """Why the policy redrives a message no more."""
        if not letter.redrives:
            return ""
        rule = self._parts.policies.policies.value_of(letter.dead_letter_queue, "auto_redrive")
        return "" if rule is None else rule.used_up(letter.redrives, letter.reason)

    def _count_stored(self, event: Event) -> None:
        if isinstance(event, DeadLettered) and self.gives_up(event.letter):
            letter = event.letter
            queues = letter.source_queue, letter.dead_letter_queue
            self._parts.counts.count(REDRIVES_USED_UP, *queues)

    def _is_due(self) -> bool:
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self._pause_seconds()
        return bool(self._parts.policies.policies.values_of("auto_redrive"))

    def _look_for_due(self, stopping: Callable[[], bool]) -> None:
        from celery_dlq.features.auto_redrive.operations import look_for_due  # noqa: PLC0415 - when due

        with self._parts.separate() as self._own:
            if look_for_due(self._own.jobs(), self._parts.policies.policies, stopping):
                self._look_at = min(self._look_at, time.monotonic() + timing.current.job_look)

    def _pause_seconds(self) -> float:
        rules = self._parts.policies.policies.values_of("auto_redrive")
        shortest = min((rule.after for rule in rules), default=interval("redrive_look"))
        return min(interval("redrive_look"), max(1.0, shortest / 10))
