r"""Text of any origin, made safe to print: it can neither control a terminal nor forge a line.

Task names, ids, queue names and texts of exceptions come from anyone who can publish. Unsafe
characters are escaped as in Python source (``\x1b``, ``\u202e``), so that different names stay
different. Loggers of `get_logger` escape the arguments and the traceback of each record, and raise
no error of a handler.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from textwrap import indent
from typing import Any, TypeVar
from urllib.parse import urlsplit

# Control characters (C0, DEL, C1), Unicode's line separators, lone surrogates, which UTF-8 cannot
# encode, and characters without a shape of their own (Default_Ignorable_Code_Point; some change the
# direction of text), with which two names look the same.
_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# Joiners and the selector of emoji have a shape in some scripts and in emoji, and only there.
_JOINED = "[\u0600-\u0dff\u1000-\u109f\u1780-\u17ff\u200d\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]"
_JOINERS = f"(?<!{_JOINED})[\u200c\u200d\ufe0f]|[\u200c\u200d](?!{_JOINED})"
_UNSAFE_IN_TEXT = re.compile(f"[{_UNSAFE}]|{_JOINERS}")
_UNSAFE_IN_LINE = re.compile(f"[\t\n{_UNSAFE}]|{_JOINERS}")
_NEXT_URL = re.compile(r";(?=[a-z+]+://)")
_ARGUMENTS = re.compile(r",? with args beginning with:.*")
_CLIENT = re.compile(r"<[\w.]*\(<[\w.]*\(<[\w.]*\(.*?\bhost=([^,)]*),port=(\d+).*?\)>\)>\)>")
"""How redis-py prints a client, with all settings of its connections."""
_PASSWORD = re.compile(r"(?<=password=).*?(?=,\s*\w+=|\)|$)")


def printable(text: str) -> str:
    """Escape control characters, except for line ends and tabs."""
    return text if text.isascii() and text.isprintable() else _UNSAFE_IN_TEXT.sub(_escaped, text)


def one_line(text: str) -> str:
    """Escape control characters, line ends and tabs."""
    return text if text.isascii() and text.isprintable() else _UNSAFE_IN_LINE.sub(_escaped, text)


def shortened(text: str, limit: int) -> str:
    """Cut a text to at most ``limit`` characters; a cut text ends with ``…``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many there are beside them."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def url_without_secrets(url: str) -> str:
    """Remove user, password and options from a URL; only the scheme of a malformed one is kept.

    A password may hold a ``;``, so a list of URLs is one only where a ``://`` follows.

    >>> url_without_secrets("redis://:hush@db.internal:6379/0?password=hush")
    'redis://db.internal:6379/0'
    >>> url_without_secrets("sentinel://:hush@one:26379;sentinel://:hush@two:26379")
    'sentinel://one:26379;sentinel://two:26379'
    """
    first, *others = _NEXT_URL.split(url)
    if others:
        return ";".join(url_without_secrets(one) for one in (first, *others))
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        malformed = "@" in parts.path  # a password with a slash that is not percent-encoded
    except ValueError:
        malformed = True
    if malformed:
        return f"{url.partition('://')[0]}://…"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def error_without_secrets(exc: BaseException) -> str:
    """Describe an error in one line, without what its client was given to log in.

    Redis repeats the arguments of a command that it does not know, e.g. of a renamed ``AUTH``;
    redis-py prints the clients of Sentinels that it could not ask, before 8 with their passwords.

    >>> error_without_secrets(OSError("<Redis(host=a,password=hush,db=0)> is away"))
    'OSError: <Redis(host=a,password=**,db=0)> is away'
    """
    text = _ARGUMENTS.sub("", " ".join(str(exc).split()))
    text = _CLIENT.sub(r"\1:\2", _PASSWORD.sub("**", text))
    return f"{type(exc).__name__}: {text}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Encode a value as JSON text and escape control characters."""
    return printable_json(json.dumps(value, ensure_ascii=False, indent=indent))


def printable_json(text: str) -> str:
    """Escape control characters in JSON text, which then means the same."""
    return _UNSAFE_IN_TEXT.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


_TRACEBACKS = logging.Formatter()
_MOST_CHARS = 200
_Read = TypeVar("_Read")


def get_logger(name: str) -> logging.Logger:
    """A logger by name, whose records are escaped before any handler sees them.

    A handler that raises (one that writes to a database, say) raises to whoever logs: to a thread,
    which would end, or between a letter and the acknowledgement of its message.
    """
    logger = logging.getLogger(name)
    if _CLEAN not in logger.filters:
        logger.addFilter(_CLEAN)
        vars(logger)["handle"] = partial(_handled, logger.handle)
    return logger


def _handled(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    """Handle a record; print an error of a handler, not through one, as Celery's stderr does."""
    try:
        handle(record)
    except Exception:  # noqa: BLE001 - whatever a handler raises
        with suppress(Exception):
            if logging.raiseExceptions:
                traceback.print_exc(file=sys.__stderr__)


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
            record.args = {name: _escaped_value(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_escaped_value, record.args))
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


def _escaped_value(value: Any) -> Any:
    if type(value) is str:
        return one_line(value)
    return value if value is None or isinstance(value, (int, float)) else _Shown(value)


_CLEAN = _Clean()
