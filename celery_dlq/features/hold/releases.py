"""Releases the messages of holds that have ended, in a thread of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery_dlq.errors import DLQError
from celery_dlq.features.hold.holding import Holding
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.worker")

_STOP_SECONDS = 5.0


class Releases:
    """Starts a thread while there are holds that ended; one worker of many does the work."""

    ticks = 5  # seconds between two looks
    thread_name = "dlq-releases"

    def __init__(self, holding: Holding, release: Callable[[Callable[[], bool]], None]) -> None:
        self._holding = holding
        self._release = release
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ticks = 0

    def tick(self) -> None:
        """Start the thread every few seconds, if there is something to release."""
        self._ticks += 1
        if self._ticks % self.ticks or not self.is_due() or self._works():
            return
        self._thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
        self._thread.start()

    def is_due(self) -> bool:
        """True if there is something to release."""
        return bool(self._holding.ended)

    def close(self) -> None:
        """Stop after the current batch; another worker goes on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _works(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._release(self._stop.is_set)
        except DLQError as exc:
            logger.warning("Held messages wait: %s", exc)
        except Exception:
            logger.exception("Held messages wait")
