"""The arguments in the body of a message, in both of Celery's protocols; compressed or not.

A body of protocol 2 is a list: args, kwargs, links. One of protocol 1 is an object with everything
in it. Whoever may publish writes it: outside a worker, which has decompressed it already, it is
decompressed up to `MAX_JSON_BYTES` and no further.

Source: https://docs.celeryq.dev/en/stable/internals/protocol.html
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

JSON_TYPES = ("application/json",)
MAX_JSON_BYTES = 1024 * 1024
"""The arguments of larger bodies are not known."""

_MAX_LZMA_BYTES = 64 * 1024 * 1024  # of memory; more than any preset needs
_DECODER = json.JSONDecoder()
_PARTS = ((re.compile(r"\s*\[\s*"), list), (re.compile(r"\s*,\s*"), dict))  # args and kwargs
_OBJECT = re.compile(r"\s*\{\s*")
_COLON = re.compile(r"\s*:\s*")
_NEXT = re.compile(r"\s*([,}])\s*")
_NAMED = {"args": list, "kwargs": dict}


_DECOMPRESSORS: Mapping[str, tuple[str, str, Mapping[str, int]]] = {
    "application/x-gzip": ("zlib", "decompressobj", {}),
    "application/x-bz2": ("bz2", "BZ2Decompressor", {}),
    "application/x-lzma": ("lzma", "LZMADecompressor", {"memlimit": _MAX_LZMA_BYTES}),
    "application/zstd": (
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd",
        "ZstdDecompressor",
        {},
    ),
}
"""The modules that kombu uses, some of which a Python may lack, and their classes."""

_ALIASES = {
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
_KNOWN = frozenset({None, "", *_ALIASES, *_ALIASES.values()})


def unread_text(count: int, what: str, consequence: str) -> str:
    """``12 messages could not be read; they were not held``, or the like of one."""
    if count == 1:
        return f"1 {what} could not be read; it was {consequence}"
    return f"{count:,} {what}s could not be read; they were {consequence}"


def hides_nothing(compression: object) -> bool:
    """True for a compression of kombu's own, or none; one of the user's own may be a cipher."""
    return isinstance(compression, (str, type(None))) and compression in _KNOWN


def plain_body(body: bytes, compression: object) -> bytes:
    """The body decompressed; ``ValueError`` if it cannot be, or is too large then."""
    if not compression:
        return body
    name = compression if isinstance(compression, str) else ""
    try:
        module, maker, options = _DECOMPRESSORS[_ALIASES.get(name, name)]
        one = getattr(import_module(module), maker)(**options)
    except (KeyError, ImportError):
        raise ValueError("its compression is not known here") from None
    try:
        plain: bytes = one.decompress(body, MAX_JSON_BYTES + 1)
    except Exception as exc:  # each has errors of its own
        raise ValueError(f"it is not compressed as its headers say: {exc}") from exc
    if len(plain) > MAX_JSON_BYTES or not one.eof:
        raise ValueError("it is cut, or larger than 1 MiB when it is decompressed")
    return plain


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a message, with what else its body has."""

    args: list[Any]
    kwargs: dict[str, Any]
    others: Any  # The links of protocol 2, or the whole object of protocol 1
    is_object: bool  # Of protocol 1

    @classmethod
    def of(cls, content_type: str, body: bytes, compression: object) -> Arguments:
        """Read a body; ``ValueError`` says what it is instead."""
        if content_type not in JSON_TYPES:
            raise ValueError(f"a body of type {content_type or 'unknown'!r}")
        try:
            found = json.loads(plain_body(body, compression))
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"one that cannot be read: {exc}") from exc
        parts = found if isinstance(found, list) else []
        if isinstance(found, dict):
            parts = [found.get("args"), found.get("kwargs", {}), found]
        if (
            len(parts) != 3  # noqa: PLR2004 - args, kwargs, links
            or not isinstance(parts[0], list)
            or not isinstance(parts[1], dict)
        ):
            raise ValueError("JSON of another form")
        return cls(args=parts[0], kwargs=parts[1], others=parts[2], is_object=parts[2] is found)

    def body(self, args: list[Any], kwargs: dict[str, Any]) -> bytes:
        """The body with other arguments, not compressed."""
        if self.is_object:
            return json.dumps({**self.others, "args": args, "kwargs": kwargs}).encode()
        return json.dumps([args, kwargs, self.others]).encode()
