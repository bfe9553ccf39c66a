r"""Text of any origin, made safe to print: it can neither control a terminal nor forge a line.

Task names, ids, queue names and texts of exceptions come from anybody who may publish. Unsafe
characters are escaped as in Python's source, ``\x1b`` or ``\u202e``, so that different names
stay different.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

# Control characters (C0, DEL, C1), those that turn the direction of a line round, Unicode's own
# line ends, and halves of characters, which no file takes.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_STEERING}]")
_IN_A_LINE = re.compile(f"[\t\n{_STEERING}]")


def printable(text: str) -> str:
    """The text with control characters escaped; line ends and tabs stay."""
    return _IN_TEXT.sub(_spelled, text)


def one_line(text: str) -> str:
    """The text with control characters, line ends and tabs escaped."""
    return _IN_A_LINE.sub(_spelled, text)


def shortened(text: str, limit: int) -> str:
    """The text, cut to at most ``limit`` characters; a cut text ends with ``…``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def url_without_secrets(url: str) -> str:
    """A URL without its user, password and options, also when it is too odd to be taken apart.

    >>> url_without_secrets("redis://:hush@db.internal:6379/0?password=hush")
    'redis://db.internal:6379/0'
    """
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return f"{url.partition('://')[0]}://…"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON text of a value, with control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _IN_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spelled(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]
