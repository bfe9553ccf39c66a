"""What makes the parts of an app: its settings, events and backend, and what is made from them.

Every publisher imports this module, so what only workers or operators need is imported when it is
made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_dlq import signals
from celery_dlq.config import Settings, check_broker_url, visibility_timeout
from celery_dlq.errors import SettingsError
from celery_dlq.events import Events
from celery_dlq.letters.printable import get_logger
from celery_dlq.policies.checks import shown
from celery_dlq.policies.policy import task_policies
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.table import PolicyTable
from celery_dlq.registry import features
from celery_dlq.store.address import AddressKind
from celery_dlq.store.metrics import Measuring
from celery_dlq.store.worker_records import Clock
from celery_dlq.transport import default_delay, publications

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.operations.api import Operations
    from celery_dlq.operations.exports import Exports
    from celery_dlq.operations.incidents import Incidents
    from celery_dlq.operations.instructions import KnownNames
    from celery_dlq.operations.jobs import Jobs, Runner
    from celery_dlq.operations.memory_check import MemoryCheck
    from celery_dlq.operations.policies import PolicyAdmin
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.release import HeldQueues
    from celery_dlq.operations.removal import Removal
    from celery_dlq.operations.retention import Retention
    from celery_dlq.policies.delivery_limits import (
        LowLimit,
        default_limit,
        low_limits,
        low_receive_counts,
    )
    from celery_dlq.store.store import Store
    from celery_dlq.transport.held import WatchedFetch
    from celery_dlq.transport.redis.fetch import ReliableFetch
    from celery_dlq.transport.sqs.aws import redrive_policies
    from celery_dlq.transport.sqs.channel import VisibilityRenewal
    from celery_dlq.writing.memory_limit import MemoryLimit
    from celery_dlq.writing.spool import Spool

logger = get_logger("celery_dlq")

_RABBITMQ = frozenset({"amqp", "amqps", "pyamqp", "librabbitmq"})  # transports, as kombu names them

# By name, as Celery names its own: only workers load them.
_WORKER_STEPS = (
    "celery_dlq.worker.bootsteps:GuardStep",
    "celery_dlq.worker.bootsteps:LongWorkStep",
)
_CONSUMER_STEPS = ("celery_dlq.worker.bootsteps:TickStep",)


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
    "Retention": "operations.retention",
    "default_limit": "policies.delivery_limits",
    "low_limits": "policies.delivery_limits",
    "low_receive_counts": "policies.delivery_limits",
    "Store": "store.store",
    "ReliableFetch": "transport.redis.fetch",
    "redrive_policies": "transport.sqs.aws",
    "VisibilityRenewal": "transport.sqs.channel",
    "MemoryLimit": "writing.memory_limit",
    "Spool": "writing.spool",
}
LATER = {name: _Imported(f"celery_dlq.{module}", name) for name, module in _LATER.items()}
"""What only some processes need; whoever publishes imports this module, and none of these."""
if not TYPE_CHECKING:
    globals().update(LATER)


class Assembly:
    """One app's settings, events and backend, and the parts made from them."""

    def __init__(self, app: Any, clock: Clock) -> None:
        self.app = app
        self.clock = clock
        self.events = Events()
        self.events.subscribe(signals.relay, signals.wants)
        self.measuring = Measuring(lambda: self.backend.new_counts.add_counts)
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._backend: Store | None = None
        self._backends_of_parents: list[Store] = []
        self._pid = os.getpid()
        self._server: Mapping[str, Any] | None = None

    def install(self) -> None:
        """Add the guard to the app's workers, and default delays to its publishers."""
        self.app.steps["worker"].update(_WORKER_STEPS)
        self.app.steps["consumer"].update(_CONSUMER_STEPS)
        default_delay.install(self.app, self)
        publications.install()

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings."""
        if self._settings is None:
            self._settings = Settings.from_conf(self.app.conf)
        return self._settings

    @property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names."""
        return self.settings.redaction

    @property
    def backend(self) -> Store:
        """The backend for operators in this process; a worker and its threads have their own."""
        with self._lock:
            if self._backend is None:
                self._backend = backend_for(self.settings, self.app)
            elif self._pid != os.getpid():
                # Forked. The connections are the parent's; freeing the object would close them.
                self._backends_of_parents.append(self._backend)
                self._backend = self._backend.separate()
            self._pid = os.getpid()
            return self._backend

    @contextmanager
    def using(self, backend: Store) -> Iterator[None]:
        """Use another backend and read the settings again until the block ends; for tests."""
        with self._lock:
            before = self._settings, self._backend
            self._settings, self._backend = None, backend
        try:
            yield
        finally:
            self.measuring.flush()
            with self._lock:
                self._settings, self._backend = before

    def close(self) -> None:
        """Close all connections; the next operation opens new ones."""
        if self._backend is not None:
            self.measuring.close()
        with self._lock:
            if self._backend is not None:
                self._backend.close()
                self._backend = self._backend.separate()

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks."""
        self._settings = None  # as they are now, e.g. in a test that changed them
        settings, table = self.settings, self.policy_table()
        check_broker_url(self.app.conf.broker_read_url)
        check_broker_url(self.app.conf.broker_write_url)
        table.check()
        try:
            transport = self.app.connection_for_read().transport_cls
        except (KeyError, ImportError) as exc:  # kombu's, for a scheme that it does not know
            broker = shown(self.app.conf.broker_read_url)
            expected = f"expected broker_url to name a transport of kombu, got {broker}"
            raise SettingsError(f"{expected}; correct it, or install its package") from exc
        settings.check_visibility(table, transport, self.app.conf.broker_transport_options)
        settings.store_at(self.app.conf)
        # Not `amqp.queues`: it would keep what the configuration says now.
        declared = self.app.amqp.Queues(self.app.conf.task_queues)
        for low in self._low_limits(table, lambda: None, declared, {}):
            if low.vanishes:
                raise SettingsError(low.text)

    # -- for operators ------------------------------------------------------------

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

    def separated(self) -> Assembly:
        """The same with connections and counts of its own, e.g. for a worker."""
        own = copy(self)
        vars(own).update(
            _lock=threading.RLock(),
            _backend=self.backend.separate(),
            _backends_of_parents=[],
        )
        own.measuring = Measuring(lambda: own.backend.new_counts.add_counts)
        return own

    @contextmanager
    def separate(self) -> Iterator[Assembly]:
        """The same with connections of its own, for a thread, until the block ends."""
        own = self.separated()
        try:
            yield own
        finally:
            own.measuring.close()
            own.backend.close()

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

    def _low_limits(
        self,
        table: PolicyTable,
        default: Callable[[], int | None],
        queues: Mapping[str, Any],
        task_queues: Mapping[str, str],
    ) -> Iterator[LowLimit]:
        """Where a limit of RabbitMQ would end messages before a policy does."""
        if self.app.connection_for_read().transport_cls not in _RABBITMQ:
            return iter(())
        adopts = bool(self.settings.of("adopt"))
        return low_limits(table, queues, task_queues, adopts=adopts, default=default)

    def low_limits(self, table: PolicyTable, task_queues: Mapping[str, str]) -> Iterator[LowLimit]:
        """The same with the limit that RabbitMQ has by default, if it answers."""
        return self._low_limits(table, self._default_limit, self.app.amqp.queues, task_queues)

    def _default_limit(self) -> int | None:
        """The limit that this app's RabbitMQ gives to quorum queues; ``None`` if it is away."""
        if self._server is None:
            with suppress(Exception), self.app.connection_for_read(connect_timeout=2) as connection:
                self._server = connection.connection.server_properties
        return default_limit(self._server or {})

    def warn_of_low_limits(self, connection: Any) -> None:
        """Warn of limits of RabbitMQ and of Amazon SQS, when a worker has connected."""
        server = getattr(connection.connection, "server_properties", {})
        tasks: Mapping[str, str] = {}
        with suppress(Exception):  # a route of the user's may take no call without arguments
            tasks = default_delay.task_queues(self.app)
        table, queues = self.policy_table(), self.app.amqp.queues
        for low in self._low_limits(table, lambda: default_limit(server), queues, tasks):
            logger.warning("A message may vanish: %s", low.text)
        if self.app.connection_for_read().transport_cls == "sqs":
            for low in self.low_receive_counts(connection.default_channel, queues, tasks):
                logger.warning("A message may make no letter: %s", low.text)

    def low_receive_counts(
        self, channel: Any, queues: Iterable[str], tasks: Mapping[str, str]
    ) -> Iterator[LowLimit]:
        """What is wrong with the redrive policies of Amazon SQS's queues, as it tells them."""
        table, adopts = self.policy_table(), self.settings.of("adopt") or {}
        guarded = [name for name in queues if table.tasks or table.resolve(name) is not None]
        policies = redrive_policies(channel, guarded)
        adopted = [channel.entity_name(name) for name in adopts]
        return low_receive_counts(table, policies, tasks, adopted=adopted)

    def memory_check(self) -> MemoryCheck:
        """Finds what endangers letters in the memory of Redis."""
        table, queues = self.policy_table(), KnownQueues.from_app(self.app).names
        return MemoryCheck(self.settings, table, queues, self.app.conf, self.backend.memory)

    def policy_table(self) -> PolicyTable:
        """The policies of the app's queues and of its registered tasks."""
        return PolicyTable(self.settings.queues, task_policies(self.app))

    # -- for workers --------------------------------------------------------------

    def retention(self, actor: str) -> Retention:
        """What trims dead-letter queues on behalf of a worker."""
        return Retention(self.backend.letters, self.backend.workers, self.events, actor)

    def memory_limit(self, *, warns: bool = False) -> MemoryLimit:
        """What keeps letters from filling Redis."""
        warnings = self.memory_check().warnings if warns else None
        return MemoryLimit(self.backend.memory, self.settings.memory_limit, warnings)

    def spool(self) -> Spool:
        """Where letters wait on this host, named after the store without its password."""
        store = self.settings.store_at(self.app.conf)
        return Spool(self.settings.spool_dir, " ".join(map(str, store)))

    def reliable_fetch(self) -> WatchedFetch | None:
        """How a worker fetches from Redis or Amazon SQS; ``None`` if the app has no policy."""
        table = self.policy_table()
        if not (table.queues or table.tasks):
            return None
        options = self.app.conf.broker_transport_options
        if self.app.connection_for_read().transport_cls == "sqs":
            return VisibilityRenewal(self.settings, options, self.app.connection_for_read)
        address, _prefix = self.settings.store_at(self.app.conf)
        conf = self.app.conf
        here = address.of_broker and conf.broker_read_url == conf.broker_write_url
        # With several servers, the broker may be another one than the store.
        one = len(address.urls) == 1 or address.kind is AddressKind.SENTINELS
        return ReliableFetch(self.settings, options, self.backend if here and one else None)

    def outboxes(self) -> list[Any]:
        """What features record letters in before they are stored; see `Feature.outbox`."""
        made = (feature.load(feature.outbox)(self) for feature in features() if feature.outbox)
        return [one for one in made if one is not None]

    def dead_letter_queues(self) -> list[str]:
        """The dead-letter queues that the settings name; others follow from patterns and tasks."""
        settings = self.settings
        named = (policy.dead_letter_queue_of(queue) for queue, policy in settings.queues.items())
        adopts = settings.of("adopt") or {}
        targets = (target for target in adopts.values() if target is not None)
        every = (*named, *settings.policies.by_exception, *targets)
        return [name for name in every if not set(name) & set("*?[")]


def backend_for(settings: Settings, app: Any) -> Store:
    """Make the backend that the settings name; nothing is sent yet."""
    address, prefix = settings.store_at(app.conf)
    timeout = visibility_timeout(
        app.connection_for_read().transport_cls, app.conf.broker_transport_options
    )
    return Store(
        address,
        prefix=prefix,
        timeout_seconds=settings.store_timeout,
        count_ttl_seconds=settings.count_seconds(timeout),
    )
