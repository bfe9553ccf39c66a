"""The form of a letter in a queue of the broker: a contract, see docs/broker-store.md.

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
from celery_dlq.record import DeadLetter, iso

CONTENT_TYPE, CONTENT_ENCODING = "application/json", "utf-8"
COMPRESSION_HEADER, COMPRESSION = "compression", "application/x-gzip"  # as kombu names zlib

_BINARY = "~base64"  # names the fields that are base64
_COMPRESSED_FROM = 1024 * 1024
_FASTEST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A letter as a message.

    Attributes:
        letter_id: Also the message id.
        body: The letter.
        headers: What other consumers may look at.
    """

    letter_id: str
    body: bytes
    headers: Mapping[str, Any] = field(default_factory=dict)


def parcel(letter: DeadLetter, position: str) -> Parcel:
    """Make a message of a letter."""
    body = encoded(letter.to_fields())
    about: dict[str, Any] = {
        headers.LETTER_HEADER: letter.id,
        headers.POSITION_HEADER: position,
        headers.REASON_HEADER: letter.reason.value,
        headers.DEAD_LETTERED_AT_HEADER: iso(letter.dead_lettered_at),
        headers.SOURCE_QUEUE_HEADER: letter.source_queue,
        headers.DEAD_LETTER_QUEUE_HEADER: letter.dead_letter_queue,
        headers.DELIVERIES_HEADER: letter.deliveries,
        headers.RETRIES_HEADER: letter.retries,
    }
    if len(body) >= _COMPRESSED_FROM:  # base64 makes a body a third longer, and brokers have limits
        body = zlib.compress(body, _FASTEST)
        about[COMPRESSION_HEADER] = COMPRESSION
    return Parcel(letter_id=letter.id, body=body, headers=about)


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
