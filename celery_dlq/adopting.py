"""Wires adopting: for the operator's command, and for workers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery_dlq.announcing import DeadLetterExchanges
from celery_dlq.backends.base import Clock, DeadLetterStore, WorkerRegistry
from celery_dlq.config import Settings
from celery_dlq.errors import SettingsError
from celery_dlq.events import Action, Change, DeadLettered, Events, whoami
from celery_dlq.record import DeadLetter

if TYPE_CHECKING:
    from celery_dlq.adopt.adopter import Adopter, AdoptReport


class Adoptions:
    """Makes adopters, and runs one for an operator.

    Args:
        app: The Celery app; its broker has the queues.
        settings: Gives its checked settings.
        events: Told of every new letter.
        exchanges: Announces it.
        clock: The present, aware UTC.
    """

    def __init__(
        self,
        app: Any,
        settings: Callable[[], Settings],
        events: Events,
        exchanges: DeadLetterExchanges,
        clock: Clock,
    ) -> None:
        self._app = app
        self._settings = settings
        self._events = events
        self._exchanges = exchanges
        self._clock = clock

    def run(
        self,
        queue: str,
        target: str | None,
        store: DeadLetterStore,
        registry: WorkerRegistry,
        *,
        follow: bool,
        limit: int | None,
        progress: Callable[[int], None] | None,
    ) -> AdoptReport:
        """Adopt for an operator; see `DeadLetters.adopt`."""
        self._settings().check_adoption(queue, target, "dlq import")
        if self._settings().store == "broker" and queue in store.names():
            raise SettingsError(
                f"expected dlq import to name a queue of messages that the broker dead-lettered, "
                f"got {queue!r}, which holds letters already; see `dlq list {queue}`"
            )
        for info in registry.workers():
            if queue in info.queues:
                raise SettingsError(_alive("dlq import", queue, info.hostname))
        adopter = self.adopter(queue, target, store, progress, hostname=socket.gethostname())
        try:
            _drain(adopter, limit, follow=follow)
        finally:
            adopter.close()
            self._exchanges.deliver(adopter.report.by_queue)
            for name, letters in sorted(adopter.report.by_queue.items()):
                registry.record(self._change(name, letters, queue))
        return adopter.report

    def for_worker(
        self,
        make_store: Callable[[], DeadLetterStore],
        consumed: Iterable[str],
        *,
        hostname: str,
        pid: int,
    ) -> list[Adopter]:
        """The adopters of the setting ``dlq_adopt``.

        Args:
            make_store: Makes a store for them alone: they work in a thread of their own.
            consumed: The queues that the worker consumes.
            hostname: Its node name.
            pid: Its main process.

        Raises:
            SettingsError: It consumes one of them.
        """
        orders = self._settings().adopt
        for queue in sorted(set(consumed).intersection(orders)):
            raise SettingsError(_alive("dlq_adopt", queue, hostname))
        if not orders:
            return []
        store = make_store()
        return [
            self.adopter(queue, target, store, hostname=hostname, pid=pid)
            for queue, target in orders.items()
        ]

    def adopter(
        self,
        queue: str,
        target: str | None,
        store: DeadLetterStore,
        progress: Callable[[int], None] | None = None,
        *,
        hostname: str,
        pid: int | None = None,
    ) -> Adopter:
        """An adopter of one queue; nothing is sent yet."""
        from celery_dlq.adopt.adopter import Adopter  # noqa: PLC0415 - publishers need none of it
        from celery_dlq.adopt.letter import Adoption  # noqa: PLC0415
        from celery_dlq.adopt.sources import source_of  # noqa: PLC0415

        def adopted(letter: DeadLetter) -> None:
            self._events.emit(DeadLettered(at=self._clock(), letter=letter))
            if progress is not None:
                progress(1)

        settings = self._settings()
        adoption = Adoption(
            self._app,
            settings.policies,
            queue,
            target,
            hostname=hostname,
            pid=pid or os.getpid(),
            release=settings.release,
        )
        keeper = self._exchanges.before(store)
        return Adopter(queue, source_of(self._app, queue), adoption, keeper, self._clock, adopted)

    def _change(self, dead_letter_queue: str, letters: int, queue: str) -> Change:
        return Change(
            at=self._clock(),
            action=Action.ADOPTED,
            actor=whoami(),
            target=dead_letter_queue,
            letters=letters,
            detail={"queue": queue},
        )


def _drain(adopter: Adopter, limit: int | None, *, follow: bool) -> None:
    from celery_dlq.adopt.adopter import follow as follow_queues  # noqa: PLC0415

    if not follow:
        adopter.drain(limit)
        return
    with suppress(KeyboardInterrupt):
        adopter.drain(1)  # a queue that is not there is a mistake now, later it is not
        follow_queues([adopter], threading.Event())


def _alive(where: str, queue: str, hostname: str) -> str:
    return (
        f"expected {where} to name a queue of messages that are dead, got {queue!r}, which worker "
        f"{hostname} consumes; all its tasks would become letters"
    )
