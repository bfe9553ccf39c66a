"""A whole letter in one header of its copy in a broker's queue, from which it can be read back.

The copy has the message's body as it was, so the record leaves that out. All headers of an AMQP
message must fit one frame, 128 KiB by default: what a reader can best do without goes first.
"""

from __future__ import annotations

import base64
import json
import zlib

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters.record import DeadLetter

MOST_CHARS = 48 * 1024

_FIRST_TO_GO = (
    ("args_json", "kwargs_json"),
    ("argsrepr", "kwargsrepr"),
    ("traceback",),
    ("history",),
    ("native_death", "properties", "headers"),
)


def record_of(letter: DeadLetter, most_chars: int = MOST_CHARS) -> str:
    """The record of a letter, without its body."""
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
