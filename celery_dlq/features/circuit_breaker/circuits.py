"""Circuit breakers: every change of a state, by one process of many.

A breaker that is not closed is a hold, and its state is in that hold: one write, which only
succeeds if nobody else has written, holds the messages and decides who tells the world.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from glob import escape
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.events import Action, Change, Events
from celery_dlq.features.circuit_breaker import CIRCUITS
from celery_dlq.features.circuit_breaker.ends import CircuitStore, hold_id_of
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Died,
    Happened,
    next_state,
)
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import to_micros
from celery_dlq.store.holds import MOST_HOLDS, OPEN, RELEASING, Circuit, Hold
from celery_dlq.store.instructions import reason_of
from celery_dlq.store.metrics import Counts
from celery_dlq.store.store import Store
from celery_dlq.transport.publications import broker_name

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq")

ACTOR = "circuit_breaker"
"""Actor of the changes that workers make by themselves."""

_ATTEMPTS = 10


class Circuits:
    """Changes the states of circuit breakers."""

    def __init__(self, backend: Store, events: Events, counts: Counts, broker: str) -> None:
        self._ends = backend.part(CircuitStore)
        self._backend = backend
        self._events = events
        self._counts = counts
        self.broker = broker

    @classmethod
    def from_assembly(cls, assembly: Assembly) -> Circuits:
        """Those of an app."""
        counts = assembly.measuring.counts
        return cls(assembly.backend, assembly.events, counts, broker_name(assembly.app))

    def change_breaker(
        self,
        task: str,
        queue: str,
        happened: Died | Happened,
        breaker: CircuitBreaker | None = None,
        *,
        actor: str = ACTOR,
        reason: str = "",
    ) -> tuple[Hold | None, bool]:
        """Let something happen to a breaker: its hold, unless it is closed; true if it changed."""
        hold_id, instructions = hold_id_of(task, queue, self.broker), self._backend.instructions
        reason = reason_of(reason)
        for _ in range(_ATTEMPTS):
            now, holds = instructions.now(), instructions.of(Hold)
            known = next((hold for hold in holds if hold.id == hold_id), None)
            before = known.circuit if known is not None and known.in_force(now) else None
            after = next_state(breaker or CircuitBreaker(), before, happened, to_micros(now))
            if after is before:
                return (None if before is None else known), False
            if known is None and len(holds) >= MOST_HOLDS:
                raise DLQError(f"expected fewer than {MOST_HOLDS} holds, got {len(holds)}")
            circuit = None if after is None else replace(after, task=task, queue=queue)
            if known is not None and before is not None:
                hold = replace(known, circuit=circuit, until=now if circuit is None else None)
                if before.state == RELEASING and circuit is not None:  # opened again
                    hold = replace(hold, job=None, actor=actor, reason=reason)
            else:
                hold = Hold(
                    id=hold_id,
                    task=escape(task),
                    queue=escape(queue),
                    broker=self.broker,
                    since=now,
                    circuit=circuit,
                    actor=actor,
                    reason=reason,
                )
            if instructions.replace(known, hold):
                self._record_change(before, hold, actor, now)
                return hold, True
        raise DLQError(f"other processes keep changing {hold_id}; try again")

    def _record_change(self, before: Circuit | None, hold: Hold, actor: str, at: datetime) -> None:
        circuit = hold.circuit
        if circuit is None:
            logger.info("The circuit breaker %s has released all its messages", hold.id)
            return
        if before is not None and before.state == circuit.state:
            return
        opens, place = circuit.state == OPEN, (circuit.task, circuit.queue)
        state, why = ("opened", hold.reason) if opens else ("closed", "")
        text = "Circuit breaker of task %s, queue %s: %s by %s%s"
        logger.warning(text, *place, state, actor, why and f": {why}")
        self._counts.count(CIRCUITS, *place, "open" if opens else "closed")
        change = Change(
            at=at,
            action=Action.CIRCUIT_OPENED if opens else Action.CIRCUIT_CLOSED,
            actor=actor,
            target=hold.id,
            detail=hold.for_audit(),
        )
        self._events.emit(change)
        try:  # the state is changed: a store that is away now changes nothing else
            self._backend.workers.record_change(change)
            if not opens:
                self._ends.forget_counts(hold.id)
        except StoreUnavailable as exc:
            logger.error("The audit may lack this change of a circuit breaker: %s", exc)  # noqa: TRY400


def emptied(circuits: Circuits, hold: Hold) -> None:
    """End the hold of a breaker that closed: all its messages are released."""
    if hold.circuit is not None:
        circuits.change_breaker(hold.circuit.task, hold.circuit.queue, Happened.EMPTIED)
