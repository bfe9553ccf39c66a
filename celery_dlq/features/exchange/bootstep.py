"""Worker bootstep: publish letters to dead-letter exchanges in a background thread."""

from __future__ import annotations

import threading
import time
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.features.exchange.publisher import ExchangePublisher
from celery_dlq.logs import get_logger
from celery_dlq.worker.bootsteps import ThreadStep, assembly_of

logger = get_logger("celery_dlq.worker")

SWEEP_SECONDS = 5.0
"""Interval of checking all outboxes, for entries that other workers left."""

_MAX_REST_SECONDS = 30.0


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


def publish(publisher: ExchangePublisher, stop: threading.Event) -> None:
    """Publish until stopped; errors of the broker or the store are logged and retried."""
    rest, swept_at = 1.0, -SWEEP_SECONDS
    while True:
        try:
            if time.monotonic() - swept_at >= SWEEP_SECONDS:
                publisher.deliver()
                swept_at = time.monotonic()
            publisher.deliver_new()
        except Exception as exc:  # noqa: BLE001 - the thread must not die
            _log(exc)
            swept_at, pause = -SWEEP_SECONDS, rest
            rest = min(2 * rest, _MAX_REST_SECONDS)
        else:
            rest = pause = 1.0
        if stop.is_set():
            break
        (stop if pause > 1.0 else publisher.wake).wait(pause)
    publisher.close()


def _log(exc: Exception) -> None:
    if isinstance(exc, DLQError):
        logger.error("A dead-letter exchange gets its letters later: %s", exc)
    else:
        logger.error("A dead-letter exchange gets its letters later", exc_info=exc)
