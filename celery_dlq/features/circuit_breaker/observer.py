"""Circuit breakers in a worker: it counts how executions end, and sees when a breaker opens."""

from __future__ import annotations

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.features.circuit_breaker.operations import Circuits, hold_id_of, why
from celery_dlq.features.circuit_breaker.policy import Died, Probed, ProbeDue
from celery_dlq.features.hold.holding import Holding
from celery_dlq.features.hold.releases import Releases
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.logs import get_logger
from celery_dlq.metrics import STORE_ERRORS, Counts
from celery_dlq.policies.resolved import Executions, PolicyCache
from celery_dlq.store.circuits import CircuitStore, Succeeded
from celery_dlq.store.instructions import OPEN, RELEASING, Circuit, Hold, Instructions

logger = get_logger("celery_dlq.worker")

_NOT_EXECUTED = frozenset({Reason.EXPIRED})


class CircuitWatch:
    """Counts for circuit breakers, and lets their states change.

    A success is counted in memory and told to the store once a second; a letter at once, with the
    successes so far. So the share of executions that died may leave out the successes of other
    workers in the last second.
    """

    def __init__(
        self,
        circuits: Circuits,
        ends: CircuitStore,
        instructions: Instructions,
        policies: PolicyCache,
        holding: Holding,
        counts: Counts,
    ) -> None:
        self._circuits = circuits
        self._ends = ends
        self._instructions = instructions
        self._policies = policies
        self._holding = holding
        self._counts = counts
        holding.probe = self._probe

    def tick(self) -> None:
        """Tell the store of successes."""
        found = [one for one in list(self._policies.executions.values()) if one.succeeded]
        told = [self._taken(one) for one in found]
        if told:
            try:
                self._ends.succeeded(told)
            except StoreUnavailable:
                for one, taken in zip(found, told, strict=True):
                    one.succeeded += taken.number
                raise

    def close(self) -> None:
        """Do nothing: the successes of a last second change nothing."""

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
        self._holding.apply(self._instructions.of(Hold), self._instructions.now())
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
            self._holding.apply(self._instructions.of(Hold), self._instructions.now())


class Recoveries(Releases):
    """Sends probes and releases the messages of circuit breakers, in a thread."""

    ticks = 2
    thread_name = "dlq-recovery"

    def is_due(self) -> bool:
        """True if a breaker releases, or a probe may be due, or a release may be cancelled."""
        ended = any(hold.circuit and hold.job for hold in self._holding.ended)
        return ended or any(map(self._may_act, self._holding.holds))

    def _may_act(self, hold: Hold) -> bool:
        releases = hold.circuit is not None and hold.circuit.state == RELEASING
        return releases or self._holding.probe_is_due(hold)


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
