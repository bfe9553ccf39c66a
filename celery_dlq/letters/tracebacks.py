"""The exceptions and frames of a traceback, parsed of its text; for pages and Sentry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from celery_dlq.letters.fingerprint import CHAINED, frame_lines, is_library

MAX_FRAMES = 100
"""Most frames of one exception that are parsed."""

_FRAME_LINE = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[^\n]+)$'
)
_SOURCE = re.compile(r"^ {4}(?P<code>\S.*)$")
_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a traceback: where a call was made."""

    file: str  # Path of the source
    line: int  # Number of the line
    function: str  # Name of the function
    code: str | None  # Text of the line, if known
    own: bool  # True if it belongs to the application, not to a library


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """One exception of a chain."""

    name: str  # Dotted name of its class
    message: str  # Its text
    frames: tuple[Frame, ...]  # Its frames, outermost first


def raised_exceptions(traceback: str) -> list[Raised]:
    """The exceptions of a traceback, the one that escaped last; empty for other text."""
    return [
        found for part in CHAINED.split(traceback) if (found := _parsed_exception(part)) is not None
    ]


def _parsed_exception(text: str) -> Raised | None:
    lines = text.strip("\n").split("\n")
    frames = tuple(_frames_of(lines))
    tail = _text_after_frames(lines)
    match = _RAISED.match(tail) if tail else None
    if match is None and not frames:
        return None
    return Raised(
        name=match["name"] if match else "",
        message=(match["message"] or "") if match else "",
        frames=frames[:1] + frames[1 - MAX_FRAMES :] if len(frames) > MAX_FRAMES else frames,
    )


def _frames_of(lines: list[str]) -> Iterator[Frame]:
    for number, line in frame_lines(lines):
        found = _FRAME_LINE.match(line or "")
        if found:
            source = _SOURCE.match(lines[number + 1]) if number + 1 < len(lines) else None
            yield Frame(
                file=found["file"],
                line=int(found["line"]),
                function=found["function"].strip(),
                code=source["code"] if source else None,
                own=not is_library(found["file"]),
            )


def _text_after_frames(lines: list[str]) -> str:
    """The text after the last frame: name and text of the exception, maybe on many lines."""
    places = (number + 1 for number, line in frame_lines(lines) if _FRAME_LINE.match(line or ""))
    at = max(places, default=0)
    while at < len(lines) and lines[at].startswith(("    ", "  [", "Traceback (most recent")):
        at += 1
    return "\n".join(lines[at:]).strip()
