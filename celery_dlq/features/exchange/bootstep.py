"""Worker bootstep: publish letters to dead-letter exchanges in a background thread."""

from __future__ import annotations

import threading
from typing import Any

from celery_dlq.features.exchange.publisher import ExchangePublisher, publish
from celery_dlq.worker.bootsteps import ThreadStep, assembly_of


class PublishStep(ThreadStep):
    """Publishes to the exchanges that policies name, if any.

    A thread, because the broker may be slow to confirm.
    """

    thread_name = "dlq-publish"

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._publisher: ExchangePublisher | None = None

    def prepare(self, worker: Any) -> bool:
        """Make the publisher, once the pool has started; return True if there is one."""
        self._publisher = assembly_of(worker.app).exchange_publisher()
        return self._publisher is not None

    def run(self, stop: threading.Event) -> None:
        """Publish until the worker stops; another worker, or the next start, does the rest."""
        assert self._publisher is not None  # noqa: S101 - else `prepare` returned False
        publish(self._publisher, stop)

    def wake(self) -> None:
        """Let the thread notice the stop at once."""
        if self._publisher is not None:
            self._publisher.wake.set()
