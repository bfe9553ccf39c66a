"""A stable hash of what went wrong: letters with one cause share it.

It hashes the exception type, the task name and the application's innermost frames
(file and function). Line numbers, addresses, ids and messages are left out, so that
the same bug keeps its fingerprint across releases and data. Without an exception it
hashes the reason and the task name.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import PurePosixPath

FINGERPRINT_VERSION = 1
_MAX_FRAMES = 3
DIGITS = 16
"""Length of a fingerprint."""


# Anchored on `File "`: without the anchor a long traceback takes seconds, not microseconds.
_FRAME = re.compile(r'^ *File "([^"\n]+)", line \d+, in ([^\n]+)', re.MULTILINE)
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen |\\lib\\", re.IGNORECASE)
CHAINED = re.compile(
    r"^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$",
    re.MULTILINE,
)
"""Matches the line between two chained tracebacks."""
_TRACEBACK_TAIL_CHARS = 64 * 1024


def fingerprint(
    *, task_name: str, reason: str, exception_type: str | None, traceback: str | None
) -> str:
    """Hash the cause of a death.

    Args:
        task_name: Registered name of the task.
        reason: The `Reason` value; used only without an exception.
        exception_type: Qualified name of the exception class, if one was raised.
        traceback: Its traceback as text; only the last 64 KiB are read.

    Returns:
        16 hexadecimal digits.
    """
    if exception_type is None:
        cause = ["reason", reason, task_name]
    else:
        cause = ["exception", exception_type, task_name, *application_frames(traceback or "")]
    text = "\x1f".join([f"v{FINGERPRINT_VERSION}", *cause])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


def application_frames(traceback: str) -> list[str]:
    """The innermost frames outside of libraries, as ``file:function``, outermost first.

    Only the last traceback of a chain counts: it is the one that escaped. A file is named by
    the last two parts of its path, so that hosts with different install folders agree. If all
    frames are in libraries, the innermost of those are returned.
    """
    last = CHAINED.split(traceback[-_TRACEBACK_TAIL_CHARS:])[-1]
    frames = [(file, function.strip()) for file, function in _FRAME.findall(last)]
    own = [frame for frame in frames if not is_library(frame[0])]
    return [f"{_end_of(file)}:{function}" for file, function in (own or frames)[-_MAX_FRAMES:]]


# A worker sees the same few files in every traceback.
@lru_cache(maxsize=128)
def is_library(file: str) -> bool:
    """True if the file belongs to Python or to an installed package."""
    return _LIBRARY.search(file) is not None


@lru_cache(maxsize=128)
def _end_of(file: str) -> str:
    return "/".join(PurePosixPath(file.replace("\\", "/")).parts[-2:])
