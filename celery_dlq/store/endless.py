"""Loops of threads that nobody watches: no error ends one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from celery_dlq.letters.printable import get_logger

logger = get_logger("celery_dlq.store")

LOG_SECONDS = 10.0
"""Interval of log lines about a failure that lasts."""

PAUSE_SECONDS = 1.0


def repeat_until(
    act: Callable[[], object],
    ended: Callable[[], object],
    what: str,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Call a function again and again until the loop is to end.

    After an error it goes on a second later. Not only an `Exception` ends a thread unseen: so do a
    ``SystemExit`` that a library raises, and an error while another one is handled.
    """
    logged_at = -LOG_SECONDS
    while not ended():
        try:
            act()
        except BaseException:
            with suppress(BaseException):
                if time.monotonic() - logged_at >= LOG_SECONDS:
                    logged_at = time.monotonic()
                    logger.exception("%s; it goes on", what)
            with suppress(BaseException):
                sleep(PAUSE_SECONDS)
