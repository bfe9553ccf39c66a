"""Circuit breakers in a worker: it counts how executions end, and sees to those that are open.

A success is counted in memory and sent to the store once a second; a letter at once, with the
successes so far. So the share of executions that died may leave out the successes of other workers
in the last second. Probes and the release of messages are the work of one worker of many.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.events import on_behalf_of
from celery_dlq.features.circuit_breaker.operations import (
    ACTOR,
    Circuits,
    CircuitStore,
    emptied,
    hold_id_of,
    why,
)
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Died,
    Happened,
    Succeeded,
)
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, Reason, to_micros
from celery_dlq.operations.job import CANCELLED, DONE, Job, JobRun
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.release import new_release, release_probe
from celery_dlq.store.instructions import OPEN, RELEASING, Circuit, Hold
from celery_dlq.store.metrics import STORE_ERRORS
from celery_dlq.worker.housekeeping import LongTask, Task
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq.worker")

_FULL_MICROS = 10_000_000
_LOOK_SECONDS = 2.0
_MOST_PLACES = 4096  # queues may be generated at run time


class Place(NamedTuple):
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
        self._circuits = Circuits.of(parts.dlq)
        self._holding = holding
        # Successes that are not in the store yet; threads of a thread pool may lose one at times
        self._succeeded: Counter[Place] = Counter()
        holding.probe = self._probe

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """Send successes; send probes and release messages."""
        return [
            Task(name="circuit_breaker", work=self.tick),
            LongTask(name="recovery", every=2, is_due=self.is_due, work=self._recover),
        ]

    def _recover(self, stopping: Callable[[], bool]) -> None:
        with self._parts.separate() as own:
            recover(own, stopping)

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """Count an end, and let the breaker look at it."""
        policy, queue = in_flight.resolved.policy, in_flight.resolved.queue
        breaker = None if policy is None else policy.of("circuit_breaker")
        if breaker is None:
            return
        place = Place(request.task.name, queue, breaker)
        if ended.letter is not None:
            self._died(place, ended.letter)
            return
        if ended.succeeded and len(self._succeeded) < _MOST_PLACES:
            self._succeeded[place] += 1
        circuit = self._circuit(place)
        marker = request.request_dict.get(HOLD_HEADER)
        if circuit is not None and circuit.state == OPEN and _is_released(circuit, marker):
            with self._quietly():
                happened = Happened.PROBE_SUCCEEDED if ended.succeeded else Happened.PROBE_FAILED
                self._change(place, happened)

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

    def _died(self, place: Place, letter: DeadLetter) -> None:
        """Count an execution that became a letter; perhaps the breaker opens, or stays open."""
        if letter.reason is Reason.EXPIRED:  # it was not executed
            return
        with self._quietly():
            circuit = self._circuit(place)
            released = circuit is not None and _is_released(
                circuit, json_codec.loads(letter.headers).get(HOLD_HEADER)
            )
            ends = self._parts.backend.part(CircuitStore).died(
                letter.fingerprint, self._successes(place, self._succeeded.pop(place, 0))
            )
            if released and circuit is not None and circuit.state == OPEN:
                self._change(place, Happened.PROBE_FAILED)
            elif released or place.breaker.trips(ends):
                died = Died(ends, letter.fingerprint, letter.id, released)
                self._change(place, died, why(died, place.breaker.window))

    def _probe(self, hold: Hold) -> str | None:
        circuit = hold.circuit
        if circuit is None:
            return None
        after, ours = self._circuits.change(circuit.task, circuit.queue, Happened.PROBE_DUE)
        if after is None or not ours:
            return None
        self._apply()
        logger.info("The circuit breaker %s is full; a message runs as a probe", hold.id)
        return after.marker

    def _circuit(self, place: Place) -> Circuit | None:
        if not self._holding.holds:
            return None
        hold_id = self._hold_id(place)
        return next((hold.circuit for hold in self._holding.holds if hold.id == hold_id), None)

    def _hold_id(self, place: Place) -> str:
        return hold_id_of(place.task, place.queue, self._circuits.broker)

    def _successes(self, place: Place, number: int) -> Succeeded:
        return Succeeded(self._hold_id(place), place.breaker.window, number)

    def _change(self, place: Place, happened: Died | Happened, reason: str = "") -> None:
        task, queue, breaker = place
        hold, _ = self._circuits.change(task, queue, happened, breaker, reason=reason)
        if hold is not None:
            self._apply()

    def _apply(self) -> None:
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


def recover(assembly: Assembly, stopping: Callable[[], bool]) -> None:
    """Send probes and release the messages of an app's circuit breakers: what is due now."""
    recovery = _Recovery(assembly)
    with on_behalf_of(ACTOR):
        recovery.probe()
        recovery.each(lambda hold: recovery.release(hold, stopping))


class _Recovery:
    """Sends probes and releases messages; of many workers, one does each."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._store = assembly.backend.instructions
        self._held = assembly.held()
        self._jobs = assembly.jobs()
        self._circuits = Circuits.of(assembly)

    def each(self, act: Callable[[Hold], None]) -> None:
        """Do something for each breaker that is not closed."""
        self._held.each(lambda hold: None if hold.circuit is None else act(hold))

    def probe(self) -> None:
        """Send the oldest message of each breaker, if it is time, and no other worker has."""
        self.each(self._probe)

    def _is_off(self, queue: str) -> bool:
        """True if an override has ended the breakers of a queue: nobody counts their probes."""
        overrides = self._assembly.policy_admin().in_force().overrides
        return queue in overrides and overrides[queue][0].of("circuit_breaker") is False

    def _probe(self, hold: Hold) -> None:
        circuit, now = hold.circuit, self._store.now()
        if circuit is None or circuit.state != OPEN or not hold.in_force(now):
            return
        if self._is_off(circuit.queue):
            self._circuits.change(circuit.task, circuit.queue, Happened.CLOSED)
            return
        # Of a full hold, a worker runs one that is still on the broker, if there is one.
        wait = _FULL_MICROS if self._held.is_full(hold) else 0
        if circuit.micros_until_probe(to_micros(now)) > -wait or not self._held.length(hold):
            return
        after, ours = self._circuits.change(circuit.task, circuit.queue, Happened.PROBE_DUE)
        if after is not None and ours:
            sent = release_probe(self._jobs, after.id, after.marker)
            logger.info("The circuit breaker %s sent %d messages as a probe", hold.id, sent)

    def release(self, hold: Hold, stopping: Callable[[], bool]) -> None:
        """Release the messages, slowly at first; go on with a release whose process died."""
        circuit, job = hold.circuit, self._held.job(hold)
        if circuit is None or stopping():
            return
        if job is not None and job.state == CANCELLED and self._held.length(hold):
            if self._is_off(circuit.queue):  # its probe would close it at once: a person goes on
                return
            reason = f"its release, job {job.id}, was cancelled"
            self._circuits.change(circuit.task, circuit.queue, Happened.OPENED, reason=reason)
            return
        if circuit.state != RELEASING or not hold.in_force(self._store.now()):
            return
        if not self._held.length(hold):
            emptied(self._circuits, hold)
            return
        run = self._next_run(hold, job)
        if run is None:
            return
        run.stopping = self._probing(stopping)
        if self._jobs.run(run).state == DONE:
            emptied(self._circuits, hold)

    def _probing(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """The same question; others' probes are sent meanwhile, for a release may take long."""
        looked_at = time.monotonic()

        def is_stopping() -> bool:
            nonlocal looked_at
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                looked_at = time.monotonic()
                self.probe()
            return stopping()

        return is_stopping

    def _next_run(self, hold: Hold, job: Job | None) -> JobRun | None:
        """The release that this worker does; ``None`` if another does it, or not yet."""
        if job is None:
            options = RedriveOptions(growing=True, marker=hold.marker)
            run = new_release(self._jobs, hold.id, options)
            run.tell(total=self._held.length(hold))
            if not self._store.replace(hold, replace(hold, job=run.job.id)):
                return None
            run.beat(now=True)  # or another worker would take it for one that died before
            return run
        if job.state == DONE:  # its worker died before it could say so
            emptied(self._circuits, hold)
        return self._held.resumed(job)
