"""Our loggers: what a message brings along is one line of a log, and stays there.

Anybody who may publish chooses task names, ids and texts of exceptions. A line end in one of
them would begin a line that looks like a worker's own, an escape sequence would steer the
terminal on which a log is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from textwrap import indent
from typing import Any

from celery_dlq.letters.printable import one_line, printable

_TRACEBACKS = logging.Formatter()


def get_logger(name: str) -> logging.Logger:
    """A logger of ours by its name; whoever handles its records gets them clean."""
    logger = logging.getLogger(name)
    if _CLEAN not in logger.filters:
        logger.addFilter(_CLEAN)
    return logger


class _Clean(logging.Filter):
    """Cleans the arguments of a record, and its traceback; lets every record through."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Clean one record."""
        if isinstance(record.args, Mapping):
            record.args = {name: _clean(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_clean, record.args))
        if record.exc_info and not record.exc_text:
            text = printable(_TRACEBACKS.formatException(record.exc_info))
            record.exc_text = indent(text, "  ")  # no line of it looks like one of the log
        return True


class _Shown:
    """An argument whose text is clean; made only when a handler asks for it."""

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
