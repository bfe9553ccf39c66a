"""The arguments in the body of a message, as text, in both of Celery's protocols.

A body of protocol 2 is a list: args, kwargs, links. One of protocol 1 is an object with everything
in it. A worker has decompressed it already; others read it with `celery_dlq.letters.bodies`.

Source: https://docs.celeryq.dev/en/stable/internals/protocol.html
"""

from __future__ import annotations

import json
import re

JSON_TYPES = ("application/json",)
MAX_JSON_BYTES = 1024 * 1024
"""The arguments of larger bodies are not known."""

_DECODER = json.JSONDecoder()
_PARTS = ((re.compile(r"\s*\[\s*"), list), (re.compile(r"\s*,\s*"), dict))  # args and kwargs
_OBJECT = re.compile(r"\s*\{\s*")
_COLON = re.compile(r"\s*:\s*")
_NEXT = re.compile(r"\s*([,}])\s*")
_NAMED = {"args": list, "kwargs": dict}

ALIASES = {
    "gzip": "application/x-gzip",
    "zlib": "application/x-gzip",
    "bzip": "application/x-bz2",
    "bzip2": "application/x-bz2",
    "brotli": "application/x-brotli",
    "lzma": "application/x-lzma",
    "xz": "application/x-lzma",
    "zstd": "application/zstd",
    "zstandard": "application/zstd",
}
_KNOWN = frozenset({None, "", *ALIASES, *ALIASES.values()})


def hides_nothing(compression: object) -> bool:
    """True for a compression of kombu's own, or none; one of the user's own may be a cipher."""
    return isinstance(compression, (str, type(None))) and compression in _KNOWN


def json_parts(body: bytes, content_type: str) -> tuple[str | None, str | None]:
    """Cut the texts of args and kwargs out of a JSON body, without encoding them again."""
    if content_type not in JSON_TYPES or len(body) > MAX_JSON_BYTES:
        return None, None
    try:
        text = body.decode("utf-8")
        start = _OBJECT.match(text)
        return _of_list(text) if start is None else _of_object(text, start.end())
    except (ValueError, RecursionError):
        return None, None


def _of_list(text: str) -> tuple[str | None, str | None]:
    """The parts of a body of protocol 2."""
    parts: list[str] = []
    end = 0
    for before, kind in _PARTS:
        start = before.match(text, end)
        value, end = _DECODER.raw_decode(text, start.end() if start else len(text))
        if not (start and isinstance(value, kind)):
            return None, None
        parts.append(text[start.end() : end])
    return parts[0], parts[1]


def _of_object(text: str, at: int) -> tuple[str | None, str | None]:
    """The parts of a body of protocol 1; Celery tells it by its ``args``."""
    parts = {"kwargs": "{}"}
    sign = ","
    while sign == ",":
        name, at = _DECODER.raw_decode(text, at)
        colon = _COLON.match(text, at)
        start = colon.end() if colon and isinstance(name, str) else len(text)
        value, at = _DECODER.raw_decode(text, start)
        if name in _NAMED:
            if not isinstance(value, _NAMED[name]):
                return None, None
            parts[name] = text[start:at]
        after = _NEXT.match(text, at)
        if after is None:
            return None, None
        sign, at = after[1], after.end()
    return (parts["args"], parts["kwargs"]) if "args" in parts else (None, None)
