"""Loggers whose records are safe to print: text from a message stays on one line.

Anybody who may publish chooses task names, ids and texts of exceptions. A line end in one of
them would forge a line of the log, an escape sequence would control the terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from textwrap import indent
from typing import Any, TypeVar

from celery_dlq.letters.printable import error_without_secrets, one_line, printable, shortened

_TRACEBACKS = logging.Formatter()
_MOST_CHARS = 200
_Read = TypeVar("_Read")


def get_logger(name: str) -> logging.Logger:
    """A logger by name, whose records are escaped before any handler sees them."""
    logger = logging.getLogger(name)
    if _CLEAN not in logger.filters:
        logger.addFilter(_CLEAN)
    return logger


def readable(what: str, read: Callable[[], _Read]) -> _Read | None:
    """What ``read`` makes of a value.

    ``None`` and a line in the log for one that cannot be read, because another version wrote it or
    it was damaged: it ends no command and no worker.
    """
    try:
        return read()
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as exc:
        why = shortened(error_without_secrets(exc), _MOST_CHARS)
        get_logger("celery_dlq.store").warning("Skipped %s, which cannot be read: %s", what, why)
        return None


class _Clean(logging.Filter):
    """Escapes the arguments and the traceback of a record; drops no record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape one record."""
        if isinstance(record.args, Mapping):
            record.args = {name: _clean(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_clean, record.args))
        if record.exc_info and not record.exc_text:
            text = printable(_TRACEBACKS.formatException(record.exc_info))
            record.exc_text = indent(text, "  ")  # no line of it looks like one of the log
        return True


class _Shown:
    """An argument that is escaped when a handler formats it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(str(self._value))

    def __repr__(self) -> str:
        return one_line(repr(self._value))


def _clean(value: Any) -> Any:
    if type(value) is str:
        return one_line(value)
    return value if value is None or isinstance(value, (int, float)) else _Shown(value)


_CLEAN = _Clean()
