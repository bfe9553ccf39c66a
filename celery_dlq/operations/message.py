"""Rebuild the original message from a letter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from celery_dlq.errors import CorruptLetter, DLQError, RedriveError
from celery_dlq.headers import (
    DELAY_HEADER,
    DELAY_SOURCE_HEADER,
    LETTER_HEADER,
    REDRIVE_HEADER,
    REDRIVES_HEADER,
)
from celery_dlq.letters import json_codec
from celery_dlq.operations.selection import RawEntry
from celery_dlq.record import from_micros

# Set by a broker or by us for an earlier delivery; wrong or harmful in the next one.
# x-death: https://github.com/celery/celery/issues/10111
_STALE_PREFIXES = (
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
)
_STALE = ("redelivered", DELAY_HEADER, DELAY_SOURCE_HEADER)  # a redrive is immediate
_MARKERS = frozenset({REDRIVES_HEADER, REDRIVE_HEADER, LETTER_HEADER})
# kombu sets these for each publish.
_TRANSPORT_PROPERTIES = (
    "delivery_info",
    "delivery_tag",
    "body_encoding",
    "content_type",
    "content_encoding",
    "application_headers",
    "expiration",  # that time to live was the first publish's
)

_quoted = json.JSONEncoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOptions:
    """The options of a redrive.

    Attributes:
        rate: At most this many letters per second; ``None`` for no limit.
        limit: At most this many letters; ``None`` for all.
        to_queue: Publish to this queue; ``None`` for each message's own.
        delay_seconds: Seconds before the messages may run.
        new_id: Give each task a new id.
        keep_count: Count earlier deliveries: a message is executed once more, then as often
            as its ``max_deliveries`` has left.
    """

    rate: float | None = None
    limit: int | None = None
    to_queue: str | None = None
    delay_seconds: float = 0.0
    new_id: bool = False
    keep_count: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise DLQError(f"expected rate to be more than 0 letters a second, got {self.rate}")
        if self.limit is not None and self.limit < 1:
            raise DLQError(f"expected limit to be 1 or more, got {self.limit}")
        if not 0 <= self.delay_seconds < float("inf"):
            raise DLQError(f"expected delay to be 0 seconds or more, got {self.delay_seconds}")
        if self.to_queue is not None and not self.to_queue.strip():
            raise DLQError(f"expected to_queue to be the name of a queue, got {self.to_queue!r}")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of the options that differ from their defaults."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A message that is about to be published.

    Attributes:
        letter_id: Id of its letter.
        task_id: Task id under which it will run.
        redrives: Number of its redrives, this one included.
        queue: The queue to publish to.
        body: The original bytes.
        content_type: Content type of the body.
        content_encoding: Content encoding of the body.
        headers: The original headers with our markers, without those of the broker.
        properties: The original properties, without those that kombu sets.
        headers_text: The headers as JSON text if the letter's text could be kept, which is
            faster than making it; empty if not, or once the headers are changed.
    """

    letter_id: str
    task_id: str
    redrives: int
    queue: str
    body: bytes
    content_type: str
    content_encoding: str
    headers: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    headers_text: str = ""


def outgoing(
    found: RawEntry, options: RedriveOptions, *, redrive_id: str, now: datetime
) -> Outgoing:
    """The message of a letter.

    Body bytes, id, callbacks, chain, chord and group are the original's. Deliveries and
    retries are counted from 0 again; marker headers name the redrive and the letter.

    Raises:
        CorruptLetter: The letter cannot be read.
        RedriveError: An option cannot be applied to this message.
    """
    raw = found.fields
    if not found.is_letter:
        raise CorruptLetter(f"the entry at {found.position} is not a dead letter")
    try:
        text = raw.get(b"headers", b"{}")
        headers, kept = _clean(text)
        properties = _json(raw.get(b"properties", b"{}"))
        for name in _TRANSPORT_PROPERTIES:
            properties.pop(name, None)
        if None in properties.values():
            properties = {name: value for name, value in properties.items() if value is not None}
        redrives = int(raw.get(b"redrives", b"0")) + 1
        expires = raw.get(b"expires")
        if expires is not None and "expires" in headers and from_micros(int(expires)) <= now:
            headers["expires"], kept = None, False  # else the worker would discard it as expired
    except (ValueError, TypeError, AttributeError, OverflowError) as exc:
        raise CorruptLetter(f"the dead letter at {found.position} cannot be read: {exc!r}") from exc
    letter_id, task_id = found.key, found.text("task_id")
    queue = options.to_queue or found.text("source_queue")
    if not queue:
        raise RedriveError(
            f"letter {letter_id} does not name its source queue, because the message it was "
            f"adopted from did not; choose a queue to redrive to"
        )
    if options.delay_seconds:
        _delay(headers, letter_id, now + timedelta(seconds=options.delay_seconds))
    if options.new_id:
        task_id = _rename(headers, properties, letter_id)
    if options.delay_seconds or options.new_id or not headers.keys().isdisjoint(_MARKERS):
        kept = False
    headers[REDRIVES_HEADER] = redrives
    headers[REDRIVE_HEADER] = redrive_id
    headers[LETTER_HEADER] = letter_id
    return Outgoing(
        letter_id=letter_id,
        task_id=task_id,
        redrives=redrives,
        queue=queue,
        body=raw.get(b"body", b""),
        content_type=found.text("content_type") or "application/octet-stream",
        content_encoding=found.text("content_encoding") or "binary",
        headers=headers,
        properties=properties,
        headers_text=_marked(text, redrives, redrive_id, letter_id) if kept else "",
    )


def _json(raw: bytes) -> dict[str, Any]:
    text = raw.decode("utf-8", "replace")
    # Only text with type tags needs our codec, which is slower.
    value = json_codec.loads(text) if "__type__" in text else json.loads(text)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(type(value))
    return value


def _clean(text: bytes) -> tuple[dict[str, Any], bool]:
    """The headers without what is wrong in another delivery; True if that is their text, too."""
    cleaned = _json(text)
    before = len(cleaned)
    for name in _STALE:
        cleaned.pop(name, None)
    if b'"x-' in text:
        for name in [name for name in cleaned if name.startswith(_STALE_PREFIXES)]:
            del cleaned[name]
    # Text with type tags is not kombu's: its tags differ from ours.
    kept = 0 < before == len(cleaned) and b"__type__" not in text and text.isascii()
    if "retries" in cleaned:
        kept = kept and type(cleaned["retries"]) is int and cleaned["retries"] == 0
        cleaned["retries"] = 0
    if cleaned.get("eta") is not None:
        cleaned["eta"], kept = None, False
    return cleaned, kept


def _marked(text: bytes, redrives: int, redrive_id: str, letter_id: str) -> str:
    """JSON text of headers, not empty, with our markers added."""
    return (
        f'{text.decode().rstrip()[:-1]}, "{REDRIVES_HEADER}": {redrives}, '
        f'"{REDRIVE_HEADER}": {_quoted(redrive_id)}, "{LETTER_HEADER}": {_quoted(letter_id)}}}'
    )


def _delay(headers: dict[str, Any], letter_id: str, eta: datetime) -> None:
    if "task" not in headers:
        raise RedriveError(
            f"letter {letter_id} cannot be delayed, because its message has no task header "
            f"(protocol 2); redrive it without the delay"
        )
    headers["eta"] = eta.isoformat()


def _rename(headers: dict[str, Any], properties: dict[str, Any], letter_id: str) -> str:
    old, new = headers.get("id"), str(uuid4())
    if old is None:
        raise RedriveError(
            f"letter {letter_id} cannot get a new id, because its message has no id header "
            f"(protocol 2); redrive it with its old id"
        )
    headers["id"] = new
    if headers.get("root_id") == old:
        headers["root_id"] = new
    if "correlation_id" in properties:
        properties["correlation_id"] = new
    return new
