"""Circuit breakers that are open: probes, and the release of messages, by one worker of many."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from celery_dlq.events import on_behalf_of
from celery_dlq.features.circuit_breaker.circuits import ACTOR, Circuits, emptied
from celery_dlq.features.circuit_breaker.policy import Happened
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import to_micros
from celery_dlq.operations.job import CANCELLED, DONE, Job, JobRun
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.release import new_release, release_probe
from celery_dlq.store.holds import OPEN, RELEASING, Hold

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq.worker")

_FULL_MICROS = 10_000_000
_LOOK_SECONDS = 2.0


def recover(assembly: Assembly, stopping: Callable[[], bool]) -> None:
    """Send probes and release the messages of an app's circuit breakers: what is due now."""
    recovery = _Recovery(assembly)
    with on_behalf_of(ACTOR):
        recovery.send_probes()
        recovery.for_each(lambda hold: recovery.release(hold, stopping))


class _Recovery:
    """Sends probes and releases messages; of many workers, one does each."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._store = assembly.backend.instructions
        self._jobs = assembly.jobs()
        self._held = assembly.held_queues()
        self._circuits = Circuits.from_assembly(assembly)

    def for_each(self, act: Callable[[Hold], None]) -> None:
        """Do something for each breaker that is not closed."""
        self._held.for_each(lambda hold: None if hold.circuit is None else act(hold))

    def send_probes(self) -> None:
        """Send the oldest message of each breaker, if it is time, and no other worker has."""
        self.for_each(self._send_probe)

    def _is_off(self, queue: str) -> bool:
        """True if an override has ended the breakers of a queue: nobody counts their probes."""
        overrides = PolicyAdmin(self._assembly).in_force().overrides
        return queue in overrides and overrides[queue][0].of("circuit_breaker") is False

    def _send_probe(self, hold: Hold) -> None:
        circuit, now = hold.circuit, self._store.now()
        if circuit is None or circuit.state != OPEN or not hold.in_force(now):
            return
        if self._is_off(circuit.queue):
            self._circuits.change_breaker(circuit.task, circuit.queue, Happened.CLOSED)
            return
        # Of a full hold, a worker runs one that is still on the broker, if there is one.
        wait = _FULL_MICROS if self._held.is_full(hold) else 0
        if circuit.micros_until_probe(to_micros(now)) > -wait or not self._held.length(hold):
            return
        after, ours = self._circuits.change_breaker(circuit.task, circuit.queue, Happened.PROBE_DUE)
        if after is not None and ours:
            sent = release_probe(self._jobs, after.id, after.marker)
            logger.info("The circuit breaker %s sent %d messages as a probe", hold.id, sent)

    def release(self, hold: Hold, stopping: Callable[[], bool]) -> None:
        """Release the messages, slowly at first; go on with a release whose process died."""
        circuit, job = hold.circuit, self._held.release_of(hold)
        if circuit is None or stopping():
            return
        if job is not None and job.state == CANCELLED and self._held.length(hold):
            if self._is_off(circuit.queue):  # its probe would close it at once: a person goes on
                return
            reason = f"its release, job {job.id}, was cancelled"
            self._circuits.change_breaker(
                circuit.task, circuit.queue, Happened.OPENED, reason=reason
            )
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
                self.send_probes()
            return stopping()

        return is_stopping

    def _next_run(self, hold: Hold, job: Job | None) -> JobRun | None:
        """The release that this worker does; ``None`` if another does it, or not yet."""
        if job is None:
            options = RedriveOptions(growing=True, marker=hold.marker)
            run = new_release(self._jobs, hold.id, options)
            run.update(total=self._held.length(hold))
            if not self._store.replace(hold, replace(hold, job=run.job.id)):
                return None
            run.send_heartbeat(now=True)  # or another worker would take it for one that died before
            return run
        if job.state == DONE:  # its worker died before it could say so
            emptied(self._circuits, hold)
        return self._held.resumed(job)
