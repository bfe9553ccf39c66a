"""What workers do for circuit breakers that are not closed: send probes, release messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta

from celery_dlq.backends.base import OPEN, Backend, Hold
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import on_behalf_of
from celery_dlq.logs import get_logger
from celery_dlq.operations.circuits import ACTOR, Circuits, emptied
from celery_dlq.operations.job import DONE, FAILED, INTERRUPTED, WAITING, Job
from celery_dlq.operations.jobs import JobRun, Jobs
from celery_dlq.operations.running import Running
from celery_dlq.policies.circuit_breaker import Closed, ProbeDue, micros_until_probe
from celery_dlq.record import to_micros

logger = get_logger("celery_dlq.worker")

_FULL_MICROS = 10_000_000
_RETRY = timedelta(minutes=1)


class Recovery:
    """Sends probes and releases messages; of many workers, one does each.

    Args:
        backend: Keeps holds, their messages, and jobs.
        running: Publishes the messages.
        circuits: Changes the states.
        most: The setting ``dlq_held_max``.
        off: The queues whose circuit breakers an override has ended.
    """

    def __init__(
        self,
        backend: Backend,
        running: Running,
        circuits: Circuits,
        most: int,
        off: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._store = backend.holds
        self._held = backend.held
        self._jobs = Jobs(backend.jobs)
        self._running = running
        self._circuits = circuits
        self._most = most
        self._off = off

    def run(self, stopping: Callable[[], bool]) -> None:
        """Do what is due now.

        Args:
            stopping: Asked between batches; once it is true, another worker goes on.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        now, off = self._store.now(), self._off()
        for hold in self._store.all():
            if stopping():
                return
            others = hold.broker != self._circuits.broker
            if hold.circuit is None or others or not hold.in_force(now):
                continue
            with on_behalf_of(ACTOR):
                if hold.circuit.state == OPEN and hold.circuit.queue in off:
                    self._circuits.change(hold.circuit.task, hold.circuit.queue, Closed())
                elif hold.circuit.state == OPEN:
                    self._probe(hold)
                else:
                    self._release(hold, stopping)

    def _probe(self, hold: Hold) -> None:
        """Send the oldest message, if it is time, and no other worker has."""
        circuit, now = hold.circuit, to_micros(self._store.now())
        length = self._length(hold)
        # Of a full hold, a worker runs one that is still on the broker, if there is one.
        wait = _FULL_MICROS if length >= self._most else 0
        if circuit is None or micros_until_probe(circuit, now) > -wait or not length:
            return
        after, ours = self._circuits.change(circuit.task, circuit.queue, ProbeDue())
        if after is not None and ours:
            sent = self._running.release_probe(after.id, after.marker)
            logger.info("The circuit breaker %s sent %d messages as a probe", hold.id, sent)

    def _release(self, hold: Hold, stopping: Callable[[], bool]) -> None:
        """Release the messages, slowly at first; go on with a release whose process died."""
        if not self._length(hold):
            emptied(self._circuits, hold)
            return
        run = self._next_run(hold)
        if run is None:
            return
        run.stopping = stopping
        if self._running.run(run).state == DONE:
            emptied(self._circuits, hold)

    def _next_run(self, hold: Hold) -> JobRun | None:
        """The release that this worker does; ``None`` if another does it, or nobody shall."""
        job = self._job(hold)
        if job is None:
            options = {"growing": True, "marker": hold.marker}
            run = self._running.new_release(hold.id, options)
            run.tell(total=self._length(hold))
            if not self._store.replace(hold, replace(hold, job=run.job.id)):
                return None
            run.beat(now=True)  # or another worker would take it for one that died before
            return run
        if job.state == DONE:  # its worker died before it could say so
            emptied(self._circuits, hold)
        waits = job.state == FAILED and self._store.now() - job.updated_at > _RETRY
        if not waits and job.state not in (INTERRUPTED, WAITING):
            return None
        try:
            return self._jobs.again(job.id)
        except DLQError:  # another worker was faster
            return None

    def _job(self, hold: Hold) -> Job | None:
        try:
            return None if hold.job is None else self._jobs.get(hold.job)
        except NotFound:  # it had no time to begin
            return None

    def _length(self, hold: Hold) -> int:
        return self._held.length(hold.id)
