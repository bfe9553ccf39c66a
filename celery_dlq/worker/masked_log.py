"""Celery's own lines in a worker's log, and in its pool processes', without what is redacted.

Celery logs an exception, its traceback and the arguments of its task in the process that runs it,
and a message that it cannot read, in the worker. Handlers and formatters are the user's, so the
records are masked before any of them sees them.

Source: ``TraceInfo._log_error`` in
https://github.com/celery/celery/blob/main/celery/app/trace.py
"""

from __future__ import annotations

import logging
from typing import Any

from celery import current_task

from celery_dlq.letters.redaction import Redaction
from celery_dlq.letters.replacing import MARKER
from celery_dlq.writing.lifecycle import DUMPING

_TRACEBACKS = logging.Formatter()


def install(redaction: Redaction | None) -> None:
    """Mask Celery's records in this process and its forks; replaces what an earlier call did.

    A worker has made all of Celery's loggers by then: with its modules, and where it redirects what
    tasks print. A filter of a logger does not see the records of those below it.
    """
    for name in [one for one in logging.root.manager.loggerDict if one.split(".")[0] == "celery"]:
        logger = logging.getLogger(name)
        logger.filters[:] = [one for one in logger.filters if not isinstance(one, _Masked)]
        if redaction:
            logger.addFilter(_Masked(redaction))


class _Masked(logging.Filter):
    """Masks the text, the traceback and the fields of a record; drops no record."""

    def __init__(self, redaction: Redaction) -> None:
        super().__init__()
        self._redaction = redaction

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask one record; one that cannot be looked into loses its texts."""
        try:
            self._mask(record)
        except Exception:  # noqa: BLE001 - the line must not leak, nor fail a task
            record.msg, record.args, record.exc_info, record.exc_text = MARKER, None, None, None
            record.__dict__.pop("data", None)
        return True

    def _mask(self, record: logging.LogRecord) -> None:
        # Celery's line has the message whole: nobody can tell the arguments in it.
        if DUMPING.get() and isinstance(record.args, tuple):
            record.args = tuple(_kind(one) for one in record.args)
            record.exc_info = None
        texts: dict[str, Any] = {"msg": record.getMessage()}
        if record.exc_info:
            texts["exc_text"] = record.exc_text or _TRACEBACKS.formatException(record.exc_info)
        if "data" in record.__dict__:
            texts["data"] = record.__dict__["data"]
        request = current_task.request if current_task else None
        args, kwargs = getattr(request, "args", None), getattr(request, "kwargs", None)
        record.__dict__.update(self._redaction.value(texts, args or (), kwargs))
        record.args = record.exc_info = None


def _kind(value: Any) -> str:
    if isinstance(value, KeyError):  # the name of an unknown task
        return repr(value)
    return type(value).__name__ if isinstance(value, BaseException) else MARKER
