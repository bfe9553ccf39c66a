"""The composition root: ``DeadLetters(app)`` wires settings, store, worker and operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.local import Proxy

from celery_dlq import __version__, signals
from celery_dlq.adopting import Adoptions
from celery_dlq.announcing import DeadLetterExchanges
from celery_dlq.backends.base import Clock, DeadLetterStore, JobStore, Override, WorkerRegistry
from celery_dlq.backends.memory import MemoryStore
from celery_dlq.config import Settings
from celery_dlq.errors import NotFound, SettingsError
from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.filters import LetterFilter
from celery_dlq.logs import get_logger
from celery_dlq.metrics import Measuring
from celery_dlq.operations.api import Operator
from celery_dlq.operations.policies import PolicyAdmin, PolicyReport
from celery_dlq.operations.retention import Retention
from celery_dlq.operations.selection import RawEntry
from celery_dlq.parts import (
    WorkerParts,
    make_job_store,
    make_metrics,
    make_sampled,
    make_store,
    make_worker_registry,
)
from celery_dlq.publishing import default_delay

if TYPE_CHECKING:
    from celery_dlq.adopt.adopter import Adopter, AdoptReport
    from celery_dlq.dlx.publisher import ExchangePublisher
    from celery_dlq.export.exporter import ExportReport

logger = get_logger("celery_dlq")

_ATTRIBUTE = "_celery_dlq"


def utc_now() -> datetime:
    """The present, aware UTC."""
    return datetime.now(timezone.utc)


class DeadLetters(Operator):
    """Installs the plugin on a Celery app; also the operator's API.

    Making it touches neither the configuration nor Redis, so it may stand before or
    after your settings. Settings are checked when a worker starts, when a message is
    published, and at the first operation.

    Args:
        app: The Celery app. A second `DeadLetters` for one app shares the first one's
            installation.
        clock: The present, aware UTC; only tests pass one.

    Example:
        ``dlq = DeadLetters(app)``
    """

    def __init__(self, app: Any, *, clock: Clock = utc_now) -> None:
        # The app itself: which one `celery.current_app` is, may be another in another thread.
        self.app = app = app._get_current_object() if isinstance(app, Proxy) else app  # noqa: SLF001
        self._clock = clock
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._store: DeadLetterStore | None = None
        self._registry: WorkerRegistry | None = None
        self._job_store: JobStore | None = None
        self.events = Events()
        self._exchanges = DeadLetterExchanges(app, lambda: self.settings, self._own_store)
        self._adoptions = Adoptions(app, lambda: self.settings, self.events, self._exchanges, clock)
        self._measuring = Measuring(lambda: make_metrics(self.settings, self.app.conf.broker_url))
        self.events.subscribe(signals.relay, signals.wants)
        if getattr(app, _ATTRIBUTE, None) is None:
            setattr(app, _ATTRIBUTE, self)
            self._install()

    @classmethod
    def of(cls, app: Any) -> DeadLetters:
        """The `DeadLetters` of an app; made, if the app has none."""
        found = getattr(app, _ATTRIBUTE, None)
        return found if isinstance(found, cls) else cls(app)

    # -- settings and parts -------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        if self._settings is None:
            self._settings = Settings.from_conf(self.app.conf)
        return self._settings

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks; for your CI.

        Raises:
            SettingsError: Something is wrong; the message says what and where.
        """
        from celery_dlq.assembly import policy_table_of  # noqa: PLC0415 - publishers need none of it

        table = policy_table_of(self.app, self.settings)
        table.check()
        for name, policy in table.tasks.items():
            self.settings.check_delays(policy, f"dead_letter_policy of {name}")
        self.settings.check_visibility(
            table,
            self.app.connection_for_write().transport_cls,
            self.app.conf.broker_transport_options,
        )
        self.settings.check_store(table)
        if self.settings.store == "broker":
            self.settings.check_broker(self.app.connection_for_write().transport.driver_type)
        if self.settings.store != "memory":
            self.settings.redis_url(self.app.conf.broker_url)

    @property
    def store(self) -> DeadLetterStore:
        """Where the letters are kept."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    @property
    def registry(self) -> WorkerRegistry:
        """What the processes of the app tell each other."""
        with self._lock:
            if self._registry is None:
                self._registry = make_worker_registry(self.settings, self.app.conf.broker_url)
            return self._registry

    def close(self) -> None:
        """Let go of connections; the next operation opens them again."""
        self._measuring.close()
        with self._lock:
            if self._registry is not None and self.settings.store != "memory":
                self._registry.close()
                self._registry = None
            if self._job_store is not None and self.settings.store != "memory":
                self._job_store.close()
                self._job_store = None
            if self._store is not None and self.settings.store != "memory":
                self._store.close()
                self._store = None
            self._exchanges.close()

    @property
    def job_store(self) -> JobStore:
        """Where jobs are kept."""
        with self._lock:
            if self._job_store is None:
                self._job_store = make_job_store(self.settings, self.app.conf.broker_url)
            return self._job_store

    # -- letters as data ----------------------------------------------------------

    def export(
        self,
        destination: str | Path,
        dead_letter_queues: str | Iterable[str] | None = None,
        where: LetterFilter | None = None,
        *,
        redact: Sequence[str] = (),
        redact_key: bytes | None = None,
        follow: threading.Event | None = None,
        roll_rows: int | None = None,
        roll_bytes: int | None = None,
        roll_seconds: float | None = None,
        then_trim: bool = False,
        successes: bool = False,
        filesystem: Any | None = None,
        progress: Callable[[int], None] | None = None,
        expected: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> ExportReport:
        """Write the letters to Parquet files; a second export writes only what is new.

        Each letter is in the files once, however often exports are killed. A folder keeps to
        the filter and the redaction that it was begun with. Letters that died at or after
        ``until`` wait, with all behind them, for a later run.

        Args:
            destination: A local folder, made if it is not there; or a URL of a file system
                that pyarrow or fsspec knows, e.g. ``s3://bucket/letters``.
            dead_letter_queues: Which queue or queues; ``None`` for all.
            where: Which letters; or give the fields of `LetterFilter` as keywords.
            redact: Paths of values to replace by tokens, e.g. ``["kwargs.card"]``.
            redact_key: The secret of the tokens, 16 bytes or more.
            follow: Go on with what comes until this event is set.
            roll_rows: Close files after so many letters; ``None`` for 500,000.
            roll_bytes: Or after so many bytes before compression; ``None`` for 256 MiB.
            roll_seconds: Or, when following, after so many seconds; ``None`` for 60.
            then_trim: Remove letters from their queues once they were read back from the files.
            successes: Write the sample of messages that succeeded (``dlq_sample_successes``)
                instead of letters, in the same columns; not with a filter or ``then_trim``.
            filesystem: A file system of pyarrow or fsspec that ``destination`` is a path in.
            progress: Called with the number of letters of every page that was read.
            expected: Called before the first page with how many letters will be read, when that
                is known: in a first export of the queues that does not follow.
            **fields: E.g. ``reason="failed"``.

        Raises:
            NotFound: A named queue does not exist.
            MissingExtra: pyarrow is not installed.
            ExportError: The destination cannot be written, belongs to something else, or an
                option is not usable.
            SettingsError: ``successes`` with a filter or ``then_trim``.
            StoreUnavailable: Redis does not answer.
        """
        from celery_dlq.export.exporter import SUCCESSES, ParquetExport, Rolling  # noqa: PLC0415 - pyarrow is an extra
        from celery_dlq.export.redaction import Redaction  # noqa: PLC0415 - needed here only

        rolling: dict[str, Any] = {
            "rows": roll_rows,
            "bytes": roll_bytes,
            "seconds": roll_seconds,
        }
        if isinstance(dead_letter_queues, str):
            dead_letter_queues = [dead_letter_queues]
        names = None if dead_letter_queues is None else list(dead_letter_queues)
        for name in names or ():
            self._check_queue(name)
        chosen_letters = where or LetterFilter(**fields)
        if successes and (chosen_letters or then_trim):
            raise SettingsError(
                "expected no filter and no then_trim with successes, which are no letters"
            )
        store = self._sampled_store() if successes else self.store
        export = ParquetExport(
            store,
            destination,
            where=chosen_letters,
            of=SUCCESSES if successes else None,
            rolling=Rolling(**{name: n for name, n in rolling.items() if n is not None}),
            redaction=Redaction.parse(redact, redact_key) if redact else None,
            filesystem=filesystem,
            trimmed=self._note_trimmed(str(destination)) if then_trim else None,
        )

        def chosen() -> list[str]:
            return names if names is not None else self.store.names()

        try:
            if follow is not None:
                return export.follow(chosen, follow, progress=progress)
            return export.run(chosen(), progress=progress, expected=expected)
        finally:
            if store is not self.store:
                store.close()

    def _sampled_store(self) -> DeadLetterStore:
        return make_sampled(self.settings, self.app.conf.broker_url)

    def _note_trimmed(self, destination: str) -> Callable[[str, int], None]:
        from celery_dlq.export.destination import shown  # noqa: PLC0415 - pyarrow is an extra

        def note(dead_letter_queue: str, letters: int) -> None:
            change = Change(
                at=self._clock(),
                action=Action.TRIMMED,
                actor=whoami(),
                target=dead_letter_queue,
                letters=letters,
                detail={"exported_to": shown(destination)},
            )
            self.registry.record(change)
            self.events.emit(change)

        return note

    def serve_metrics(self, *, port: int = 9808, address: str = "127.0.0.1") -> Any:
        """Serve the metrics of all workers to Prometheus, in a thread of this process.

        Args:
            port: Where to listen; 0 for any free one.
            address: On which address.

        Returns:
            The HTTP server; ``shutdown()`` ends it.

        Raises:
            MissingExtra: prometheus-client is not installed.
            DLQError: The port is taken.
        """
        from celery_dlq.contrib.prometheus import Collector, serve  # noqa: PLC0415 - an extra

        store = make_metrics(self.settings, self.app.conf.broker_url)
        return serve(Collector(self, store, self._clock), port=port, address=address)

    def adopt(
        self,
        queue: str,
        dead_letter_queue: str | None = None,
        *,
        follow: bool = False,
        limit: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> AdoptReport:
        """Make letters of the messages that the broker itself dead-lettered.

        A letter is stored before its message is acknowledged, once, however often the
        message comes back.

        Args:
            queue: Where the broker puts them; on Redis a list.
            dead_letter_queue: Where all letters go; ``None`` for that of each message's
                own queue.
            follow: Go on until ``KeyboardInterrupt``; what fails is logged and tried again.
            limit: Most messages; ``None`` for all. Not with ``follow``.
            progress: Called with the number of letters that were stored.

        Raises:
            SettingsError: The queue is one whose tasks are guarded, or that a worker consumes.
            NotFound: The broker has no such queue.
            BrokerUnavailable: The broker does not answer.
            StoreUnavailable: The store does not answer.
        """
        return self._adoptions.run(
            queue,
            dead_letter_queue,
            self.store,
            self.registry,
            follow=follow,
            limit=limit,
            progress=progress,
        )

    # -- policies -----------------------------------------------------------------

    def policies(self, queue: str | None = None) -> PolicyReport:
        """Every queue's and task's policy in force, with the source of each value.

        Args:
            queue: Only this queue; ``None`` for all that the app or a live worker knows.

        Returns:
            The policies, and warnings: policies for unknown queues, live workers that differ.

        Raises:
            NotFound: Nothing rules that queue.
            StoreUnavailable: Redis does not answer.
        """
        from celery_dlq.assembly import known_queues, queue_of_tasks  # noqa: PLC0415 - as above

        policy_admin = self._policy_admin()
        extra = {queue} if queue is not None else set()
        rules = policy_admin.report(known_queues(self.app) | extra, queue_of_tasks(self.app))
        if queue is None:
            return rules
        views = tuple(view for view in rules.views if view.queue == queue)
        if not views:
            raise NotFound(f"expected a queue with a policy, got {queue!r}, which nothing rules")
        return PolicyReport(views=views, warnings=rules.warnings)

    def override_policy(self, queue: str, span: timedelta, **values: Any) -> list[Override]:
        """Override policy keys of a queue for a while, without a deploy.

        Workers notice within seconds; when the time is over, the configured values come
        back. An override beats task decorators too. Only keys that workers obey can be
        overridden, see `celery_dlq.policies.overrides.KEYS`.

        Args:
            queue: The queue, by its exact name.
            span: How long; at most 30 days.
            **values: Policy keys, e.g. ``max_deliveries=3``.

        Raises:
            SettingsError: A key or a value is not usable; nothing is changed then.
            StoreUnavailable: Redis does not answer.
        """
        return self._policy_admin().override(queue, span, values)

    def lift_policy(self, queue: str, *keys: str) -> list[str]:
        """Take overrides back before their time.

        Args:
            queue: The queue.
            *keys: Which policy keys; none for all that are overridden.

        Returns:
            The keys that have their configured values again.

        Raises:
            NotFound: There is no such override.
            StoreUnavailable: Redis does not answer.
        """
        return self._policy_admin().lift(queue, keys)

    def trim(self, *dead_letter_queues: str, dry_run: bool = False) -> list[Change]:
        """Remove letters past ``dead_letter_ttl`` or over ``dead_letter_max_length`` now.

        Workers do it by themselves; this is for queues that no worker looks after.

        Args:
            *dead_letter_queues: Which queues; none for all.
            dry_run: Say what the next pass would trim, at most some hundred letters a
                queue and cause, and change nothing.

        Returns:
            What was trimmed: one change per queue and cause.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
        """
        for name in dead_letter_queues:
            self._check_queue(name)
        table = self._policy_admin().in_force()
        retention = Retention(self.store, self.registry, self.events, whoami())
        names = dead_letter_queues or self.store.names()
        policies = {name: table.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        return [change for n, p in policies.items() for change in retention.trim_all(n, p)]

    def _policy_admin(self) -> PolicyAdmin:
        from celery_dlq.assembly import policy_table_of  # noqa: PLC0415 - publishers need none of it

        return PolicyAdmin(policy_table_of(self.app, self.settings), self.registry, self.events)

    def _redriven(self, queue: str, found: Sequence[RawEntry], redrive_id: str) -> None:
        self._measuring.redriven(queue, len(found))
        super()._redriven(queue, found, redrive_id)

    def _job_over(self) -> None:
        self._measuring.close()

    # -- wiring -------------------------------------------------------------------

    def _install(self) -> None:
        from celery_dlq.adopt.bootstep import AdoptStep  # noqa: PLC0415 - publishers need none of it
        from celery_dlq.dlx.bootstep import ExchangeStep  # noqa: PLC0415
        from celery_dlq.worker.bootsteps import GuardStep, TickStep  # noqa: PLC0415 - publishers need none of it

        step = type("DeadLetterGuard", (GuardStep,), {"make_guard": staticmethod(self._make_guard)})
        self.app.steps["worker"].add(step)
        self.app.steps["consumer"].add(TickStep)
        adopting = {"make_adopters": staticmethod(self._make_adopters)}
        self.app.steps["worker"].add(type("DeadLetterAdopter", (AdoptStep,), adopting))
        announcing = {"publisher": staticmethod(self._exchanges.publisher)}
        self.app.steps["worker"].add(type("DeadLetterPublisher", (ExchangeStep,), announcing))
        default_delay.install(self.app, self)

    def _make_guard(self, *, hostname: str, pid: int, flags_redelivery: bool) -> Any:
        from celery_dlq.assembly import make_guard  # noqa: PLC0415 - publishers need none of it

        self.validate()
        memory = None
        if isinstance(self.store, MemoryStore):
            memory = WorkerParts(self.store, self.registry, self.store.counter)
        return make_guard(
            self.app,
            self.settings,
            self._clock,
            self.events,
            measuring=self._measuring,
            memory=memory,
            announcer=self._announcer,
            hostname=hostname,
            pid=pid,
            flags_redelivery=flags_redelivery,
            version=__version__,
        )

    def _announcer(self) -> ExchangePublisher | None:
        self._exchanges.check()
        return self._exchanges.publisher()

    def _own_store(self) -> DeadLetterStore:
        """A store for one thread alone; memory is shared, or it would be another one."""
        return self.store if self.settings.store == "memory" else self._make_store()

    def _make_adopters(self, consumed: Iterable[str], *, hostname: str, pid: int) -> list[Adopter]:
        return self._adoptions.for_worker(self._own_store, consumed, hostname=hostname, pid=pid)

    def _make_store(self) -> DeadLetterStore:
        return make_store(self.settings, self.app.conf.broker_url, self.app.connection_for_write)
