"""The bodies of messages outside a worker: decompressed, read and written again.

Whoever may publish writes a body: it is decompressed up to `MAX_JSON_BYTES` and no further.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.arguments import ALIASES, JSON_TYPES, MAX_JSON_BYTES
from celery_dlq.letters.printable import printable_json, shortened

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter

_MAX_LZMA_BYTES = 64 * 1024 * 1024  # of memory; more than any preset needs
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

_MAX_ROW_CHARS = 2_000  # of which a row shows the first ones
_EMPTY = (None, "", "[]", "{}", "()")
_ESCAPES = re.compile(r"\\\\|((?:\\u[0-9a-fA-F]{4})+)")


def readable_json(text: str) -> str:
    """JSON text with letters instead of their numbers; it then means the same.

    Nothing else changes: a number keeps all its digits.
    """
    return _ESCAPES.sub(lambda found: _letters(found[1]) if found[1] else found[0], text)


def _letters(escapes: str) -> str:
    return printable_json(json.dumps(json.loads(f'"{escapes}"'), ensure_ascii=False)[1:-1])


def argument_texts(letter: DeadLetter) -> list[str]:
    """The arguments of a letter as people read them in a row, without those that are empty."""
    both = (letter.args_json or letter.argsrepr, letter.kwargs_json or letter.kwargsrepr)
    return [readable_json(shortened(str(x), _MAX_ROW_CHARS)) for x in both if x not in _EMPTY]


def unread_text(count: int, what: str, consequence: str) -> str:
    """``12 messages could not be read; they were not held``, or the like of one."""
    if count == 1:
        return f"1 {what} could not be read; it was {consequence}"
    return f"{count:,} {what}s could not be read; they were {consequence}"


def plain_body(body: bytes, compression: object) -> bytes:
    """The body decompressed; ``ValueError`` if it cannot be, or is too large then."""
    if not compression:
        return body
    name = compression if isinstance(compression, str) else ""
    try:
        module, maker, options = _DECOMPRESSORS[ALIASES.get(name, name)]
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
