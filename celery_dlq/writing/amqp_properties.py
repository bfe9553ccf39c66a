"""AMQP properties that py-amqp cannot read: its error would end every worker, one after another.

RabbitMQ takes any bytes for a text, a timestamp in milliseconds and a table of any depth. py-amqp
fails on them while it reads a frame: Celery takes that for an error of its own and ends, RabbitMQ
redelivers the message, and the next worker ends. Read leniently, it is a message like any other,
and is dropped where its content cannot be used; see `celery_dlq.worker.dropped`.

Source: ``decode_properties_basic`` in
https://github.com/celery/py-amqp/blob/main/amqp/serialization.py
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from struct import unpack_from
from typing import Any

from amqp import serialization  # type: ignore[import-untyped]
from amqp.spec import Basic  # type: ignore[import-untyped]

UNREADABLE_HEADERS = "dlq_unreadable_headers"
"""Header that stands for headers which cannot be read: their bytes, in AMQP's encoding."""

_NUMBERS = {"delivery_mode": ">B", "priority": ">B", "timestamp": ">Q"}
_PROPERTIES = (
    "content_type",
    "content_encoding",
    "application_headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In AMQP's order; the first bit of the flags is the first one's."""


def read_leniently() -> None:
    """Let py-amqp read any properties, in this process; a second call changes nothing."""
    strict = serialization.PROPERTY_CLASSES[Basic.CLASS_ID]
    if hasattr(strict, "dlq_strict"):
        return

    @wraps(strict)
    def decode(buf: bytes, offset: int) -> tuple[dict[str, Any], int]:
        try:
            properties, end = strict(buf, offset)
        except Exception:  # noqa: BLE001 - whatever the reader of a value raises
            return _lenient(bytes(buf), offset)
        return properties, end

    decode.dlq_strict = strict  # type: ignore[attr-defined]
    serialization.PROPERTY_CLASSES[Basic.CLASS_ID] = decode


def are_unreadable(headers: object) -> bool:
    """True for headers in place of which `UNREADABLE_HEADERS` stands."""
    return isinstance(headers, Mapping) and UNREADABLE_HEADERS in headers


def _lenient(buf: bytes, offset: int) -> tuple[dict[str, Any], int]:
    """Read properties; a text that is not UTF-8 stays bytes, as py-amqp does it in headers."""
    properties: dict[str, Any] = {}
    (flags,) = unpack_from(">H", buf, offset)
    offset += 2
    for place, name in enumerate(_PROPERTIES):
        if not flags & (0x8000 >> place):
            continue
        if name == "application_headers":
            end = offset + 4 + unpack_from(">I", buf, offset)[0]
            properties[name] = _headers(buf[offset:end])
        elif name in _NUMBERS:
            (properties[name],) = unpack_from(_NUMBERS[name], buf, offset)
            end = offset + (8 if name == "timestamp" else 1)
        else:
            end = offset + 1 + buf[offset]
            properties[name] = _text(buf[offset + 1 : end])
        offset = end
    return properties, offset


def _headers(table: bytes) -> dict[str, Any]:
    try:
        (headers,), _end = serialization.loads("F", table, 0)
    except Exception:  # noqa: BLE001 - as above
        return {UNREADABLE_HEADERS: table}
    return dict(headers)


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
