"""The composition root: ``DeadLetters(app)`` wires settings, store, worker and operations."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq import delay
from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Events
from celery_dlq.operator import Operator
from celery_dlq.parts import make_board, make_counter, make_job_book, make_store, shown_place
from celery_dlq.ports import Board, Clock, DeadLetterStore, JobBook

if TYPE_CHECKING:
    from celery_dlq.export.parquet import ExportReport

logger = logging.getLogger("celery_dlq")

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
        self.app = app
        self._clock = clock
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._store: DeadLetterStore | None = None
        self._board: Board | None = None
        self._job_book: JobBook | None = None
        self.events = Events()
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
        for task in self.app.tasks.values():
            policy = policy_of(task)
            if policy is not None:
                self.settings.check_delays(policy, f"dead_letter_policy of {task.name}")
        if self.settings.store == "redis":
            self.settings.redis_url(self.app.conf.broker_url)

    @property
    def store(self) -> DeadLetterStore:
        """Where the letters are kept."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    @property
    def board(self) -> Board:
        """What the processes of the app tell each other."""
        with self._lock:
            if self._board is None:
                self._board = make_board(self.settings, self.app.conf.broker_url)
            return self._board

    def close(self) -> None:
        """Let go of connections; the next operation opens them again."""
        with self._lock:
            if self._board is not None and self.settings.store == "redis":
                self._board.close()
                self._board = None
            if self._job_book is not None and self.settings.store == "redis":
                self._job_book.close()
                self._job_book = None
            if self._store is not None and self.settings.store == "redis":
                self._store.close()
                self._store = None

    @property
    def job_book(self) -> JobBook:
        """Where jobs are kept."""
        with self._lock:
            if self._job_book is None:
                self._job_book = make_job_book(self.settings, self.app.conf.broker_url)
            return self._job_book

    # -- letters as data ----------------------------------------------------------

    def export(
        self,
        destination: str | Path,
        dead_letter_queues: Iterable[str] | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> ExportReport:
        """Write the letters to Parquet files; a second export writes only what is new.

        Args:
            destination: A local folder; made if it is not there.
            dead_letter_queues: Which queues; ``None`` for all.
            progress: Called with the number of letters of every page that is written.

        Raises:
            NotFound: A named queue does not exist.
            MissingExtra: pyarrow is not installed.
            ExportError: The destination cannot be written, or belongs to something else.
            StoreUnavailable: Redis does not answer.
        """
        from celery_dlq.export.parquet import ParquetExport  # noqa: PLC0415 - pyarrow is an extra

        names = None if dead_letter_queues is None else list(dead_letter_queues)
        for name in names or ():
            self._check_queue(name)
        chosen = names if names is not None else self.store.names()
        return ParquetExport(self.store, Path(destination)).run(chosen, progress=progress)

    # -- wiring -------------------------------------------------------------------

    def _install(self) -> None:
        from celery_dlq.worker.step import GuardStep, TickStep  # noqa: PLC0415 - publishers need none of it

        step = type("DeadLetterGuard", (GuardStep,), {"make_guard": staticmethod(self._make_guard)})
        self.app.steps["worker"].add(step)
        self.app.steps["consumer"].add(TickStep)
        delay.install(self.app, lambda: self.settings)

    def _make_guard(self, *, hostname: str, pid: int, flags_redelivery: bool) -> Any:
        from celery_dlq.worker.burial import Burial  # noqa: PLC0415 - publishers need none of it
        from celery_dlq.worker.guard import Guard  # noqa: PLC0415
        from celery_dlq.worker.plan import Plans  # noqa: PLC0415
        from celery_dlq.worker.spool import Spool  # noqa: PLC0415

        self.validate()
        settings, broker_url = self.settings, self.app.conf.broker_url
        store = self.store if settings.store == "memory" else self._make_store()
        self._wait_for(store)
        place = shown_place(settings, broker_url)  # without the password: that may change
        return Guard(
            Plans(settings.policies, self.app.amqp.queues),
            Burial(store, Spool(settings.spool_dir, f"{place} {settings.key_prefix}")),
            make_counter(settings, broker_url, store),
            self._clock,
            hostname=hostname,
            pid=pid,
            flags_redelivery=flags_redelivery,
            release=settings.release,
        )

    def _wait_for(self, store: DeadLetterStore) -> None:
        """Wait for the store as long as ``dlq_start_timeout`` says."""
        deadline = time.monotonic() + self.settings.start_timeout
        while True:
            try:
                return store.check()
            except StoreUnavailable as exc:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("Waiting for the dead-letter store: %s", exc)
                time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))

    def _make_store(self) -> DeadLetterStore:
        return make_store(self.settings, self.app.conf.broker_url)
