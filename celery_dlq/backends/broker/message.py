"""The form of a letter in a queue of the broker: a contract, see docs/reference/wire.md.

A JSON object of the letter's storage form: every field's text by its name, the body as base64.
Fields that no version of this package knows go the same way, so nothing is lost on a way
through an older one.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_dlq import headers
from celery_dlq.headers import death_headers
from celery_dlq.record import DeadLetter

CONTENT_TYPE, CONTENT_ENCODING = "application/json", "utf-8"
COMPRESSION_HEADER, COMPRESSION = "compression", "application/x-gzip"  # as kombu names zlib

_BINARY = "~base64"  # names the fields that are base64
_COMPRESSED_FROM = 1024 * 1024
_FASTEST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterMessage:
    """A letter as a message.

    Attributes:
        letter_id: Also the message id.
        body: The letter.
        headers: What other consumers may look at.
    """

    letter_id: str
    body: bytes
    headers: Mapping[str, Any] = field(default_factory=dict)


def letter_message(letter: DeadLetter, position: str) -> LetterMessage:
    """Make a message of a letter."""
    body = encoded(letter.to_fields())
    about = {**death_headers(letter), headers.POSITION_HEADER: position}
    if len(body) >= _COMPRESSED_FROM:  # base64 makes a body a third longer, and brokers have limits
        body = zlib.compress(body, _FASTEST)
        about[COMPRESSION_HEADER] = COMPRESSION
    return LetterMessage(letter_id=letter.id, body=body, headers=about)


def publish(producer: Any, queue: str, letter: LetterMessage, **options: Any) -> None:
    """Put a letter into a queue of the broker; through the default exchange, once.

    Args:
        producer: Kombu's producer on an open channel.
        queue: The queue.
        letter: The letter.
        **options: What only some transports know.
    """
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
    """Storage form to JSON."""
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
    """JSON to storage form; what is none becomes an entry with nothing but this body."""
    try:
        texts = json.loads(zlib.decompress(body) if compressed else body)
        binary = set(texts.pop(_BINARY))
        return {
            name.encode(): base64.b64decode(value) if name in binary else value.encode()
            for name, value in texts.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zlib.error):
        return {b"body": body}
