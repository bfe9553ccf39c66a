"""The app of these tests with a handler of the log that works in the main thread only.

As one that writes to an ``sqlite3`` database does, or one that needs an event loop.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery.signals import after_setup_logger
from poison_app import *  # noqa: F403


class MainThreadOnly(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            raise RuntimeError("made in another thread")


@after_setup_logger.connect(weak=False)
def add_handler(logger: logging.Logger, **_: Any) -> None:
    logger.addHandler(MainThreadOnly())
