"""Demands of operators in a worker: messages that become letters instead of being executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from celery.worker import state

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.dead_letter.demand import Demand
from celery_dlq.letters.headers import redriven_at
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Reason
from celery_dlq.policies.decisions import Die
from celery_dlq.store.instructions import Instruction
from celery_dlq.store.store import Store
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

logger = get_logger("celery_dlq.worker")

_MAX_LOGGED = 10


def observer(parts: WorkerParts) -> Observer:
    """The observer of a worker."""
    return Demands(parts.backend)


class Demands(Observer):
    """The demands that a worker knows of; it learns new ones by its heartbeat.

    A demand stays until its message was acknowledged: a worker may be killed before that.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.known: dict[str, Demand] = {}
        self._new: list[str] = []
        self._met_now: list[Demand] = []
        self._met_before: list[Demand] = []

    @property
    def watching(self) -> bool:  # type: ignore[override]
        """True while there are demands."""
        return bool(self.known)

    def before_start(self, request: GuardedRequest) -> Die | None:
        """Dead-letter a message that an operator wants dead."""
        demand = self.demand_of(request)
        return None if demand is None else Die(Reason.OPERATOR, demand.text)

    before_end = before_start

    def after_end(self, request: GuardedRequest, _in_flight: InFlight, ended: Ended) -> None:
        """Forget a demand that was met, or that has lost its message."""
        letter = ended.letter
        if ended.succeeded or (letter is not None and letter.reason is Reason.OPERATOR):
            self.record_met(request.id)

    def instructed(self, found: Sequence[Instruction], now: datetime) -> None:
        """Apply the demands of the app, in place of those before."""
        demands = [one for one in found if isinstance(one, Demand) and one.in_force(now)]
        known = {demand.id: demand for demand in demands}
        new = [demand for demand in demands if self.known.get(demand.id) != demand]
        for demand in new[:_MAX_LOGGED]:
            logger.info("Task %s is to be dead-lettered: %s", demand.id, demand.text)
        self._new += [demand.id for demand in new]
        self.known = known

    def demand_of(self, request: GuardedRequest) -> Demand | None:
        """The demand for a request's task; ``None`` if it is none, or a redrive came after it."""
        demand = self.known.get(request.id) if isinstance(request.id, str) else None
        if demand is None:
            return None
        try:
            demand = self._store.instructions.get(Demand, demand.id)
            if demand is None:  # met, or withdrawn
                del self.known[request.id]
            elif (redriven := redriven_at(request.request_dict)) and redriven > demand.since:
                return None
        except StoreUnavailable:  # its letter will wait
            pass
        return demand

    def record_met(self, task_id: str) -> None:
        """Forget the demand for a task soon: its letter is stored, or it has succeeded."""
        demand = self.known.pop(task_id, None)
        if demand is not None:
            self._met_now.append(demand)

    def in_loop(self, consumer: Any) -> None:
        """Meet new demands at once, where that is possible; called once a second."""
        self._forget_met()
        new, self._new = self._new, []
        wanted = {task_id for task_id in new if task_id in self.known}
        if not wanted:
            return
        for entry, request in _waiting(consumer.timer):
            verdict = self.before_start(request) if request.id in wanted else None
            if verdict is not None and request.dlq_end_waiting(verdict):
                entry.cancel()
                consumer.qos.decrement_eventually()
        for task_id in wanted:
            request = state.requests.get(task_id)
            if hasattr(request, "dlq_terminate"):
                request.dlq_terminate(consumer.pool)

    def _forget_met(self) -> None:
        """Remove demands that were met; those of the last second may not be acknowledged yet."""
        try:
            if self._met_before:
                self._store.instructions.forget(self._met_before)
        except StoreUnavailable as exc:
            logger.debug("Demands that were met are forgotten later: %s", exc)
            return
        self._met_before, self._met_now = self._met_now, []


def _waiting(timer: Any) -> Iterator[tuple[Any, Any]]:
    """The requests that wait for their ETA, with their entries in a worker's timer.

    Source: ``_iter_schedule_requests`` in
    https://github.com/celery/celery/blob/main/celery/worker/control.py
    """
    for waiting in list(timer.schedule.queue):
        entry = waiting.entry
        request = entry.args[0] if entry.args else None
        if hasattr(request, "dlq_end_waiting") and not entry.canceled:
            yield entry, request
