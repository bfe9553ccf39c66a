"""What workers do for circuit breakers that are not closed: send probes, release messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.events import on_behalf_of
from celery_dlq.features.circuit_breaker.operations import ACTOR, Circuits, emptied
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Closed,
    Opened,
    ProbeDue,
)
from celery_dlq.letters.record import to_micros
from celery_dlq.logs import get_logger
from celery_dlq.operations.instructions import HeldQueues
from celery_dlq.operations.job import CANCELLED, DONE, Job, JobRun
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.release import new_release, release_probe
from celery_dlq.store.instructions import OPEN, RELEASING, Hold, Instructions

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq.worker")

_FULL_MICROS = 10_000_000
_LOOK_SECONDS = 2.0


class Recovery:
    """Sends probes and releases messages; of many workers, one does each."""

    def __init__(
        self,
        instructions: Instructions,
        held: HeldQueues,
        jobs: Jobs,
        circuits: Circuits,
        off: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._store = instructions
        self._held = held
        self._jobs = jobs
        self._circuits = circuits
        self._off = off

    def run(self, stopping: Callable[[], bool]) -> None:
        """Do what is due now."""
        with on_behalf_of(ACTOR):
            self._each(self._probe)
            self._each(lambda hold: self._release(hold, stopping))

    def _each(self, act: Callable[[Hold], None]) -> None:
        """Do something for each breaker; what one of them has does not stop the others."""
        for hold in self._store.of(Hold):
            if hold.circuit is None or hold.broker != self._circuits.broker:
                continue
            try:
                act(hold)
            except StoreUnavailable:
                raise
            except DLQError as exc:
                logger.warning("The circuit breaker %s waits: %s", hold.id, exc)
            except Exception:
                logger.exception("The circuit breaker %s waits", hold.id)

    def _probe(self, hold: Hold) -> None:
        """Send the oldest message, if it is time, and no other worker has."""
        circuit, now = hold.circuit, self._store.now()
        if circuit is None or circuit.state != OPEN or not hold.in_force(now):
            return
        if circuit.queue in self._off():
            self._circuits.change(circuit.task, circuit.queue, Closed())
            return
        # Of a full hold, a worker runs one that is still on the broker, if there is one.
        wait = _FULL_MICROS if self._held.is_full(hold) else 0
        if circuit.micros_until_probe(to_micros(now)) > -wait or not self._held.length(hold):
            return
        after, ours = self._circuits.change(circuit.task, circuit.queue, ProbeDue())
        if after is not None and ours:
            sent = release_probe(self._jobs, after.id, after.marker)
            logger.info("The circuit breaker %s sent %d messages as a probe", hold.id, sent)

    def _release(self, hold: Hold, stopping: Callable[[], bool]) -> None:
        """Release the messages, slowly at first; go on with a release whose process died."""
        circuit, job = hold.circuit, self._held.job(hold)
        if circuit is None or stopping():
            return
        if job is not None and job.state == CANCELLED and self._held.length(hold):
            if circuit.queue in self._off():  # its probe would close it at once: a person goes on
                return
            same = CircuitBreaker()
            why = f"its release, job {job.id}, was cancelled"
            self._circuits.change(circuit.task, circuit.queue, Opened(), same, reason=why)
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
                self._each(self._probe)
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


def recover(assembly: Assembly, stopping: Callable[[], bool]) -> None:
    """Send probes and release the messages of an app's circuit breakers."""

    def off() -> set[str]:  # an override has ended their breakers: nobody counts their probes
        overrides = assembly.policy_admin().in_force().overrides
        key = "circuit_breaker"
        return {name for name, (policy, _) in overrides.items() if policy.of(key) is False}

    circuits, instructions = Circuits.of(assembly), assembly.backend.instructions
    Recovery(instructions, assembly.held(), assembly.jobs(), circuits, off).run(stopping)
