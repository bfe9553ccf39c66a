"""Adopting for an operator: one queue, until it is empty or until interrupted."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

from celery_dlq.events import Action
from celery_dlq.features.adopt.adopter import Adopter, AdoptReport, Progress
from celery_dlq.features.adopt.settings import check_adoption, consumed_already
from celery_dlq.operations.instructions import Audit, CountedChange
from celery_dlq.worker.housekeeping import Housekeeping
from celery_dlq.writing.letter import LetterMaker

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly


class AdoptRun:
    """Adopts one queue for an operator, until it is empty or until interrupted."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def adopt(
        self,
        queue: str,
        dead_letter_queue: str | None = None,
        *,
        follow: bool = False,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> AdoptReport:
        """Store messages that the broker itself dead-lettered as letters.

        A letter is stored before its message is acknowledged; once, however often the message is
        redelivered, if it has an id. Of messages without one, equal letters may be copies.
        """
        assembly = self._assembly
        check_adoption(assembly.settings, queue, dead_letter_queue, "dlq import")
        for info in assembly.backend.workers.workers():
            if queue in info.queues:
                raise consumed_already(queue, info.hostname, by="dlq import")
        change, hostname = assembly.redaction.captured, socket.gethostname()
        make = LetterMaker(clock=assembly.clock, hostname=hostname, pid=os.getpid(), change=change)
        changes = _Changes(assembly, queue)
        adopter = Adopter(
            assembly, queue, dead_letter_queue, make, progress=progress, adopted=changes.adopted
        )
        try:
            # While it follows, a missing queue is an error at the start, and retried later.
            adopter.drain(1 if follow else limit)
            if follow:
                _follow_queue(adopter)
        except KeyboardInterrupt:
            if not follow:
                raise
        finally:
            adopter.close()
            changes.close()
        return adopter.report


class _Changes:
    """What the audit says of an import, an entry for each dead-letter queue.

    The letters are counted one by one: of an import that is killed, the last one may be missing.
    """

    def __init__(self, assembly: Assembly, queue: str) -> None:
        self._letters = assembly.backend.letters
        self._audit = Audit(assembly.backend.workers, assembly.events)
        self._detail = {"queue": queue}
        self._id = f"import-{uuid4().hex}"
        self._open: dict[str, CountedChange] = {}

    def adopted(self, name: str) -> None:
        """Count a letter of a dead-letter queue."""
        if name not in self._open:
            operation = f"{self._id}-{len(self._open)}"
            self._open[name] = self._audit.counted(
                self._letters, operation, Action.ADOPTED, name, self._detail
            )
            self._open[name].open()
        self._letters.claims.count_adopted(name, self._open[name].operation)

    def close(self) -> None:
        """Record the entries."""
        for _name, change in sorted(self._open.items()):
            change.close()


def _follow_queue(adopter: Adopter) -> NoReturn:
    """Adopt as a worker does; errors of the queue, the broker or the store are retried."""
    housekeeping = Housekeeping()
    housekeeping.add(adopter.task)
    try:
        while True:
            housekeeping.tick()
            time.sleep(1)
    finally:
        housekeeping.stop()
