"""What operators need of an app, beside what its workers do: see `celery_dlq.parts`.

No worker loads this module; what only some operations need is imported when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_dlq.parts import Parts
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.table import PolicyTable
from celery_dlq.transport import default_delay

if TYPE_CHECKING:
    from celery_dlq.operations.api import Operations
    from celery_dlq.operations.exports import Exports
    from celery_dlq.operations.incidents import Incidents
    from celery_dlq.operations.instructions import KnownNames
    from celery_dlq.operations.jobs import Jobs, Runner
    from celery_dlq.operations.policies import PolicyAdmin
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.release import HeldQueues
    from celery_dlq.operations.removal import Removal
    from celery_dlq.policies.delivery_limits import LowLimit, default_limit


class _Imported:
    """A name of another module, which is imported when it is called, or a method of it found."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*args, **kwargs)

    def __getattr__(self, method: str) -> Callable[[], Callable[..., Any]]:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda: getattr(getattr(import_module(self._module), self._name), method)


_LATER = {
    "Operations": "operations.api",
    "Exports": "operations.exports",
    "Incidents": "operations.incidents",
    "KnownNames": "operations.instructions",
    "Jobs": "operations.jobs",
    "Runner": "operations.jobs",
    "MemoryCheck": "operations.memory_check",
    "PolicyAdmin": "operations.policies",
    "Reading": "operations.reading",
    "HeldQueues": "operations.release",
    "Removal": "operations.removal",
    "default_limit": "policies.delivery_limits",
}
LATER = {name: _Imported(f"celery_dlq.{module}", name) for name, module in _LATER.items()}
"""What only some operations need, and importing all of it takes as long as a command."""
if not TYPE_CHECKING:
    globals().update(LATER)


class Assembly(Parts):
    """One app's settings, events and backend, and what operators make of them."""

    def reading(self) -> Reading:
        """Finds and reads letters."""
        return Reading(self.backend.letters, self.redaction, self.backend.notes)

    def incidents(self) -> Incidents:
        """Finds the causes that grow now."""
        return Incidents(self)

    def operations(self) -> Operations:
        """Redrives and edits letters, and plans that."""
        return Operations(Reading(self.backend.letters), self.jobs())  # not masked: it works on it

    def removal(self) -> Removal:
        """Discards, restores and trims letters."""
        return Removal(Reading(self.backend.letters), self.jobs())

    def jobs(self) -> Jobs:
        """Makes, runs, shows and cancels jobs; and the audit."""
        from celery_dlq.operations.api import KINDS

        return Jobs(
            self.app,
            self.settings,
            self.backend,
            self.policy_admin(),
            KINDS,
            events=self.events,
            measuring=self.measuring,
            clock=self.clock,
        )

    def runner(self) -> Runner:
        """Runs waiting jobs; each of its threads has connections of its own."""
        return Runner(self.separate_jobs)

    @contextmanager
    def separate_jobs(self) -> Iterator[Jobs]:
        """Jobs on connections of their own, as a worker runs them."""
        with self.separate() as own:
            yield own.jobs()

    def held_queues(self) -> HeldQueues:
        """The queues of held messages."""
        from celery_dlq.store.instructions import MOST_HELD

        return HeldQueues(self.jobs(), most=MOST_HELD)

    def known_names(self) -> KnownNames:
        """The tasks and queues that operators may name."""
        return KnownNames(
            self.backend.workers, tasks=lambda: self.app.tasks, queues=self._queue_names
        )

    def _queue_names(self) -> frozenset[str]:
        """The queues that the app, a policy, a letter or a live worker names."""
        workers = self.backend.workers.workers(with_tasks=False)
        return KnownQueues.from_app(self.app).names.union(
            self.policy_admin().guarded_queues(), *(info.queues for info in workers)
        )

    def exports(self) -> Exports:
        """Exports letters to Parquet."""
        return Exports(self.backend, self.reading(), self.events)

    def policy_admin(self) -> PolicyAdmin:
        """Shows and changes policies."""
        return PolicyAdmin(
            self.policy_table(),
            self.backend,
            self.events,
            known_queues=partial(KnownQueues.from_app, self.app),
            task_queues=partial(default_delay.task_queues, self.app),
            low_limits=self.low_limits,
        )

    def low_limits(self, table: PolicyTable, task_queues: Mapping[str, str]) -> Iterator[LowLimit]:
        """The same with the limit that RabbitMQ has by default, if it answers."""
        return self._low_limits(table, self._default_limit, self.app.amqp.queues, task_queues)

    def _default_limit(self) -> int | None:
        """The limit that this app's RabbitMQ gives to quorum queues; ``None`` if it is away."""
        if self._server is None:
            with suppress(Exception), self.app.connection_for_read(connect_timeout=2) as connection:
                self._server = connection.connection.server_properties
        return default_limit(self._server or {})
