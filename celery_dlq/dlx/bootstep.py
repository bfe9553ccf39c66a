"""Worker bootstep: publish letters to dead-letter exchanges, in a thread beside the tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from celery import bootsteps

from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.worker")

SWEEP_SECONDS = 5.0
"""How often all outboxes are looked into, for what other workers left there."""

_LONGEST_REST_SECONDS = 30.0
_STOP_SECONDS = 5.0


class Publishes(Protocol):
    """What the thread drives: a publisher."""

    wake: threading.Event

    def deliver_new(self) -> None:
        """Publish what this process added."""

    def deliver(self) -> None:
        """Publish whatever is due."""

    def close(self) -> None:
        """Disconnect."""


class ExchangeStep(bootsteps.StartStopStep):
    """Runs the publisher, if a policy names a dead-letter exchange.

    A thread, because the broker may be slow to confirm. The step keeps the publisher, because
    a pool child that let go of its copy of the connection would close it.
    """

    requires = ("celery.worker.components:Pool",)
    publisher: Callable[[], Publishes | None]

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._publisher: Publishes | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Begin to publish."""
        self._publisher = type(self).publisher()
        if self._publisher is None:
            return
        self._thread = threading.Thread(
            target=post, args=(self._publisher, self._stop), name="dlq-publisher", daemon=True
        )
        self._thread.start()

    def stop(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """End with the message at hand; the rest is another worker's, or the next start's."""
        self._stop.set()
        if self._thread is not None and self._publisher is not None:
            self._publisher.wake.set()
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    terminate = stop


def post(publisher: Publishes, stop: threading.Event) -> None:
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
