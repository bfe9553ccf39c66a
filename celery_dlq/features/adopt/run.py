"""Adopts one queue for an operator, until it is empty or until interrupted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from celery_dlq.config import Settings
from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.events import Action, Change, whoami
from celery_dlq.features.adopt.settings import check_adoption
from celery_dlq.logs import get_logger
from celery_dlq.store.records import Clock
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.features.adopt.adopter import Adopter, AdoptReport
    from celery_dlq.features.exchange.publisher import ExchangePublisher
    from celery_dlq.operations.redrive.select import Progress

logger = get_logger("celery_dlq.features.adopt")


class AdoptRun:
    """Adopts for an operator."""

    def __init__(
        self,
        settings: Settings,
        backend: Store,
        make_adopter: Callable[..., Adopter],
        publisher: Callable[[], ExchangePublisher | None],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._make_adopter = make_adopter
        self._publisher = publisher
        self._clock = clock

    @classmethod
    def of(cls, assembly: Assembly) -> AdoptRun:
        """That of an app."""
        return cls(
            assembly.settings,
            assembly.backend,
            partial(adopter_of, assembly),
            assembly.exchange_publisher,
            assembly.clock,
        )

    def adopt(
        self,
        queue: str,
        dead_letter_queue: str | None = None,
        *,
        follow: bool = False,
        limit: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> AdoptReport:
        """Store messages that the broker itself dead-lettered as letters.

        A letter is stored before its message is acknowledged; once, however often the message is
        redelivered, if it has an id. Of messages without one, equal letters may be copies.
        """
        from celery_dlq.features.adopt.adopter import follow as follow_queues  # noqa: PLC0415 - publishers import this module

        self._check(queue, dead_letter_queue)
        adopter = self._make_adopter(
            queue,
            dead_letter_queue,
            self._backend,
            hostname=socket.gethostname(),
            progress=progress,
        )
        try:
            if follow:
                with suppress(KeyboardInterrupt):
                    adopter.drain(1)  # a missing queue is an error at the start, and retried later
                    follow_queues([adopter], threading.Event())
            else:
                adopter.drain(limit)
        finally:
            adopter.close()
            by_queue = adopter.report.by_queue
            self._publish(list(by_queue))
            for name, letters in sorted(by_queue.items()):
                self._record(name, letters, queue)
        return adopter.report

    def _check(self, queue: str, target: str | None) -> None:
        check_adoption(self._settings, queue, target, "dlq import")
        for info in self._backend.workers.workers():
            if queue in info.queues:
                raise consumed_already(queue, info.hostname, by="dlq import")

    def _publish(self, dead_letter_queues: list[str]) -> None:
        """Publish the new letters now; if that fails, a worker does it later."""
        publisher = self._publisher()
        if publisher is not None:
            try:
                publisher.deliver(dead_letter_queues)
            except DLQError as exc:
                logger.warning("A worker publishes the letters later: %s", exc)
            publisher.close()

    def _record(self, dead_letter_queue: str, letters: int, queue: str) -> None:
        self._backend.workers.record(
            Change(
                at=self._clock(),
                action=Action.ADOPTED,
                actor=whoami(),
                target=dead_letter_queue,
                letters=letters,
                detail={"queue": queue},
            )
        )


def consumed_already(queue: str, hostname: str, *, by: str) -> SettingsError:
    """Make the error for a queue that a worker consumes."""
    return SettingsError(
        f"expected {by} to name a queue of messages that are dead, got {queue!r}, which worker "
        f"{hostname} consumes; all its tasks would become letters"
    )


def adopters_of(
    assembly: Assembly, consumed: Iterable[str], *, hostname: str, pid: int
) -> list[Adopter]:
    """Make the adopters of the setting ``dlq_adopt``; they have their own connections."""
    orders = assembly.settings.of("adopt")
    for queue in sorted(set(consumed).intersection(orders)):
        raise consumed_already(queue, hostname, by="dlq_adopt")
    if not orders:
        return []
    backend = assembly.backend.separate()
    return [
        adopter_of(assembly, queue, target, backend, hostname=hostname, pid=pid)
        for queue, target in orders.items()
    ]


def adopter_of(
    assembly: Assembly,
    queue: str,
    target: str | None,
    backend: Store,
    *,
    hostname: str,
    pid: int | None = None,
    progress: Progress | None = None,
) -> Adopter:
    """Make the adopter of one queue; nothing is sent yet."""
    from celery_dlq.features.adopt.adopter import Adopter  # noqa: PLC0415 - as above
    from celery_dlq.features.adopt.letter import Adoption  # noqa: PLC0415
    from celery_dlq.features.adopt.sources import source_of  # noqa: PLC0415
    from celery_dlq.writing.letter import LetterMaker  # noqa: PLC0415

    app, clock = assembly.app, assembly.clock
    adoption = Adoption(
        app,
        assembly.settings.policies,
        queue,
        target,
        backend.counter,
        LetterMaker(
            clock=clock,
            hostname=hostname,
            pid=pid or os.getpid(),
            change=assembly.redaction.captured,
        ),
    )
    return Adopter(
        queue,
        source_of(app, queue),
        adoption,
        backend.letters,
        backend.counter,
        assembly.letter_outbox(backend),
        assembly.memory_limit(),
        clock,
        assembly.events,
        progress,
    )
