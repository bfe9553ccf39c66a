"""The one place that makes things: an app's backend, its worker's guard, and all in between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu.utils.url import maybe_sanitize_url

from celery_dlq import __version__, signals
from celery_dlq.adopt.adopter import Adopter
from celery_dlq.adopt.bootstep import AdoptStep
from celery_dlq.adopt.letter import Adoption
from celery_dlq.adopt.run import AdoptRun, consumed_already
from celery_dlq.adopt.sources import source_of
from celery_dlq.backends.base import Backend, Clock, DeadLetterStore, WorkerInfo
from celery_dlq.backends.memory import MemoryBackend
from celery_dlq.config import Settings
from celery_dlq.contrib import sentry
from celery_dlq.decorators import policy_of
from celery_dlq.dlx.bootstep import PublishStep
from celery_dlq.dlx.publisher import ExchangeOutbox, ExchangePublisher, Targets
from celery_dlq.errors import BrokerUnavailable, StoreUnavailable
from celery_dlq.events import DeadLettered, Event, Events
from celery_dlq.logs import get_logger
from celery_dlq.metrics import Measuring, WorkerGauges
from celery_dlq.operations.api import Operations
from celery_dlq.operations.exports import Exports
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.reading import Progress, Reading
from celery_dlq.operations.retention import Retention, RetentionRound
from celery_dlq.policies.drift import TASK_PREFIX
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.publishing import default_delay
from celery_dlq.publishing.default_delay import DefaultDelays
from celery_dlq.record import EPOCH, DeadLetter
from celery_dlq.worker.bootsteps import GuardStep, TickStep
from celery_dlq.worker.failure import failure_of_exc_info
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.heartbeat import Heartbeat
from celery_dlq.worker.letter_writer import LetterWriter
from celery_dlq.worker.lifecycle import HANDLING
from celery_dlq.worker.policy_cache import PolicyCache
from celery_dlq.worker.sampling import Sampler
from celery_dlq.worker.spool import Spool

if TYPE_CHECKING:
    from celery_dlq.backends.redis.backend import RedisBackend

logger = get_logger("celery_dlq")

_MOST_TASKS = 5000
_BROKER_SECONDS = 10.0  # a quorum of nodes writes a large letter to its discs


class Assembly:
    """One app's settings, events and backend, and what is made of them.

    Args:
        app: The Celery app.
        clock: The present, aware UTC.

    Attributes:
        events: Told of what happens in this process.
        measuring: What operators count in this process.
    """

    def __init__(self, app: Any, clock: Clock) -> None:
        self.app = app
        self.clock = clock
        self.events = Events()
        self.events.subscribe(signals.relay, signals.wants)
        self.measuring = Measuring(lambda: self.backend.metrics)
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._backend: Backend | None = None
        self._backends_of_parents: list[Backend] = []
        self._pid = os.getpid()
        self._publisher: ExchangePublisher | None = None

    def install(self) -> None:
        """Let the app's workers guard its tasks, and its publishers delay messages."""
        self.app.steps["worker"].update({GuardStep, AdoptStep, PublishStep})
        self.app.steps["consumer"].add(TickStep)
        default_delay.install(self.app, self)

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings."""
        if self._settings is None:
            self._settings = Settings.from_conf(self.app.conf)
        return self._settings

    @property
    def backend(self) -> Backend:
        """The backend for operators in this process; a worker and its threads have their own."""
        with self._lock:
            if self._backend is None:
                self._backend = backend_for(self.settings, self.app)
            elif self._pid != os.getpid():
                # Forked: the connections are the parent's, which letting go of them would close.
                self._backends_of_parents.append(self._backend)
                self._backend = self._backend.separate()
            self._pid = os.getpid()
            return self._backend

    @contextmanager
    def using(self, backend: Backend) -> Iterator[None]:
        """For a while keep everything in another backend, and read the settings anew; for tests."""
        with self._lock:
            before = self._settings, self._backend, self._publisher
            self._settings, self._backend, self._publisher = None, backend, None
        try:
            yield
        finally:
            self.measuring.flush()
            with self._lock:
                self._drop_publisher()
                self._settings, self._backend, self._publisher = before

    def close(self) -> None:
        """Let go of connections; the next operation opens them again."""
        if self._backend is not None:
            self.measuring.close()
        with self._lock:
            if self._publisher is not None:
                self._publisher.close()
            if self._backend is not None:
                self._backend.close()
                self._backend = self._backend.separate()

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks.

        Raises:
            SettingsError: Something is wrong; the message says what and where.
        """
        settings, table = self.settings, policy_table_of(self.app, self.settings)
        table.check()
        for name, policy in table.tasks.items():
            settings.check_delays(policy, f"dead_letter_policy of {name}")
        settings.check_visibility(
            table,
            self.app.connection_for_write().transport_cls,
            self.app.conf.broker_transport_options,
        )
        settings.check_store(table)
        if settings.store == "broker":
            settings.check_broker(self.app.connection_for_write().transport.driver_type)
        if settings.store != "memory":
            settings.redis_url(self.app.conf.broker_url)

    # -- for operators ------------------------------------------------------------

    def reading(self) -> Reading:
        """What finds letters."""
        return Reading(self.backend.letters)

    def operations(self) -> Operations:
        """What changes them."""
        return Operations(
            self.app,
            self.settings,
            self.backend,
            self.reading(),
            self.policy_admin(),
            events=self.events,
            measuring=self.measuring,
            clock=self.clock,
        )

    def exports(self) -> Exports:
        """What exports them."""
        return Exports(self.backend, self.reading(), self.events, self.clock)

    def policy_admin(self) -> PolicyAdmin:
        """What shows and changes policies."""
        return PolicyAdmin(
            policy_table_of(self.app, self.settings),
            self.backend.workers,
            self.events,
            known_queues=partial(known_queues, self.app),
            task_queues=partial(queue_of_tasks, self.app),
        )

    def adopt_run(self) -> AdoptRun:
        """What adopts when an operator says so."""
        return AdoptRun(
            self.settings, self.backend, self.adopter, self.exchange_publisher, self.clock
        )

    # -- for workers --------------------------------------------------------------

    def make_guard(self, *, hostname: str, pid: int, flags_redelivery: bool) -> Guard:
        """The guard of one worker, once its store answers.

        Args:
            hostname: Node name of the worker.
            pid: Its main process.
            flags_redelivery: Whether the broker marks redelivered messages.

        Raises:
            SettingsError: Something is wrong with the settings.
            StoreUnavailable: The store did not answer in ``dlq_start_timeout``.
        """
        self.validate()
        settings, backend = self.settings, self.backend.separate()
        _wait_for(backend.letters, settings.start_timeout)
        table = policy_table_of(self.app, settings)
        policy_cache = PolicyCache(table, self.app.amqp.queues, self.app.conf.task_default_queue)
        _warn_of_unknown_queues(self.app, table)
        self.check_exchanges()
        measuring = Measuring(lambda: backend.metrics)
        place = _shown_place(settings, self.app.conf.broker_url)  # no password: that may change
        letter_writer = LetterWriter(
            backend.letters,
            Spool(settings.spool_dir, f"{place} {settings.key_prefix}"),
            outbox=self.letter_outbox(backend),
            events=self.events,
            mark=None if settings.sentry == sentry.OFF else self._marker(backend),
            counts=measuring.counts,
        )
        measuring.gauges = partial(_gauges, letter_writer, hostname)
        sampler = None
        if settings.sample_successes:
            sampler = Sampler(
                backend.samples,
                settings.sample_successes,
                self.clock,
                hostname=hostname,
                release=settings.release,
            )
        guard = Guard(
            policy_cache,
            letter_writer,
            backend.counter,
            self.clock,
            hostname=hostname,
            pid=pid,
            flags_redelivery=flags_redelivery,
            release=settings.release,
            counts=measuring.counts,
            sampler=sampler,
        )
        if settings.sentry != sentry.OFF and sentry.client() is not None:
            # Before the pool starts, so that its processes take part.
            instead = settings.sentry == sentry.GROUPS
            sentry.SentryDeduplicator(
                partial(_keeps, guard), HANDLING.get, instead=instead
            ).install()
        info = replace(
            card_of(self.app, settings),
            hostname=hostname,
            pid=pid,
            version=__version__,
            started_at=self.clock(),
        )
        retention = Retention(backend.letters, backend.workers, self.events, hostname)
        guard.periodic_tasks.add(
            Heartbeat(backend.workers, info, policy_cache.obey),
            *_trimming(backend.letters, retention, policy_cache),
            measuring,
            *([sampler] if sampler is not None else []),
        )
        return guard

    def make_adopters(self, consumed: Iterable[str], *, hostname: str, pid: int) -> list[Adopter]:
        """The adopters of the setting ``dlq_adopt``, for a thread of their own.

        Args:
            consumed: The queues that the worker consumes.
            hostname: Its node name.
            pid: Its main process.

        Raises:
            SettingsError: It consumes one of them.
        """
        orders = self.settings.adopt
        for queue in sorted(set(consumed).intersection(orders)):
            raise consumed_already(queue, hostname, by="dlq_adopt")
        if not orders:
            return []
        backend = self.backend.separate()
        return [
            self.adopter(queue, target, backend, hostname=hostname, pid=pid)
            for queue, target in orders.items()
        ]

    def adopter(
        self,
        queue: str,
        target: str | None,
        backend: Backend,
        *,
        hostname: str,
        pid: int | None = None,
        progress: Progress | None = None,
    ) -> Adopter:
        """An adopter of one queue; nothing is sent yet."""

        def adopted(letter: DeadLetter) -> None:
            self.events.emit(DeadLettered(at=self.clock(), letter=letter))
            if progress is not None:
                progress(1)

        settings = self.settings
        adoption = Adoption(
            self.app,
            settings.policies,
            queue,
            target,
            hostname=hostname,
            pid=pid or os.getpid(),
            release=settings.release,
        )
        return Adopter(
            queue,
            source_of(self.app, queue),
            adoption,
            backend.letters,
            self.letter_outbox(backend),
            self.clock,
            adopted,
        )

    # -- dead-letter exchanges ----------------------------------------------------

    def letter_outbox(self, backend: Backend) -> ExchangeOutbox | None:
        """The outbox of dead-letter exchanges; ``None`` if no policy names one."""
        targets = Targets(self.app, self.settings.policies)
        return ExchangeOutbox(backend.outbox, targets) if targets.exchanges() else None

    def exchange_publisher(self) -> ExchangePublisher | None:
        """What publishes letters to exchanges; ``None`` if no policy names one.

        Raises:
            SettingsError: Two policies name one exchange with two types.
        """
        with self._lock:
            targets = Targets(self.app, self.settings.policies)
            if self._publisher is None and targets.exchanges():
                self._publisher = ExchangePublisher(self.app, self.backend.separate(), targets)
                self.events.subscribe(self._publisher.stored, _is_death)
            return self._publisher

    def check_exchanges(self) -> None:
        """Refuse exchanges and queues that are not as the policies say.

        Raises:
            SettingsError: The message says which, and what the broker has.
        """
        publisher = self.exchange_publisher()
        try:
            if publisher is not None:
                publisher.check()
        except BrokerUnavailable as exc:  # Celery waits for the broker; they are declared later
            logger.warning("The dead-letter exchanges are not checked: %s", exc)

    def _drop_publisher(self) -> None:
        if self._publisher is not None:
            self.events.unsubscribe(self._publisher.stored)
            self._publisher.close()
            self._publisher.backend.close()

    def _marker(self, backend: Backend) -> Callable[[DeadLetter], DeadLetter]:
        """What marks letters of which Sentry will be told, once the app has initialised it."""
        reporter = sentry.SentryReporter(backend.reports)

        def marked(letter: DeadLetter) -> DeadLetter:
            if sentry.client() is not None:
                self.events.subscribe(reporter, _is_death)
            return reporter.mark(letter)

        return marked


def backend_for(settings: Settings, app: Any) -> Backend:
    """The backend that the settings name; nothing is sent yet.

    Args:
        settings: The checked settings.
        app: The Celery app: its broker is where letters are if ``dlq_url`` is not set.

    Raises:
        SettingsError: There is no usable URL, or the broker cannot keep letters.
    """
    if settings.store == "memory":
        return MemoryBackend()
    from celery_dlq.backends.redis.backend import RedisBackend  # noqa: PLC0415 - publishers need none

    broker = settings.store == "broker"
    return RedisBackend(
        settings.redis_url(app.conf.broker_url),
        prefix=settings.key_prefix,
        timeout_seconds=settings.store_timeout,
        count_ttl_seconds=settings.count_ttl,
        make_letters=partial(_letters_on_broker, settings, app) if broker else None,
    )


def _letters_on_broker(settings: Settings, app: Any, redis: RedisBackend) -> DeadLetterStore:
    """Letters in queues of the broker; their positions and claims, and all else, in Redis."""
    from celery_dlq.backends.broker.queue import QueueDriver  # noqa: PLC0415 - few need it
    from celery_dlq.backends.broker.store import BrokerStore  # noqa: PLC0415
    from celery_dlq.backends.redis.positions import PositionIndex  # noqa: PLC0415

    settings.check_broker(app.connection_for_write().transport.driver_type)
    index = PositionIndex(redis.client, redis.url, redis.keys, redis.count_ttl)
    driver = QueueDriver(app.connection_for_write, max(_BROKER_SECONDS, settings.store_timeout))
    named = (policy.dead_letter_queue_of(queue) for queue, policy in settings.queues.items())
    targets = (target for target in settings.adopt.values() if target is not None)
    expected = (name for name in (*named, *targets) if not set(name) & set("*?["))
    return BrokerStore(driver, index, expected)


def _shown_place(settings: Settings, broker_url: Any) -> str:
    """Where the letters are, without the password."""
    if settings.store == "redis":
        return str(maybe_sanitize_url(settings.redis_url(broker_url)))
    if settings.store == "broker":
        urls = broker_url if isinstance(broker_url, (list, tuple)) else str(broker_url).split(";")
        return ";".join(str(maybe_sanitize_url(str(url))) for url in urls)
    return settings.store


def _trimming(
    store: DeadLetterStore, retention: Retention, policy_cache: PolicyCache
) -> list[RetentionRound]:
    if store.capabilities.random_access:
        return [RetentionRound(retention, store, lambda: policy_cache.policies)]
    table = policy_cache.policies
    policies = [*table.queues.values(), *table.tasks.values()]
    if any(p.dead_letter_ttl or p.dead_letter_max_length for p in policies):
        logger.warning(
            "dlq_store is 'broker', so workers trim nothing: dead_letter_ttl and "
            "dead_letter_max_length are obeyed when `celery dlq trim` runs"
        )
    return []


def policy_table_of(app: Any, settings: Settings) -> PolicyTable:
    """The policies of an app's queues and of its registered tasks."""
    return PolicyTable(settings.queues, task_policies(app))


def task_policies(app: Any) -> dict[str, Policy]:
    """The policies of task decorators, by task name."""
    found = ((task.name, policy_of(task)) for task in list(app.tasks.values()))
    return {name: policy for name, policy in found if policy is not None}


def card_of(app: Any, settings: Settings) -> WorkerInfo:
    """What any worker of an app tells the others; who it is, is left open."""
    policies: Mapping[str, Policy] = {
        **settings.queues,
        **{f"{TASK_PREFIX}{name}": policy for name, policy in task_policies(app).items()},
    }
    tasks = sorted(name for name in app.tasks if not name.startswith("celery."))
    return WorkerInfo(
        hostname="",
        pid=0,
        version="",
        started_at=EPOCH,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        tasks=tuple(tasks[:_MOST_TASKS]),
        policies={name: policy.to_json() for name, policy in policies.items()},
    )


def known_queues(app: Any) -> set[str]:
    """The queues that an app's configuration names."""
    routes = app.conf.task_routes
    routed = routes.values() if isinstance(routes, dict) else ()
    named = {
        r if isinstance(r, str) else r.get("queue") for r in routed if isinstance(r, (str, dict))
    }
    names = {str(getattr(queue, "name", queue)) for queue in named if queue is not None}
    return {*names, *app.amqp.queues, app.conf.task_default_queue}


def queue_of_tasks(app: Any) -> dict[str, str]:
    """The queue to which each task with a policy of its own is published."""
    delays = DefaultDelays(app, Settings())
    return {name: delays.queue_of(app.tasks[name]) for name in task_policies(app)}


def _wait_for(store: DeadLetterStore, timeout_seconds: float) -> None:
    """Wait until a store answers.

    Raises:
        StoreUnavailable: It did not in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return store.check()
        except StoreUnavailable as exc:
            if time.monotonic() >= deadline:
                raise
            logger.warning("Waiting for the dead-letter store: %s", exc)
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def _warn_of_unknown_queues(app: Any, table: PolicyTable) -> None:
    for name, hint in table.unknown_queues(known_queues(app)).items():
        logger.warning(
            "dlq_queues[%r] is a policy for a queue that this app does not know; %s", name, hint
        )


def _is_death(kind: type[Event]) -> bool:
    return kind is DeadLettered


def _gauges(letter_writer: LetterWriter, hostname: str) -> WorkerGauges:
    return WorkerGauges(worker=hostname, spool=letter_writer.spooled, waiting=len(letter_writer))


def _keeps(guard: Guard, task: Any, delivery_info: dict[str, Any], exc_info: Any) -> bool:
    return guard.keeps(task, delivery_info, failure_of_exc_info(exc_info, task.throws))
