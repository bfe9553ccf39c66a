"""The check of the store when a worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.metrics import STORE_ERRORS, Counts

logger = get_logger("celery_dlq.worker")

_PAUSE_SECONDS = 1.0
_PAUSE_TICKS = 30


class StartCheck:
    """Checks the store at the start; a store that was away then, again when it is back."""

    def __init__(
        self, check: Callable[[], None], wait_seconds: float | None, counts: Counts
    ) -> None:
        self._check = check
        self._wait = wait_seconds
        self._counts = counts
        self._away = False
        self._pause = 0

    def run(self) -> None:
        """Check before the worker starts."""
        deadline = time.monotonic() + (self._wait or 0.0)
        while True:
            try:
                return self._check()
            except StoreUnavailable as exc:
                if self._wait is None:
                    return self._start_without(exc)
                if time.monotonic() >= deadline:
                    raise
                logger.warning("Waiting for the dead-letter store: %s", exc)
            time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))

    def tick(self) -> None:
        """Check a store that was away, until it has passed; called once a second."""
        if not self._away:
            return
        if self._pause > 0:
            self._pause -= 1
            return
        try:
            self._check()
        except SettingsError as exc:
            self._pause = _PAUSE_TICKS
            logger.error("The dead-letter store is back, but cannot be used: %s", exc)  # noqa: TRY400 - no traceback needed
            return
        self._away = False
        logger.warning("The dead-letter store is back: this worker counts, and stores letters")

    def close(self) -> None:
        """Do nothing."""

    def _start_without(self, exc: StoreUnavailable) -> None:
        self._away = True
        self._counts.count(STORE_ERRORS, "start")
        logger.error(
            "The dead-letter store is away, and this worker starts without it: until it is back, "
            "deliveries are not counted, and letters wait in memory and in dlq_spool_dir: %s",
            exc,
        )
