"""Circuit breakers in a worker: it counts how executions end, and sees to those that are open.

A success is counted in memory and sent to the store once a second; a letter at once, with the
successes so far. So the share of executions that died may leave out the successes of other workers
in the last second. Probes and the release of messages are the work of one worker of many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.features.circuit_breaker.ends import CircuitStore, hold_id_of
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Died,
    Happened,
    Succeeded,
)
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.store.holds import OPEN, RELEASING, Circuit, Hold
from celery_dlq.store.metrics import STORE_ERRORS
from celery_dlq.transport.publications import broker_name
from celery_dlq.worker.housekeeping import LongTask, Task
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

if TYPE_CHECKING:
    from celery_dlq.features.circuit_breaker.circuits import Circuits

logger = get_logger("celery_dlq.worker")

_MOST_PLACES = 4096  # queues may be generated at run time


class GuardedPlace(NamedTuple):
    """What a breaker is of, and its policy."""

    task: str
    queue: str
    breaker: CircuitBreaker


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker."""
    hold = parts.made.get("hold")
    return None if hold is None else CircuitWatch(parts, hold)


class CircuitWatch(Observer):
    """Counts for circuit breakers, and lets their states change."""

    def __init__(self, parts: WorkerParts, holding: Any) -> None:
        self._parts = parts
        self._broker = broker_name(parts.app)
        self._holding = holding
        # Successes that are not in the store yet; threads of a thread pool may lose one at times
        self._succeeded: Counter[GuardedPlace] = Counter()
        holding.probe = self._allow_probe

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """Send successes; send probes and release messages."""
        return [
            Task(name="circuit_breaker", work=self.tick),
            LongTask(name="recovery", every=2, is_due=self.is_due, work=self._recover),
        ]

    @cached_property
    def _circuits(self) -> Circuits:
        from celery_dlq.features.circuit_breaker.circuits import Circuits  # noqa: PLC0415 - as below

        return Circuits.from_assembly(self._parts.dlq)

    def _recover(self, stopping: Callable[[], bool]) -> None:
        from celery_dlq.features.circuit_breaker.recovery import recover  # noqa: PLC0415 - when due

        with self._parts.separate() as own:
            recover(own, stopping)

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """Count an end, and let the breaker look at it."""
        policy, queue = in_flight.resolved.policy, in_flight.resolved.queue
        breaker = None if policy is None else policy.of("circuit_breaker")
        if breaker is None:
            return
        place = GuardedPlace(request.task.name, queue, breaker)
        if ended.letter is not None:
            self._count_death(place, ended.letter)
            return
        if ended.succeeded and len(self._succeeded) < _MOST_PLACES:
            self._succeeded[place] += 1
        circuit = self._circuit(place)
        marker = request.request_dict.get(HOLD_HEADER)
        if circuit is not None and circuit.state == OPEN and _is_released(circuit, marker):
            with self._quietly():
                happened = Happened.PROBE_SUCCEEDED if ended.succeeded else Happened.PROBE_FAILED
                self._change_breaker(place, happened)

    def tick(self) -> None:
        """Send successes to the store."""
        found, self._succeeded = self._succeeded, Counter()
        if found:
            try:
                self._parts.backend.part(CircuitStore).succeeded(
                    [self._successes(place, number) for place, number in found.items()]
                )
            except StoreUnavailable:
                self._succeeded.update(found)
                raise

    def _count_death(self, place: GuardedPlace, letter: DeadLetter) -> None:
        """Count an execution that became a letter; perhaps the breaker opens, or stays open."""
        if letter.reason is Reason.EXPIRED:  # it was not executed
            return
        with self._quietly():
            circuit = self._circuit(place)
            released = circuit is not None and _is_released(
                circuit, json_codec.loads(letter.headers).get(HOLD_HEADER)
            )
            ends = self._parts.backend.part(CircuitStore).count_death(
                letter.fingerprint, self._successes(place, self._succeeded.pop(place, 0))
            )
            if released and circuit is not None and circuit.state == OPEN:
                self._change_breaker(place, Happened.PROBE_FAILED)
            elif released or place.breaker.opens_after(ends):
                died = Died(ends, letter.fingerprint, letter.id, released)
                self._change_breaker(place, died, died.reason_within(place.breaker.window))

    def _allow_probe(self, hold: Hold) -> str | None:
        circuit = hold.circuit
        if circuit is None:
            return None
        after, ours = self._circuits.change_breaker(circuit.task, circuit.queue, Happened.PROBE_DUE)
        if after is None or not ours:
            return None
        self._hold_from_now()
        logger.info("The circuit breaker %s is full; a message runs as a probe", hold.id)
        return after.marker

    def _circuit(self, place: GuardedPlace) -> Circuit | None:
        if not self._holding.holds:
            return None
        hold_id = self._hold_id(place)
        return next((hold.circuit for hold in self._holding.holds if hold.id == hold_id), None)

    def _hold_id(self, place: GuardedPlace) -> str:
        return hold_id_of(place.task, place.queue, self._broker)

    def _successes(self, place: GuardedPlace, number: int) -> Succeeded:
        return Succeeded(self._hold_id(place), place.breaker.window, number)

    def _change_breaker(
        self, place: GuardedPlace, happened: Died | Happened, reason: str = ""
    ) -> None:
        task, queue, breaker = place
        hold, _ = self._circuits.change_breaker(task, queue, happened, breaker, reason=reason)
        if hold is not None:
            self._hold_from_now()

    def _hold_from_now(self) -> None:
        """This worker holds from now on; the others within a second or two."""
        instructions = self._parts.backend.instructions
        self._holding.instructed(instructions.of(Hold), instructions.now())

    def is_due(self) -> bool:
        """True if a breaker releases, or a probe may be due, or a release may be cancelled."""
        holding = self._holding
        return any(hold.circuit and hold.job for hold in holding.ended) or any(
            (hold.circuit and hold.circuit.state == RELEASING) or holding.probe_is_due(hold)
            for hold in holding.holds
        )

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """A store that is away changes nothing else: tasks go on."""
        try:
            yield
        except DLQError as exc:
            self._parts.counts.count(STORE_ERRORS, "circuit_breaker")
            logger.warning("A circuit breaker missed the end of a task: %s", exc)


def _is_released(circuit: Circuit, marker: object) -> bool:
    """True for a message that was released since the breaker last opened."""
    return isinstance(marker, str) and marker.endswith(f".{circuit.opened_at}")
