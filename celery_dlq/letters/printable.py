r"""Text of any origin as people may see it: nothing in it steers a terminal or forges a line.

Task names, ids, queue names and what exceptions say come from whoever may publish. What cannot
be shown is spelled as in Python's source, ``\x1b`` or ``\u202e``, so that two names stay two.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Control characters (C0, DEL, C1), those that turn the direction of a line round, Unicode's own
# line ends, and halves of characters, which no file takes.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_STEERING}]")
_IN_A_LINE = re.compile(f"[\t\n{_STEERING}]")


def printable(text: str) -> str:
    """The text with its lines and tabs; what would steer a terminal is spelled."""
    return _IN_TEXT.sub(_spelled, text)


def one_line(text: str) -> str:
    """The text on one line: a name that holds a line end forges no line."""
    return _IN_A_LINE.sub(_spelled, text)


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that means the very same value, with escapes for what would steer a terminal."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _IN_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spelled(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]
