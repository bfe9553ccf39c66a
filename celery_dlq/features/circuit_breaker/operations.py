"""Circuit breakers for operators: those that are open, and opening and closing one by hand."""

from __future__ import annotations

from collections.abc import Iterator
from glob import escape
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import whoami
from celery_dlq.features.circuit_breaker.circuits import Circuits
from celery_dlq.features.circuit_breaker.policy import Happened
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.policies.policy import task_policies
from celery_dlq.store.holds import OPEN, Hold

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.operations.release import HeldMessages


class Breakers:
    """Circuit breakers for operators; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self.circuits = Circuits.from_assembly(assembly)
        self._held = assembly.held_queues()
        self._names = assembly.known_names()

    def breakers(self) -> list[HeldMessages]:
        """The circuit breakers that are open, or closed and still releasing; as `holds`."""
        return [one for one in self._held.held_messages() if one.hold.circuit is not None]

    def doubt_of(self, task: str, queue: str | None) -> str:
        """Why nothing may be held, before a breaker is opened; refuses names that nobody knows."""
        self._names.matching(escape(task), queue and escape(queue))
        return self._names.doubt_of_task(escape(task))

    def open_breaker(self, task: str, queue: str | None = None, *, reason: str = "") -> Hold:
        """Open the circuit breaker of a task: its messages are held, and probes begin.

        Use `hold` to hold messages until somebody releases them.
        """
        self._names.matching(escape(task), queue and escape(queue))
        app = self._assembly.app
        if queue is None:
            routed = app.amqp.router.route({}, task).get("queue")
            queue = str(getattr(routed, "name", routed) or app.conf.task_default_queue)
        policy = PolicyAdmin(self._assembly).in_force().resolve(queue, task_policies(app).get(task))
        breaker = None if policy is None else policy.of("circuit_breaker")
        if breaker is None:
            raise DLQError(
                f"expected a task with circuit_breaker in its policy for queue {queue}, got "
                f"{task}; use `dlq hold` to hold its messages without one"
            )
        reason = reason.strip() or "opened by hand"
        hold, _ = self.circuits.change_breaker(
            task, queue, Happened.OPENED, breaker, actor=whoami(), reason=reason
        )
        assert hold is not None  # noqa: S101 - it is open
        return hold

    def close_breaker(self, task: str, queue: str | None = None) -> list[Hold]:
        """Close the circuit breaker of a task: workers release its messages, slowly at first.

        To release them at once, use `release`.
        """
        closed = []
        for one in self.breakers():
            circuit = one.hold.circuit
            others = one.hold.broker != self.circuits.broker
            if circuit is None or others or circuit.task != task:
                continue
            if queue not in (None, circuit.queue):
                continue
            hold, changed = self.circuits.change_breaker(
                task, circuit.queue, Happened.CLOSED, actor=whoami()
            )
            if hold is not None and changed:
                closed.append(hold)
        if not closed:
            raise NotFound(
                f"expected a task whose circuit breaker is open, got {task!r}; `dlq breaker` "
                f"lists them"
            )
        return closed


def are_open(assembly: Assembly) -> Iterator[tuple[tuple[str, ...], float]]:
    """Each circuit breaker that is not closed, for an exporter."""
    for one in assembly.held_queues().held_messages():
        if circuit := one.hold.circuit:
            yield (circuit.task, circuit.queue), 1.0 if circuit.state == OPEN else 0.5
