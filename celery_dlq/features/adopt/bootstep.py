"""Worker bootstep: adopt what the broker dead-letters, in a background thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.features.adopt.adopter import Adopter, follow
from celery_dlq.features.adopt.run import adopters_of
from celery_dlq.logs import get_logger
from celery_dlq.worker.bootsteps import ThreadStep, assembly_of, refuse_to_start

logger = get_logger("celery_dlq.worker")


class AdoptStep(ThreadStep):
    """Empties the queues of the setting ``dlq_adopt``.

    A thread, because a long queue or a slow broker must not delay the tasks.
    """

    thread_name = "dlq-adopt"

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        try:
            self._adopters: Sequence[Adopter] = adopters_of(
                assembly_of(worker.app),
                worker.app.amqp.queues.consume_from,
                hostname=worker.hostname,
                pid=os.getpid(),
            )
        except DLQError as exc:
            refuse_to_start(exc)

    def prepare(self, worker: Any) -> bool:  # noqa: ARG002 - the base class's signature
        """Return True if there is a queue to adopt from."""
        if self._adopters:
            names = ", ".join(adopter.report.queue for adopter in self._adopters)
            logger.info("Adopting dead messages from %s", names)
        return bool(self._adopters)

    def run(self, stop: threading.Event) -> None:
        """Adopt until the worker stops; a message whose letter is not stored stays in its queue."""
        follow(self._adopters, stop)
