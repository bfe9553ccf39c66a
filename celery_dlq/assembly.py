"""Makes the parts of an app: of its publishers, its workers and its operators.

Every publisher imports this module, so the rest is imported when it is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from celery_dlq.config import RABBITMQ, Settings, check_broker_url, visibility_timeout
from celery_dlq.errors import SettingsError
from celery_dlq.events import Event, Events
from celery_dlq.policies.checks import shown
from celery_dlq.policies.policy import task_policies
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.address import AddressKind
from celery_dlq.store.metrics import Measuring
from celery_dlq.store.worker_records import Clock
from celery_dlq.transport import default_delay, publications

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.operations.jobs import Jobs
    from celery_dlq.operations.memory_check import MemoryCheck
    from celery_dlq.operations.policies import KnownNames
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.release import HeldQueues
    from celery_dlq.operations.retention import Retention
    from celery_dlq.store.store import Store
    from celery_dlq.transport.held import WatchedFetch
    from celery_dlq.writing.memory_limit import MemoryLimit
    from celery_dlq.writing.spool import Spool

# By name, as Celery names its own: only workers load them.
_WORKER_STEPS = (
    "celery_dlq.worker.bootsteps:GuardStep",
    "celery_dlq.worker.bootsteps:LongWorkStep",
)
_CONSUMER_STEPS = ("celery_dlq.worker.bootsteps:TickStep",)
_SIGNALS = "celery_dlq.signals"


class Assembly:
    """One app's settings, events and backend, and the parts made from them."""

    def __init__(self, app: Any, clock: Clock) -> None:
        self.app = app
        self.clock = clock
        self.events = Events()
        self.events.subscribe(_relay, _wants)
        self.measuring = Measuring(lambda: self.backend.new_counts.add_counts)
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._backend: Store | None = None
        self._backends_of_parents: list[Store] = []
        self._pid = os.getpid()
        self.server: Mapping[str, Any] | None = None  # what RabbitMQ says of itself, once asked

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
        if transport in RABBITMQ:
            from celery_dlq.operations.broker_limits import refuse_what_vanishes

            refuse_what_vanishes(self, table)

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

    def memory_check(self) -> MemoryCheck:
        """Finds what endangers letters in the memory of Redis."""
        from celery_dlq.operations.memory_check import MemoryCheck

        table, queues = self.policy_table(), KnownQueues.from_app(self.app).names
        return MemoryCheck(self.settings, table, queues, self.app.conf, self.backend.memory)

    def policy_table(self) -> PolicyTable:
        """The policies of the app's queues and of its registered tasks."""
        return PolicyTable(self.settings.queues, task_policies(self.app))

    def retention(self, actor: str) -> Retention:
        """What trims dead-letter queues on behalf of a worker."""
        from celery_dlq.operations.retention import Retention

        return Retention(self.backend.letters, self.backend.workers, self.events, actor)

    def memory_limit(self, *, warns: bool = False) -> MemoryLimit:
        """What keeps letters from filling Redis."""
        from celery_dlq.writing.memory_limit import MemoryLimit

        warnings = self.memory_check().warnings if warns else None
        return MemoryLimit(self.backend.memory, self.settings.memory_limit, warnings)

    def spool(self) -> Spool:
        """Where letters wait on this host, named after the store without its password."""
        from celery_dlq.writing.spool import Spool

        store = self.settings.store_at(self.app.conf)
        return Spool(self.settings.spool_dir, " ".join(map(str, store)))

    def reliable_fetch(self) -> WatchedFetch | None:
        """How a worker fetches from Redis or Amazon SQS; ``None`` if the app has no policy."""
        table = self.policy_table()
        if not (table.queues or table.tasks):
            return None
        options = self.app.conf.broker_transport_options
        if self.app.connection_for_read().transport_cls == "sqs":
            from celery_dlq.transport.sqs.channel import VisibilityRenewal

            return VisibilityRenewal(self.settings, options, self.app.connection_for_read)
        address, _prefix = self.settings.store_at(self.app.conf)
        conf = self.app.conf
        here = address.of_broker and conf.broker_read_url == conf.broker_write_url
        # With several servers, the broker may be another one than the store.
        one = len(address.urls) == 1 or address.kind is AddressKind.SENTINELS
        from celery_dlq.transport.redis.fetch import ReliableFetch

        return ReliableFetch(self.settings, options, self.backend if here and one else None)

    def dead_letter_queues(self) -> list[str]:
        """The dead-letter queues that the settings name; others follow from patterns and tasks."""
        settings = self.settings
        named = (policy.dead_letter_queue_of(queue) for queue, policy in settings.queues.items())
        adopts = settings.of("adopt") or {}
        targets = (target for target in adopts.values() if target is not None)
        every = (*named, *settings.policies.by_exception, *targets)
        return [name for name in every if not set(name) & set("*?[")]

    def reading(self) -> Reading:
        """Finds and reads letters."""
        from celery_dlq.operations.reading import Reading

        return Reading(self.backend.letters, self.redaction, self.backend.notes)

    def jobs(self) -> Jobs:
        """Makes, runs, shows and cancels jobs; and the audit."""
        from celery_dlq.operations.api import KINDS
        from celery_dlq.operations.jobs import Jobs

        return Jobs(self, KINDS)

    def held_queues(self) -> HeldQueues:
        """The queues of held messages."""
        from celery_dlq.operations.release import HeldQueues

        return HeldQueues(self.jobs())

    def known_names(self) -> KnownNames:
        """The tasks and queues that operators may name."""
        from celery_dlq.operations.policies import KnownNames

        return KnownNames(self)


def _wants(kind: type[Event]) -> bool:
    """True if a signal has a receiver, which imported the signals to connect."""
    return _SIGNALS in sys.modules and bool(sys.modules[_SIGNALS].wants(kind))


def _relay(event: Event) -> None:
    if _SIGNALS in sys.modules:
        sys.modules[_SIGNALS].relay(event)


def backend_for(settings: Settings, app: Any) -> Store:
    """Make the backend that the settings name; nothing is sent yet."""
    from celery_dlq.store.store import Store

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
