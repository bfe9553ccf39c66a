"""Circuit breakers in a worker: it counts how executions end, and sees when a breaker opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.features.circuit_breaker.operations import Circuits, hold_id_of, why
from celery_dlq.features.circuit_breaker.policy import CircuitBreaker, Died, Probed, ProbeDue
from celery_dlq.features.circuit_breaker.recovery import recover
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.logs import get_logger
from celery_dlq.metrics import STORE_ERRORS, Counts
from celery_dlq.store.circuits import Succeeded
from celery_dlq.store.instructions import OPEN, RELEASING, Circuit, Hold
from celery_dlq.worker.housekeeping import LongTask, Task
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

logger = get_logger("celery_dlq.worker")

_NOT_EXECUTED = frozenset({Reason.EXPIRED})
_MAX_EXECUTIONS = 4096


@dataclass(slots=True)
class Executions:
    """Executions of one task from one queue."""

    task: str
    queue: str
    breaker: CircuitBreaker  # The policy's
    # Those that succeeded and are not in the store yet. Threads of a thread pool may now and then
    # lose one
    succeeded: int = 0


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker."""
    hold = parts.made.get("hold")
    return None if hold is None else CircuitWatch(parts, hold)


class CircuitWatch(Observer):
    """Counts for circuit breakers, and lets their states change.

    A success is counted in memory and sent to the store once a second; a letter at once, with the
    successes so far. So the share of executions that died may leave out the successes of other
    workers in the last second.
    """

    def __init__(self, parts: WorkerParts, holding: Any) -> None:
        self._circuits: Circuits = Circuits.of(parts.dlq)
        self._ends = parts.backend.circuits
        self._instructions = parts.backend.instructions
        self._holding = holding
        self._counts = parts.counts
        self._separate = parts.separate
        self._executions: dict[tuple[str, str], Executions] = {}
        holding.probe = self._probe

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """Send successes; send probes and release messages: one worker of many does each."""
        return [
            Task(name="circuit_breaker", work=self.tick),
            LongTask(name="recovery", every=2, is_due=self.is_due, work=self._recover),
        ]

    def _recover(self, stopping: Callable[[], bool]) -> None:
        with self._separate() as parts:
            recover(parts, stopping)

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """Count an end, and let the breaker look at it."""
        executions = self._of(request, in_flight)
        if executions is None:
            return
        if ended.letter is not None:
            self.died(executions, ended.letter)
            return
        executions.succeeded += ended.succeeded
        if self._holding.holds:
            marker = request.request_dict.get(HOLD_HEADER)
            if marker is not None:
                self.ended(executions, marker, succeeded=ended.succeeded)

    def _of(self, request: GuardedRequest, in_flight: InFlight) -> Executions | None:
        policy, queue = in_flight.resolved.policy, in_flight.resolved.queue
        breaker = None if policy is None else policy.of("circuit_breaker")
        if breaker is None:
            return None
        place = (request.task.name, queue)
        found = self._executions.get(place)
        if found is None:
            if len(self._executions) >= _MAX_EXECUTIONS:  # of queues generated at run time
                self._executions.clear()
            found = self._executions.setdefault(place, Executions(*place, breaker))
        found.breaker = breaker
        return found

    def tick(self) -> None:
        """Send successes to the store."""
        found = [one for one in list(self._executions.values()) if one.succeeded]
        taken = [self._taken(one) for one in found]
        if taken:
            try:
                self._ends.succeeded(taken)
            except StoreUnavailable:
                for one, lost in zip(found, taken, strict=True):
                    one.succeeded += lost.number
                raise

    def died(self, executions: Executions, letter: DeadLetter) -> None:
        """Count an execution that became a letter; perhaps the breaker opens, or stays open."""
        if letter.reason in _NOT_EXECUTED:
            return
        with _Away(self._counts):
            circuit = self._circuit(executions)
            released = circuit is not None and _is_released(
                circuit, json_codec.loads(letter.headers).get(HOLD_HEADER)
            )
            ends = self._ends.died(letter.fingerprint, self._taken(executions))
            breaker = executions.breaker
            died = Died(ends, letter.fingerprint, letter.id, released)
            if released and circuit is not None and circuit.state == OPEN:
                self._change(executions, Probed(succeeded=False))
            elif released or breaker.trips(ends):
                self._change(executions, died, why(died, breaker.window))

    def ended(self, executions: Executions, marker: object, *, succeeded: bool) -> None:
        """Look at the end of an execution that became no letter, while something is held."""
        circuit = self._circuit(executions)
        if circuit is not None and circuit.state == OPEN and _is_released(circuit, marker):
            with _Away(self._counts):
                self._change(executions, Probed(succeeded))

    def _probe(self, hold: Hold) -> str | None:
        circuit = hold.circuit
        if circuit is None:
            return None
        after, ours = self._circuits.change(circuit.task, circuit.queue, ProbeDue())
        if after is None or not ours:
            return None
        self._holding.instructed(self._instructions.of(Hold), self._instructions.now())
        logger.info("The circuit breaker %s is full; a message runs as a probe", hold.id)
        return after.marker

    def _circuit(self, executions: Executions) -> Circuit | None:
        if not self._holding.holds:
            return None
        hold_id = self._hold_id(executions)
        return next((hold.circuit for hold in self._holding.holds if hold.id == hold_id), None)

    def _hold_id(self, executions: Executions) -> str:
        return hold_id_of(executions.task, executions.queue, self._circuits.broker)

    def _taken(self, executions: Executions) -> Succeeded:
        number, executions.succeeded = executions.succeeded, 0
        return Succeeded(self._hold_id(executions), executions.breaker.window, number)

    def _change(self, executions: Executions, happened: Died | Probed, reason: str = "") -> None:
        hold, _ = self._circuits.change(
            executions.task, executions.queue, happened, executions.breaker, reason=reason
        )
        if hold is not None:  # this worker holds from now on, the others within a second or two
            self._holding.instructed(self._instructions.of(Hold), self._instructions.now())

    def is_due(self) -> bool:
        """True if a breaker releases, or a probe may be due, or a release may be cancelled."""
        ended = any(hold.circuit and hold.job for hold in self._holding.ended)
        return ended or any(map(self._may_act, self._holding.holds))

    def _may_act(self, hold: Hold) -> bool:
        releases = hold.circuit is not None and hold.circuit.state == RELEASING
        return releases or bool(self._holding.probe_is_due(hold))


class _Away:
    """Lets a store that is away change nothing else: tasks go on."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> bool:
        if not isinstance(exc, DLQError):
            return False
        self._counts.count(STORE_ERRORS, "circuit_breaker")
        logger.warning("A circuit breaker does not see one end of a task: %s", exc)
        return True


def _is_released(circuit: Circuit, marker: object) -> bool:
    """True for a message that was released since the breaker last opened."""
    return isinstance(marker, str) and marker.endswith(f".{circuit.opened_at}")
