"""The composition root: ``DeadLetters(app)`` wires settings, store, worker and operations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq import __version__, delay, signals
from celery_dlq.adopting import Adoptions
from celery_dlq.announcing import PostOffice
from celery_dlq.backends.memory import MemoryStore
from celery_dlq.config import Settings
from celery_dlq.errors import NotFound
from celery_dlq.events import Change, Events
from celery_dlq.filters import LetterFilter
from celery_dlq.measuring import Measuring
from celery_dlq.operations import Redriver, RedriveReport
from celery_dlq.parts import WorkerParts, make_board, make_metrics, make_store
from celery_dlq.ports import Board, Clock, DeadLetterStore, Group, Keeper, Override, QueueSummary
from celery_dlq.record import DeadLetter
from celery_dlq.retention import Retention
from celery_dlq.rules import Rulebook, Rules, whoami

if TYPE_CHECKING:
    from celery_dlq.export.parquet import ExportReport
    from celery_dlq.worker.adopter import Adopter, AdoptReport

logger = logging.getLogger("celery_dlq")

_ATTRIBUTE = "_celery_dlq"
_ID_LENGTH = 36
_SHORTEST_PREFIX = 6


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
        self._post_office = PostOffice(app, lambda: self.settings, self._own_store)
        self._adoptions = Adoptions(
            app, lambda: self.settings, self.events, self._post_office, clock
        )
        self._measuring = Measuring(lambda: make_metrics(self.settings, self.app.conf.broker_url))
        self.events.subscribe(self._measuring)
        self.events.subscribe(signals.relay)
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
        from celery_dlq.wiring import book_of  # noqa: PLC0415 - publishers need none of it

        book = book_of(self.app, self.settings)
        book.check()
        for name, policy in book.tasks.items():
            self.settings.check_delays(policy, f"dead_letter_policy of {name}")
        self.settings.check_visibility(
            book,
            self.app.connection_for_write().transport_cls,
            self.app.conf.broker_transport_options,
        )
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
        self._measuring.close()
        with self._lock:
            if self._board is not None and self.settings.store == "redis":
                self._board.close()
                self._board = None
            if self._store is not None and self.settings.store == "redis":
                self._store.close()
                self._store = None
            self._post_office.close()

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
        redriver = Redriver(self.app, self.store, self._clock, self.events.emit)
        try:
            return redriver.redrive(
                dead_letter_queue, where, rate=rate, limit=limit, progress=progress
            )
        finally:
            self._measuring.close()

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
            queue, dead_letter_queue, self.store, self.board,
            follow=follow, limit=limit, progress=progress,
        )  # fmt: skip

    # -- policies -----------------------------------------------------------------

    def policies(self, queue: str | None = None) -> Rules:
        """Every queue's and task's policy in force, with the source of each value.

        Args:
            queue: Only this queue; ``None`` for all that the app or a live worker knows.

        Returns:
            The policies, and warnings: policies for unknown queues, live workers that differ.

        Raises:
            NotFound: Nothing rules that queue.
            StoreUnavailable: Redis does not answer.
        """
        from celery_dlq.wiring import known_queues, queue_of_tasks  # noqa: PLC0415 - as above

        rulebook = self._rulebook()
        extra = {queue} if queue is not None else set()
        rules = rulebook.rules(known_queues(self.app) | extra, queue_of_tasks(self.app))
        if queue is None:
            return rules
        views = tuple(view for view in rules.views if view.queue == queue)
        if not views:
            message = f"expected a queue with a policy, got {queue!r}, which nothing rules"
            raise NotFound(message)
        return Rules(views=views, warnings=rules.warnings)

    def override_policy(self, queue: str, span: timedelta, **values: Any) -> list[Override]:
        """Override policy keys of a queue for a while, without a deploy.

        Workers notice within seconds; when the time is over, the configured values come
        back. An override beats task decorators too. Only keys that workers obey can be
        overridden, see `celery_dlq.overrides.KEYS`.

        Args:
            queue: The queue, by its exact name.
            span: How long; at most 30 days.
            **values: Policy keys, e.g. ``max_deliveries=3``.

        Raises:
            SettingsError: A key or a value is not usable; nothing is changed then.
            StoreUnavailable: Redis does not answer.
        """
        return self._rulebook().override(queue, span, values)

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
        return self._rulebook().lift(queue, keys)

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
        book = self._rulebook().in_force()
        retention = Retention(self.store, self.board, self.events, self._clock, whoami())
        names = dead_letter_queues or self.store.names()
        policies = {name: book.of_dead_letter_queue(name) for name in names}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        return [change for n, p in policies.items() for change in retention.trim_all(n, p)]

    def _rulebook(self) -> Rulebook:
        from celery_dlq.wiring import book_of  # noqa: PLC0415 - publishers need none of it

        return Rulebook(book_of(self.app, self.settings), self.board, self.events, self._clock)

    # -- wiring -------------------------------------------------------------------

    def _install(self) -> None:
        from celery_dlq.worker.adopting import AdoptStep  # noqa: PLC0415 - publishers need none of it
        from celery_dlq.worker.announcing import AnnounceStep  # noqa: PLC0415
        from celery_dlq.worker.step import GuardStep, TickStep  # noqa: PLC0415 - publishers need none of it

        step = type("DeadLetterGuard", (GuardStep,), {"make_guard": staticmethod(self._make_guard)})
        self.app.steps["worker"].add(step)
        self.app.steps["consumer"].add(TickStep)
        adopting = {"make_adopters": staticmethod(self._make_adopters)}
        self.app.steps["worker"].add(type("DeadLetterAdopter", (AdoptStep,), adopting))
        announcing = {"courier": staticmethod(self._post_office.courier)}
        self.app.steps["worker"].add(type("DeadLetterCourier", (AnnounceStep,), announcing))
        delay.install(self.app, lambda: self.settings)

    def _make_guard(self, *, hostname: str, pid: int, flags_redelivery: bool) -> Any:
        from celery_dlq.wiring import make_guard  # noqa: PLC0415 - publishers need none of it

        self.validate()
        memory = None
        if isinstance(self.store, MemoryStore):
            memory = WorkerParts(self.store, self.board, self.store.counter)
        return make_guard(
            self.app, self.settings, self._clock, self.events, measuring=self._measuring,
            memory=memory,
            keeper=self._keeper, hostname=hostname, pid=pid,
            flags_redelivery=flags_redelivery, version=__version__,
        )  # fmt: skip

    def _keeper(self, store: DeadLetterStore) -> Keeper:
        self._post_office.check()
        return self._post_office.before(store)

    def _own_store(self) -> DeadLetterStore:
        """A store for one thread alone; memory is shared, or it would be another one."""
        return self.store if self.settings.store == "memory" else self._make_store()

    def _make_adopters(self, consumed: Iterable[str], *, hostname: str, pid: int) -> list[Adopter]:
        return self._adoptions.for_worker(self._own_store, consumed, hostname=hostname, pid=pid)

    def _make_store(self) -> DeadLetterStore:
        return make_store(self.settings, self.app.conf.broker_url)

    def _check_queue(self, name: str) -> None:
        names = self.store.names()
        if name not in names:
            known = ", ".join(names) or "none at all yet"
            message = f"expected the name of a dead-letter queue, got {name!r}; there are: {known}"
            raise NotFound(message)
