"""A stable hash of what went wrong: letters with one cause share it.

It hashes the exception type, the task name and the application's innermost frames
(file and function). Folders, line numbers, addresses, ids and messages are left out, so that
the same bug keeps its fingerprint across releases, hosts and data. Without an exception it
hashes the reason and the task name.

A worker's main process has only the text of a traceback: the exception stays in the pool process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import PurePosixPath

FINGERPRINT_VERSION = 2
_HASHED_FRAMES = 3
DIGITS = 16
"""Length of a fingerprint."""

SHOWN_DIGITS = 8
"""Of them, those by which people and commands name a cause."""

_FRAME = re.compile(r' *File "([^"\n]+)", line \d+, in ([^\n]+)')
# Where packages are installed: by pip, by Debian, in a pex as files and as a zip file.
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python\d|<frozen |\\lib\\|\.whl/|/\.deps/", re.IGNORECASE
)
_PACKAGE = re.compile(r"^.*(?:site-packages|dist-packages|\.whl)[/\\][^/\\]+")
_CELERYS = re.compile(r"[/\\](?:celery|billiard|celery_dlq)[/\\]")
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
    """Hash the cause of a death."""
    if exception_type is None:
        cause = ["reason", reason, task_name]
    else:
        # The last line is no frame, and differs where the frames are the same. It may be several
        # lines, as `str.splitlines` has more ends of lines.
        above, _, last = (traceback or "").rstrip("\n").rpartition("\n")
        is_text = len(last.splitlines()) == 1 and not last.startswith((" ", "\t", "Traceback"))
        frames = application_frames(above if is_text else traceback or "")
        cause = ["exception", exception_type, task_name, *frames]
    text = "\x1f".join([f"v{FINGERPRINT_VERSION}", *cause])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


@lru_cache(maxsize=32)  # of up to 64,000 characters; a storm has the same again and again
def application_frames(traceback: str) -> Sequence[str]:
    """The innermost frames outside of libraries, as ``file:function``, outermost first.

    Only the last traceback of a chain counts: it is the one that escaped. A file is named without
    its folder: that of a module at the root of a release is the release. The package of the task
    is the application's wherever it is installed. If all frames are in libraries, the innermost of
    those are returned.
    """
    frames: list[tuple[str, str]] = []
    for _, line in frame_lines(traceback[-_TRACEBACK_TAIL_CHARS:].splitlines()):
        if line is None:
            frames = []
        elif found := _FRAME.match(line):
            frames.append((found[1], found[2].strip()))
    task = next((file for file, _ in frames if not _CELERYS.search(file)), "")
    package = _PACKAGE.match(task)
    own = [
        frame
        for frame in frames
        if not is_library(frame[0]) or (package and frame[0].startswith(package[0]))
    ]
    return [
        f"{_file_name(file)}:{function}" for file, function in (own or frames)[-_HASHED_FRAMES:]
    ]


def frame_lines(lines: Sequence[str]) -> Iterator[tuple[int, str | None]]:
    """The lines of a traceback's frames, with their places; ``None`` where another one begins.

    What follows the frames is the exception's text, in which a line may look like a frame.
    """
    in_frames, in_text = True, False  # the beginning may have been cut off
    for number, line in enumerate(lines):
        if in_text:
            in_text = CHAINED.fullmatch(line) is None
        elif line.startswith("Traceback (most recent call last)"):
            in_frames = True
            yield number, None
        elif in_frames and line.startswith((" ", "\t")):
            yield number, line
        elif in_frames and line.strip():
            in_frames, in_text = False, CHAINED.fullmatch(line) is None


# A worker sees the same few files in every traceback.
@lru_cache(maxsize=128)
def is_library(file: str) -> bool:
    """True if the file belongs to Python or to an installed package."""
    return _LIBRARY.search(file) is not None


@lru_cache(maxsize=128)
def _file_name(file: str) -> str:
    return PurePosixPath(file.replace("\\", "/")).name
