"""``DeadLetters(app)``: installs the plugin on an app; also the operator's API.

The one place that makes things is here too, `Assembly`: an app's backend, its worker's guard, and
all in between. Every publisher imports this module, so what only workers or operators need is
imported when it is made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime, timezone
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from celery.loaders.app import AppLoader
from celery.local import Proxy

from celery_dlq import signals
from celery_dlq.config import Settings, check_broker_url, visibility_timeout
from celery_dlq.errors import MissingExtra, SettingsError
from celery_dlq.events import Events
from celery_dlq.letters.filters import FilterFields
from celery_dlq.letters.redaction import Redaction
from celery_dlq.logs import get_logger
from celery_dlq.metrics import Measuring
from celery_dlq.policies.checks import check_names
from celery_dlq.policies.delivery_limits import LowLimit, default_limit, low_limits
from celery_dlq.policies.policy import task_policies
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.table import PolicyTable
from celery_dlq.registry import Feature, features
from celery_dlq.store.records import Clock
from celery_dlq.transport import default_delay

if TYPE_CHECKING:
    from celery_dlq.features.adopt.adopter import AdoptRun
    from celery_dlq.features.circuit_breaker.operations import Breakers
    from celery_dlq.features.dead_letter.operations import DemandRun
    from celery_dlq.features.differences.operations import Comparison
    from celery_dlq.features.groups.operations import Notes
    from celery_dlq.features.hold.operations import Holds
    from celery_dlq.features.prometheus.exporter import Exporter
    from celery_dlq.operations.api import Operations
    from celery_dlq.operations.exports import Exports
    from celery_dlq.operations.instructions import KnownNames
    from celery_dlq.operations.jobs import Jobs, Runner
    from celery_dlq.operations.policies import PolicyAdmin
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.release import HeldQueues
    from celery_dlq.operations.removal import Removal
    from celery_dlq.operations.retention import MemoryCheck
    from celery_dlq.store.jobs import JobStore
    from celery_dlq.store.letters import Letters
    from celery_dlq.store.store import Store
    from celery_dlq.store.workers import WorkerRegistry
    from celery_dlq.transport.held import WatchedFetch
    from celery_dlq.transport.redis.fetch import ReliableFetch
    from celery_dlq.transport.sqs.channel import VisibilityRenewal
    from celery_dlq.web.asgi import Access, DeadLettersApp
    from celery_dlq.writing.memory_limit import MemoryLimit

logger = get_logger("celery_dlq")

_RABBITMQ = frozenset({"amqp", "amqps", "pyamqp", "librabbitmq"})  # transports, as kombu names them

# By name, as Celery names its own: only workers load them.
_WORKER_STEPS = (
    "celery_dlq.worker.bootsteps:GuardStep",
    "celery_dlq.worker.bootsteps:LongWorkStep",
)
_CONSUMER_STEPS = ("celery_dlq.worker.bootsteps:TickStep",)

ATTRIBUTE = "_celery_dlq"
"""Attribute of an app that holds its first `DeadLetters`."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


def utc_now() -> datetime:
    """The present, aware UTC."""
    return datetime.now(timezone.utc)


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
    "KnownNames": "operations.instructions",
    "Jobs": "operations.jobs",
    "Runner": "operations.jobs",
    "MemoryCheck": "operations.retention",
    "PolicyAdmin": "operations.policies",
    "Reading": "operations.reading",
    "HeldQueues": "operations.release",
    "Removal": "operations.removal",
    "Store": "store.store",
    "ReliableFetch": "transport.redis.fetch",
    "VisibilityRenewal": "transport.sqs.channel",
    "MemoryLimit": "writing.memory_limit",
}
if not TYPE_CHECKING:  # whoever publishes imports this module, and needs none of these
    globals().update({name: _Imported(f"celery_dlq.{m}", name) for name, m in _LATER.items()})


class Assembly:
    """One app's settings, events and backend, and the parts made from them."""

    def __init__(self, app: Any, clock: Clock) -> None:
        self.app = app
        self.clock = clock
        self.events = Events()
        self.events.subscribe(signals.relay, signals.wants)
        self.measuring = Measuring(lambda: self.backend.metrics.add)
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
        settings.check_visibility(
            table,
            self.app.connection_for_read().transport_cls,
            self.app.conf.broker_transport_options,
        )
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
        return Runner(self._separate_jobs)

    @contextmanager
    def _separate_jobs(self) -> Iterator[Jobs]:
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
        own.measuring = Measuring(lambda: own.backend.metrics.add)
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

    def held(self) -> HeldQueues:
        """The queues of held messages."""
        from celery_dlq.operations.release import MOST_HELD

        return HeldQueues(self.jobs(), most=MOST_HELD)

    def names(self) -> KnownNames:
        """The tasks and queues that operators may name."""
        return KnownNames(self.backend.workers, tasks=lambda: self.app.tasks, queues=self._queues)

    def _queues(self) -> frozenset[str]:
        """The queues that the app, a policy, a letter or a live worker names."""
        workers = self.backend.workers.workers(with_tasks=False)
        return KnownQueues.of(self.app).names.union(
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
            known_queues=partial(KnownQueues.of, self.app),
            task_queues=partial(default_delay.task_queues, self.app),
            low_limits=lambda table, tasks: self._low_limits(
                table, self._default_limit, self.app.amqp.queues, tasks
            ),
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

    def _default_limit(self) -> int | None:
        """The limit that this app's RabbitMQ gives to quorum queues; ``None`` if it is away."""
        if self._server is None:
            with suppress(Exception), self.app.connection_for_read(connect_timeout=2) as connection:
                self._server = connection.connection.server_properties
        return default_limit(self._server or {})

    def warn_of_low_limits(self, connection: Any) -> None:
        """Warn of limits of RabbitMQ, when a worker has connected."""
        server = getattr(connection.connection, "server_properties", {})
        tasks: Mapping[str, str] = {}
        with suppress(Exception):  # a route of the user's may take no call without arguments
            tasks = default_delay.task_queues(self.app)
        table, queues = self.policy_table(), self.app.amqp.queues
        for low in self._low_limits(table, lambda: default_limit(server), queues, tasks):
            logger.warning("A message may vanish: %s", low.text)

    def memory_check(self) -> MemoryCheck:
        """Finds what endangers letters in the memory of Redis."""
        table, queues = self.policy_table(), KnownQueues.of(self.app).names
        return MemoryCheck(self.settings, table, queues, self.app.conf, self.backend.memory)

    def policy_table(self) -> PolicyTable:
        """The policies of the app's queues and of its registered tasks."""
        return PolicyTable(self.settings.queues, task_policies(self.app))

    # -- for workers --------------------------------------------------------------

    def memory_limit(self, *, warns: bool = False) -> MemoryLimit:
        """What keeps letters from filling Redis."""
        warnings = self.memory_check().warnings if warns else None
        return MemoryLimit(self.backend.memory, self.settings.memory_limit, warnings)

    def reliable_fetch(self) -> WatchedFetch | None:
        """How a worker fetches from Redis or Amazon SQS; ``None`` if the app has no policy."""
        table = self.policy_table()
        if not (table.queues or table.tasks):
            return None
        options = self.app.conf.broker_transport_options
        if self.app.connection_for_read().transport_cls == "sqs":
            return VisibilityRenewal(self.settings, options, self.app.connection_for_read)
        return ReliableFetch(self.settings, options)

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


class _Operation:
    """A method that delegates to a part of the assembly; made when it is first looked up."""

    def __init__(
        self, part: Callable[[Assembly], Any], find: Callable[[], Callable[..., Any]]
    ) -> None:
        self._part, self._find = part, find

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: DeadLetters | None, owner: type) -> Any:
        part, method = self._part, self._find()
        known = _keywords(method)

        @wraps(method)
        def call(self: DeadLetters, /, *args: Any, **kwargs: Any) -> Any:
            if known is not None:
                check_names(f"arguments of {method.__name__}()", kwargs, known)
            return method(part(self.assembly), *args, **kwargs)

        setattr(self._owner, self._name, call)
        return call if instance is None else MethodType(call, instance)


def _of(
    part: Callable[[Assembly], _Part], method: Callable[Concatenate[_Part, _Params], _Result]
) -> Callable[Concatenate[DeadLetters, _Params], _Result]:
    """A method that delegates to a part of the assembly, with its signature and docstring."""
    operation: Any = _Operation(part, cast("Any", method))  # `method` finds it, at run time
    return cast("Callable[Concatenate[DeadLetters, _Params], _Result]", operation)


def _keywords(method: Callable[..., Any]) -> Collection[str] | None:
    """The keywords that a method takes; ``None`` if it checks them itself."""
    found = dict(signature(method).parameters)
    if "fields" in found:
        return {*found, *FilterFields.__annotations__}
    return None if any(one.kind is one.VAR_KEYWORD for one in found.values()) else found


class DeadLetters:
    """Installs the plugin on a Celery app; also the operator's API.

    Making it reads neither the configuration nor Redis, so call it before or after you
    configure the app. Settings are checked when a worker starts, when a message is
    published, and at the first operation.

    Arguments that several methods share:

    - ``dead_letter_queue``: the queue's name, e.g. ``"orders-DLQ"``.
    - ``where``: the letters to work on, as a `LetterFilter`; or pass its fields as keywords,
      e.g. ``fingerprint="…"``. Without either, all letters.
    - ``limit``: at most this many letters; ``None`` for all.
    - ``progress``: called with the number of letters in every finished batch.
    - ``scanned``: called with the number of entries in every page read.

    Args:
        app: The Celery app. A second `DeadLetters` for one app shares the first one's
            installation, with its clock, its events and its connections.
        clock: Returns the present, aware UTC; only tests pass one.

    Example:
        ``dlq = DeadLetters(app)``
    """

    def __init__(self, app: Any, *, clock: Clock = utc_now) -> None:
        # The app itself: `celery.current_app` may be another app in another thread.
        self.app = app = app._get_current_object() if isinstance(app, Proxy) else app  # noqa: SLF001
        first: DeadLetters | None = getattr(app, ATTRIBUTE, None)
        self.assembly: Assembly = Assembly(app, clock) if first is None else first.assembly
        self.events = self.assembly.events
        if first is None:
            setattr(app, ATTRIBUTE, self)
            self.assembly.install()

    @classmethod
    def of(cls, app: Any) -> DeadLetters:
        """Return the `DeadLetters` of an app; make it if the app has none."""
        found = getattr(app, ATTRIBUTE, None)
        return found if isinstance(found, cls) else cls(app)

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.settings

    @property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names; for whatever shows letters to people.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.redaction

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks; for your CI.

        Raises:
            SettingsError: A setting or policy is wrong; the message names it.
        """
        self.assembly.validate()

    @property
    def store(self) -> Letters:
        """The store of the letters."""
        return self.assembly.backend.letters

    @property
    def registry(self) -> WorkerRegistry:
        """Live workers, overrides and the audit."""
        return self.assembly.backend.workers

    @property
    def job_store(self) -> JobStore:
        """The store of the jobs."""
        return self.assembly.backend.jobs

    def close(self) -> None:
        """Close all connections; the next operation opens new ones."""
        self.assembly.close()

    queues = _of(Assembly.reading, Reading.queues)
    letters = _of(Assembly.reading, Reading.letters)
    entries = _of(Assembly.reading, Reading.entries)
    page = _of(Assembly.reading, Reading.page)
    count = _of(Assembly.reading, Reading.count)
    tail = _of(Assembly.reading, Reading.tail)
    get = _of(Assembly.reading, Reading.get)
    entry = _of(Assembly.reading, Reading.entry)
    groups = _of(Assembly.reading, Reading.groups)
    group = _of(Assembly.reading, Reading.group)
    arguments = _of(Assembly.reading, Reading.arguments)

    redrive = _of(Assembly.operations, Operations.redrive)
    edit = _of(Assembly.operations, Operations.edit)
    dry_run = _of(Assembly.operations, Operations.dry_run)
    discard = _of(Assembly.removal, Removal.discard)
    purge = _of(Assembly.removal, Removal.purge)
    restore = _of(Assembly.removal, Removal.restore)
    restore_all = _of(Assembly.removal, Removal.restore_all)
    discarded = _of(Assembly.removal, Removal.discarded)
    trim = _of(Assembly.removal, Removal.trim)

    plan = _of(Assembly.operations, Operations.plan)
    start = _of(Assembly.operations, Operations.start)
    edited_arguments = _of(Assembly.operations, Operations.edited_arguments)
    jobs = _of(Assembly.jobs, Jobs.jobs)
    job = _of(Assembly.jobs, Jobs.job)
    cancel = _of(Assembly.jobs, Jobs.cancel)
    resume = _of(Assembly.jobs, Jobs.resume)
    resume_in_background = _of(Assembly.jobs, Jobs.resume_in_background)
    changes = _of(Assembly.jobs, Jobs.changes)

    policies = _of(Assembly.policy_admin, PolicyAdmin.policies)
    overrides = _of(Assembly.policy_admin, PolicyAdmin.overrides)
    policies_after = _of(Assembly.policy_admin, PolicyAdmin.after)
    policy_effect = _of(Assembly.removal, Removal.effect)
    check_override = _of(Assembly.policy_admin, PolicyAdmin.check_override)
    override_policy = _of(Assembly.policy_admin, PolicyAdmin.override_policy)
    lift_policy = _of(Assembly.policy_admin, PolicyAdmin.lift_policy)

    export = _of(Assembly.exports, Exports.export)

    memory = _of(Assembly.memory_check, MemoryCheck.memory)
    warnings = _of(Assembly.memory_check, MemoryCheck.warnings)

    if TYPE_CHECKING:  # what features add, see `_add_operations`
        differences = _of(Comparison, Comparison.differences)
        note = _of(Notes, Notes.note)
        notes = _of(Notes, Notes.notes)
        resolve = _of(Notes, Notes.resolve)
        mute = _of(Notes, Notes.mute)
        reopen = _of(Notes, Notes.reopen)
        check_hold = _of(Holds, Holds.preview)
        hold = _of(Holds, Holds.hold)
        end_hold = _of(Holds, Holds.end)
        holds = _of(Holds, Holds.holds)
        release = _of(Holds, Holds.release)
        breakers = _of(Breakers, Breakers.breakers)
        open_breaker = _of(Breakers, Breakers.open_breaker)
        close_breaker = _of(Breakers, Breakers.close_breaker)
        dead_letter = _of(DemandRun, DemandRun.dead_letter)
        withdraw = _of(DemandRun, DemandRun.withdraw)
        adopt = _of(AdoptRun, AdoptRun.adopt)
        serve_metrics = _of(Exporter, Exporter.serve_metrics)

    def asgi(
        self,
        *,
        access: Access | None = None,
        title: str = "",
        home: str = "",
        url: str | None = None,
        secret: str | None = None,
        hosts: Iterable[str] | None = (),
    ) -> DeadLettersApp:
        """The pages as an ASGI app, to mount in another app under any path.

        Args:
            access: Decides who may do what: gets Starlette's ``Request``, and returns a
                `celery_dlq.web.User`, or ``None`` for somebody unknown (401). May be a coroutine
                function. By default everybody whom your app lets through may look, and nobody
                may change anything.
            title: Name of the environment, e.g. ``production``, on each page.
            home: Link back to your app.
            url: Address of the pages as browsers see it, e.g. behind a proxy: forms are taken from
                there only. Defaults to the address of each request.
            secret: Signs forms; the same in all processes. Text of at least 16 characters. Defaults
                to a random one, with which forms only work in the process that made them.
            hosts: Names under which browsers may ask, beside ``localhost``, IP addresses and the
                name in ``url``. Under others, any web site could read the pages in the browser of
                who visits it (DNS rebinding). ``None`` if your app checks the header ``Host``
                itself.

        Raises:
            MissingExtra: Starlette or another package of the extra ``web`` is not installed.
            SettingsError: An argument is wrong.
        """
        try:
            from celery_dlq.web.asgi import DeadLettersApp
        except ModuleNotFoundError as exc:
            raise MissingExtra("dlq web", exc.name or "starlette", "web") from exc
        return DeadLettersApp(
            self,
            access=access,
            url=url,
            secret=secret,
            hosts=hosts,
            title=title,
            home=home,
            runs_jobs=access is not None,
        )

    def runner(self) -> Runner:
        """A runner of the jobs that wait, for this process; call its ``start`` and ``close``."""
        return self.assembly.runner()


def _add_operations(feature: Feature) -> None:
    """Add the methods of a feature to `DeadLetters`; see `Feature.operations`."""
    for name, place in feature.operations.items():
        operation = _Operation(
            partial(_made, feature, place.rpartition(".")[0]), partial(feature.load, place)
        )
        operation.__set_name__(DeadLetters, name)
        setattr(DeadLetters, name, operation)


def _made(feature: Feature, place: str, assembly: Assembly) -> Any:
    return feature.load(place)(assembly)


for _feature in features():
    _add_operations(_feature)


class Loader(AppLoader):
    """Celery's loader of apps, which also makes their `DeadLetters`: for somebody else's code.

    ``CELERY_LOADER=celery_dlq.Loader`` in the environment of every process of such an app, or
    ``celery --loader celery_dlq.Loader …`` for one command, does what ``DeadLetters(app)`` does.

    Celery makes an app's loader when it first reads the app's configuration: before a worker
    builds its parts, before ``Task.apply_async`` publishes. Only a message that is sent by name
    (``app.send_task``) before anything else gets no default delay.

    An app that was made with a ``loader`` of its own ignores the variable. An app that is nothing
    but a ``celeryconfig.py`` needs ``CELERY_CONFIG_MODULE=celeryconfig`` too, because Celery
    looks for that module by itself only with its own default loader.

    Args:
        app: The Celery app.

    Source: ``Celery._get_default_loader`` in
    https://github.com/celery/celery/blob/main/celery/app/base.py
    """

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        DeadLetters(app)
