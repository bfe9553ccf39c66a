"""The composition root: ``DeadLetters(app)`` wires settings, store, worker and operations."""

from __future__ import annotations

import getpass
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq import delay
from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.errors import NotFound, StoreUnavailable
from celery_dlq.events import Action, Change, Events
from celery_dlq.filters import LetterFilter
from celery_dlq.operations import Redriver, RedriveReport
from celery_dlq.parts import make_board, make_counter, make_store, shown_place
from celery_dlq.ports import Board, Clock, DeadLetterStore, Group, QueueSummary
from celery_dlq.record import DeadLetter

if TYPE_CHECKING:
    from celery_dlq.export.parquet import ExportReport

logger = logging.getLogger("celery_dlq")

_ATTRIBUTE = "_celery_dlq"
_ID_LENGTH = 36
_SHORTEST_PREFIX = 6


def _operator() -> str:
    """Who does it, for the audit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def utc_now() -> datetime:
    """The present, aware UTC."""
    return datetime.now(timezone.utc)


class DeadLetters:
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
            if self._store is not None and self.settings.store == "redis":
                self._store.close()
                self._store = None

    # -- reading ------------------------------------------------------------------

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues: name, number of letters, ages, letters by reason.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        return self.store.queues()

    def letters(
        self,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        newest_first: bool = False,
        limit: int | None = None,
        **fields: Any,
    ) -> Iterator[DeadLetter]:
        """The letters of a queue, streamed; nothing is changed by reading.

        Letters that arrive while you iterate are left out.

        Args:
            dead_letter_queue: Its name, e.g. ``"orders-DLQ"``.
            where: Which letters; or give the fields of `LetterFilter` as keywords.
            newest_first: The order.
            limit: Most letters; ``None`` for all.
            **fields: E.g. ``reason="max_deliveries_exceeded"``.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
            DLQError: A field of the filter is not usable.
        """
        where = where or LetterFilter(**fields)
        self._check_queue(dead_letter_queue)
        stored = self.store.letters(dead_letter_queue, newest_first=newest_first)
        return islice((s.letter for s in stored if where.matches(s.letter)), limit)

    def get(self, letter_id: str, dead_letter_queue: str | None = None) -> DeadLetter:
        """One letter by its id.

        Args:
            letter_id: The letter's id, or its first digits (6 or more), if they are unique.
            dead_letter_queue: Where it is; ``None`` looks in all.

        Raises:
            NotFound: No queue has it, or several letters begin so.
            StoreUnavailable: Redis does not answer.
        """
        names = [dead_letter_queue] if dead_letter_queue else self.store.names()
        for name in names:
            letter = self.store.get(name, letter_id)
            if letter is not None:
                return letter
        if _SHORTEST_PREFIX <= len(letter_id) < _ID_LENGTH:
            found = [(n, i) for n in names for i in self.store.ids(n, letter_id, most=2)]
            if len(found) == 1:
                return self.get(found[0][1], found[0][0])
            if found:
                several = ", ".join(letter_id for _, letter_id in found)
                message = f"expected one letter whose id begins so, got several: {several}"
                raise NotFound(message)
        where = ", ".join(names) or "no queue at all"
        message = f"expected a letter with the id {letter_id!r}, found none (looked in {where})"
        raise NotFound(message)

    def groups(self, dead_letter_queue: str) -> list[Group]:
        """The letters of a queue by fingerprint, largest group first.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
        """
        self._check_queue(dead_letter_queue)
        return self.store.groups(dead_letter_queue)

    # -- changing -----------------------------------------------------------------

    def redrive(
        self,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        rate: float | None = None,
        limit: int | None = None,
        progress: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> RedriveReport:
        """Publish the original messages of letters again, then remove the letters.

        At least once: killed between publishing and removing, the next redrive
        publishes no letter again that is known to be published; of the one batch where
        that is not known, it says how many (``maybe_twice``). Letters that arrive
        meanwhile are not touched.

        Args:
            dead_letter_queue: Its name.
            where: Which letters; or give the fields of `LetterFilter` as keywords. With
                neither, all of them.
            rate: Most letters a second; ``None`` for as fast as the broker takes them.
            limit: Most letters.
            progress: Called with the size of every batch that is done.
            **fields: E.g. ``fingerprint="…"``.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
            DLQError: ``rate``, ``limit`` or a field is not usable.
        """
        where = where or LetterFilter(**fields)
        self._check_queue(dead_letter_queue)
        redriver = Redriver(self.app, self.store, self._clock)
        return redriver.redrive(dead_letter_queue, where, rate=rate, limit=limit, progress=progress)

    def export(
        self,
        destination: str | Path,
        dead_letter_queues: Iterable[str] | None = None,
        where: LetterFilter | None = None,
        *,
        redact: Sequence[str] = (),
        redact_key: bytes | None = None,
        follow: threading.Event | None = None,
        roll_rows: int | None = None,
        roll_bytes: int | None = None,
        roll_seconds: float | None = None,
        then_trim: bool = False,
        filesystem: Any | None = None,
        progress: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> ExportReport:
        """Write the letters to Parquet files; a second export writes only what is new.

        Each letter is in the files once, however often exports are killed. A folder keeps to
        the filter and the redaction that it was begun with. Letters that died at or after
        ``until`` wait, with all behind them, for a later run.

        Args:
            destination: A local folder, made if it is not there; or a URL of a file system
                that pyarrow or fsspec knows, e.g. ``s3://bucket/letters``.
            dead_letter_queues: Which queues; ``None`` for all.
            where: Which letters; or give the fields of `LetterFilter` as keywords.
            redact: Paths of values to replace by tokens, e.g. ``["kwargs.card"]``.
            redact_key: The secret of the tokens, 16 bytes or more.
            follow: Go on with what comes until this event is set.
            roll_rows: Close files after so many letters; ``None`` for 500,000.
            roll_bytes: Or after so many bytes before compression; ``None`` for 256 MiB.
            roll_seconds: Or, when following, after so many seconds; ``None`` for 60.
            then_trim: Remove letters from their queues once they were read back from the files.
            filesystem: A file system of pyarrow or fsspec that ``destination`` is a path in.
            progress: Called with the number of letters of every page that was read.
            **fields: E.g. ``reason="failed"``.

        Raises:
            NotFound: A named queue does not exist.
            MissingExtra: pyarrow is not installed.
            ExportError: The destination cannot be written, belongs to something else, or an
                option is not usable.
            StoreUnavailable: Redis does not answer.
        """
        from celery_dlq.export.parquet import ParquetExport, Rolling  # noqa: PLC0415 - pyarrow is an extra
        from celery_dlq.export.redaction import Redaction  # noqa: PLC0415 - needed here only

        rolling: dict[str, Any] = {
            "rows": roll_rows, "bytes": roll_bytes, "seconds": roll_seconds,
        }  # fmt: skip
        names = None if dead_letter_queues is None else list(dead_letter_queues)
        for name in names or ():
            self._check_queue(name)
        export = ParquetExport(
            self.store,
            destination,
            where=where or LetterFilter(**fields),
            rolling=Rolling(**{name: n for name, n in rolling.items() if n is not None}),
            redaction=Redaction.parse(redact, redact_key) if redact else None,
            filesystem=filesystem,
            trimmed=self._note_trimmed(str(destination)) if then_trim else None,
        )

        def chosen() -> list[str]:
            return names if names is not None else self.store.names()

        if follow is not None:
            return export.follow(chosen, follow, progress=progress)
        return export.run(chosen(), progress=progress)

    def _note_trimmed(self, destination: str) -> Callable[[str, int], None]:
        from celery_dlq.export.destination import shown  # noqa: PLC0415 - pyarrow is an extra

        def note(dead_letter_queue: str, letters: int) -> None:
            change = Change(
                at=self._clock(),
                action=Action.TRIMMED,
                actor=_operator(),
                target=dead_letter_queue,
                letters=letters,
                detail={"exported_to": shown(destination)},
            )
            self.board.record(change)
            self.events.emit(change)

        return note

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

    def _check_queue(self, name: str) -> None:
        names = self.store.names()
        if name not in names:
            known = ", ".join(names) or "none at all yet"
            message = f"expected the name of a dead-letter queue, got {name!r}; there are: {known}"
            raise NotFound(message)
