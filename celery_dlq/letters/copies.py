"""The copy of a letter in a message: its headers, and the whole letter in one of them.

Of the message that a dead-letter exchange gets; docs/reference/wire.md is the contract.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import headers
from celery_dlq.letters.record import DeadLetter, iso

DEATH_HEADERS = (
    headers.LETTER_HEADER,
    headers.REASON_HEADER,
    headers.DEAD_LETTERED_AT_HEADER,
    headers.SOURCE_QUEUE_HEADER,
    headers.DEAD_LETTER_QUEUE_HEADER,
    headers.DELIVERIES_HEADER,
    headers.RETRIES_HEADER,
    headers.RECORD_HEADER,
)


def death_headers(letter: DeadLetter) -> dict[str, Any]:
    """Letter, reason, time, queues and counts: a contract, see docs/reference/wire.md."""
    return {
        headers.LETTER_HEADER: letter.id,
        headers.REASON_HEADER: letter.reason.value,
        headers.DEAD_LETTERED_AT_HEADER: iso(letter.dead_lettered_at),
        headers.SOURCE_QUEUE_HEADER: letter.source_queue,
        headers.DEAD_LETTER_QUEUE_HEADER: letter.dead_letter_queue,
        headers.DELIVERIES_HEADER: letter.deliveries,
        headers.RETRIES_HEADER: letter.retries,
    }


MOST_CHARS = 48 * 1024
"""Of a record in a header: all headers of an AMQP message must fit a frame, 128 KiB by default."""

# What a reader can best do without goes first.
_FIRST_TO_GO = (
    ("args_json", "kwargs_json"),
    ("argsrepr", "kwargsrepr"),
    ("traceback",),
    ("history",),
    ("native_death", "properties", "headers"),
)


def record_of(letter: DeadLetter, most_chars: int = MOST_CHARS) -> str:
    """A letter as text for a header of its copy; the copy has the body."""
    fields = {name: value.decode("latin-1") for name, value in letter.to_fields().items()}
    del fields["body"]
    text = _encoded(fields)
    for names in _FIRST_TO_GO:
        if len(text) <= most_chars:
            break
        for name in names:
            fields.pop(name, None)
        text = _encoded(fields)
    return text


def letter_of(record: object, body: bytes, headers: str, properties: str) -> DeadLetter | None:
    """The letter of a record; ``None`` if it is none. Headers and properties may stand in."""
    try:
        texts = json.loads(zlib.decompress(base64.b64decode(str(record), validate=True)))
        fields = {name: text.encode("latin-1") for name, text in texts.items()}
        fields.setdefault("headers", headers.encode())
        fields.setdefault("properties", properties.encode())
        return DeadLetter.from_fields({**fields, "body": body})
    except (ValueError, AttributeError, zlib.error, CorruptLetter):
        return None


def _encoded(fields: dict[str, str]) -> str:
    data = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(data)).decode("ascii")
