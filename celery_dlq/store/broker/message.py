"""The format of a letter in a queue on the broker: a contract, see docs/reference/wire.md.

A JSON object of the letter's storage form: every field's text by its name, the body as base64.
Unknown fields are treated the same, so an older version of this package loses nothing.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_dlq.letters import headers
from celery_dlq.letters.headers import death_headers
from celery_dlq.letters.record import DeadLetter

CONTENT_TYPE, CONTENT_ENCODING = "application/json", "utf-8"
COMPRESSION_HEADER, COMPRESSION = "compression", "application/x-gzip"  # as kombu names zlib

_BINARY = "~base64"  # lists the fields that are base64
_COMPRESS_FROM_BYTES = 1024 * 1024
_FASTEST_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterMessage:
    """A letter as a message."""

    letter_id: str  # The letter's id, also the message id
    body: bytes  # The encoded letter
    headers: Mapping[str, Any] = field(default_factory=dict)  # Headers for other consumers


def letter_message(letter: DeadLetter, position: str) -> LetterMessage:
    """Encode a letter as a message."""
    body = encoded(letter.to_fields())
    about = {**death_headers(letter), headers.POSITION_HEADER: position}
    if len(body) >= _COMPRESS_FROM_BYTES:  # base64 adds a third, and brokers have limits
        body = zlib.compress(body, _FASTEST_LEVEL)
        about[COMPRESSION_HEADER] = COMPRESSION
    return LetterMessage(letter_id=letter.id, body=body, headers=about)


def publish(producer: Any, queue: str, letter: LetterMessage, **options: Any) -> None:
    """Publish a letter to a queue through the default exchange; one attempt."""
    producer.publish(
        letter.body,
        exchange="",
        routing_key=queue,
        content_type=CONTENT_TYPE,
        content_encoding=CONTENT_ENCODING,
        headers=dict(letter.headers),
        message_id=letter.letter_id,
        retry=False,
        **options,
    )


def encoded(fields: Mapping[str, bytes]) -> bytes:
    """Encode a storage form as JSON."""
    texts: dict[str, Any] = {}
    binary = []
    for name, value in fields.items():
        try:
            if name == "body":
                raise ValueError(name)  # noqa: TRY301 - always base64, whatever it holds
            texts[name] = value.decode("utf-8")
        except ValueError:
            texts[name] = base64.b64encode(value).decode("ascii")
            binary.append(name)
    texts[_BINARY] = binary
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()


def decoded(body: bytes, *, compressed: bool) -> dict[bytes, bytes]:
    """Decode JSON to a storage form; anything else becomes an entry with only a body."""
    try:
        texts = json.loads(zlib.decompress(body) if compressed else body)
        binary = set(texts.pop(_BINARY))
        return {
            name.encode(): base64.b64decode(value) if name in binary else value.encode()
            for name, value in texts.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zlib.error):
        return {b"body": body}
