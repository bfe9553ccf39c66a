"""Worker bootstep: adopt what the broker dead-letters, in a thread beside the tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from celery import bootsteps

from celery_dlq.adopt.adopter import Adopter, follow
from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger
from celery_dlq.worker.bootsteps import _refuse

logger = get_logger("celery_dlq.worker")

_STOP_SECONDS = 5.0

MakeAdopters = Callable[..., Sequence[Adopter]]


class AdoptStep(bootsteps.StartStopStep):
    """Empties the queues of the setting ``dlq_adopt``.

    Not in the worker's own loop: a queue with a long past, or a broker that answers
    slowly, must not hold up the tasks. The connections are the thread's own, and this
    step keeps them, because a pool child that let go of its copy would close them.
    """

    requires = ("celery.worker.components:Pool",)
    make_adopters: MakeAdopters

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        consumed = worker.app.amqp.queues.consume_from
        try:
            self._adopters = type(self).make_adopters(
                consumed, hostname=worker.hostname, pid=os.getpid()
            )
        except DLQError as exc:
            _refuse(exc)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Begin to adopt, if anything is to be adopted."""
        if not self._adopters:
            return
        names = ", ".join(adopter.report.queue for adopter in self._adopters)
        logger.info("Adopting dead messages from %s", names)
        self._thread = threading.Thread(
            target=follow, args=(self._adopters, self._stop), name="dlq-adopt", daemon=True
        )
        self._thread.start()

    def stop(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """End with the message at hand; one whose letter is not stored stays in its queue."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    terminate = stop
