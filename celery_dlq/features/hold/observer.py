"""Holds in a worker, as the guard sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from celery_dlq.features.hold.held_back import HeldBack
from celery_dlq.features.hold.holding import Holding
from celery_dlq.features.hold.operations import Holds
from celery_dlq.operations.instructions import MOST_HELD
from celery_dlq.operations.redrive.publisher import broker_name
from celery_dlq.policies.decisions import PutOff, Taken, Verdict
from celery_dlq.store.instructions import Hold, Instruction
from celery_dlq.worker.housekeeping import LongTask, Task
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.lifecycle import GuardedRequest

RELEASE_TICKS = 5
"""Seconds between two looks for holds that ended."""


def observer(parts: WorkerParts) -> Observer:
    """The observer of a worker."""
    holding = Holding(
        parts.policies,
        parts.backend.held,
        replace(parts.make, release=None),  # it was not executed
        broker=broker_name(parts.app),
        most=MOST_HELD,
        fit=partial(parts.limit.fit, whole=True),
        counts=parts.counts,
    )
    return HoldObserver(holding, parts)


class HoldObserver(Observer):
    """Takes messages that match a hold out of execution, and releases those of ended holds."""

    def __init__(self, holding: Holding, parts: WorkerParts) -> None:
        self.holding = holding
        self.held_back = HeldBack(holding)
        self._separate = parts.separate

    @property
    def watching(self) -> bool:  # type: ignore[override]
        """True while something is held."""
        return bool(self.holding.holds)

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """Release the messages of holds that ended; one worker of many does the work."""
        return [
            LongTask(
                name="releases",
                every=RELEASE_TICKS,
                is_due=lambda: self.holding.ended,
                work=self._release,
            )
        ]

    def _release(self, stopping: Callable[[], bool]) -> None:
        with self._separate() as parts:
            Holds.of(parts).release_ended(stopping)

    def instructed(self, found: Sequence[Instruction], now: datetime) -> None:
        """Apply the holds."""
        self.holding.apply([one for one in found if isinstance(one, Hold)], now)

    def before_start(self, request: GuardedRequest) -> Verdict | None:
        """Put the message into the queue of a hold, or back into its own if that is full."""
        held = self.holding.take(request)
        if held is None:
            return None
        if held.stored:
            return Taken()
        return PutOff(keep=lambda one: self.held_back.add(one, held))

    def connected(self) -> None:
        """Forget messages on their way back: the broker redelivers them."""
        self.held_back.empty()

    def in_loop(self, consumer: Any) -> None:
        """Stop consuming the queues of held messages, and return these."""
        self.held_back.tick(consumer)
