"""Worker bootstep: publish letters to dead-letter exchanges, in a thread beside the tasks."""

from __future__ import annotations

import threading
import time
from typing import Any

from celery_dlq.dlx.publisher import ExchangePublisher
from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger
from celery_dlq.worker.bootsteps import ThreadStep, assembly_of

logger = get_logger("celery_dlq.worker")

SWEEP_SECONDS = 5.0
"""How often all outboxes are looked into, for what other workers left there."""

_LONGEST_REST_SECONDS = 30.0


class PublishStep(ThreadStep):
    """Publishes to the exchanges that policies name, if one does.

    A thread, because the broker may be slow to confirm.
    """

    thread_name = "dlq-publish"

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._publisher: ExchangePublisher | None = None

    def prepare(self, worker: Any) -> bool:
        """Make the publisher; not before the pool has started."""
        self._publisher = assembly_of(worker.app).exchange_publisher()
        return self._publisher is not None

    def run(self, stop: threading.Event) -> None:
        """Publish until the worker stops; the rest is another worker's, or the next start's."""
        assert self._publisher is not None  # noqa: S101 - `prepare` said so
        publish(self._publisher, stop)

    def wake(self) -> None:
        """OutboxEntry the stop at once."""
        if self._publisher is not None:
            self._publisher.wake.set()


def publish(publisher: ExchangePublisher, stop: threading.Event) -> None:
    """Publish for ever; what the broker or the store refuses is logged and tried again.

    Args:
        publisher: Publishes.
        stop: Ends it, once ``publisher.wake`` is set too.
    """
    rest, swept_at = 1.0, -SWEEP_SECONDS
    while True:
        try:
            if time.monotonic() - swept_at >= SWEEP_SECONDS:
                publisher.deliver()
                swept_at = time.monotonic()
            publisher.deliver_new()
        except Exception as exc:  # noqa: BLE001 - a thread that died would say nothing any more
            _log(exc)
            swept_at, pause = -SWEEP_SECONDS, rest
            rest = min(2 * rest, _LONGEST_REST_SECONDS)
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
