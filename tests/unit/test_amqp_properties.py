"""AMQP properties that py-amqp cannot read."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import amqp
import pytest
from amqp import serialization
from amqp.spec import Basic

from celery_dlq.letters.headers import UNREADABLE_HEADERS
from celery_dlq.transport.amqp import read_leniently
from celery_dlq.worker.dropped import are_unreadable

ALL = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "application_headers": {"task": "shop.charge", "when": datetime(2026, 1, 1), "n": [1, b"\xff"]},  # noqa: DTZ001
    "delivery_mode": 2,
    "priority": 5,
    "correlation_id": "id",
    "reply_to": "reply",
    "expiration": "1000",
    "message_id": "message",
    "timestamp": 1_700_000_000,
    "type": "type",
    "user_id": "guest",
    "app_id": "app",
    "cluster_id": "cluster",
}


@pytest.fixture(autouse=True)
def strict() -> Iterator[Any]:
    """Read leniently in this test only; gives py-amqp's own reader, also where a worker ran."""
    before = serialization.PROPERTY_CLASSES[Basic.CLASS_ID]
    strict = inspect.unwrap(before)
    serialization.PROPERTY_CLASSES[Basic.CLASS_ID] = strict
    read_leniently()
    read_leniently()
    yield strict
    serialization.PROPERTY_CLASSES[Basic.CLASS_ID] = before


def received(properties: bytes) -> dict[str, Any]:
    """Let py-amqp read them as it reads a frame."""
    message = amqp.Message()
    message.inbound_header(struct.pack(">HxxQ", Basic.CLASS_ID, 0) + properties)
    return dict(message.properties)


@pytest.mark.parametrize("left_out", [None, *ALL])
def test_all_that_can_be_read_is_read_as_before(strict: Any, left_out: str | None) -> None:
    """Also beside a text that cannot be read."""
    properties = {name: value for name, value in ALL.items() if name != left_out}
    raw = amqp.Message(**properties)._serialize_properties()
    assert received(raw) == strict(raw, 0)[0] == properties
    if left_out != "cluster_id":
        broken = raw.replace(b"\x07cluster", b"\x07clu\xfeter")
        with pytest.raises(UnicodeDecodeError):
            strict(broken, 0)
        assert received(broken) == {**properties, "cluster_id": b"clu\xfeter"}


@pytest.mark.parametrize(
    "entry",
    [
        b"T" + struct.pack(">Q", 1_700_000_000_000),
        b"T" + struct.pack(">Q", 2**64 - 1),
        b"?",
    ],
    ids=["milliseconds", "the largest time", "unknown type"],
)
def test_headers_that_cannot_be_read_are_kept_as_bytes(strict: Any, entry: bytes) -> None:
    """What follows them is read, and they can be published again."""
    table = b"\x01n" + entry
    table = struct.pack(">I", len(table)) + table
    raw = struct.pack(">H", 0x2000 | 0x0400) + table + b"\x02id"

    properties = received(raw)

    assert properties == {
        "application_headers": {UNREADABLE_HEADERS: table},
        "correlation_id": "id",
    }
    assert are_unreadable(properties["application_headers"])
    again = amqp.Message(**properties)._serialize_properties()
    kept = received(again)["application_headers"][UNREADABLE_HEADERS]
    assert (kept if isinstance(kept, bytes) else kept.encode()) == table  # text if it is UTF-8


@pytest.mark.parametrize("headers", [None, {}, {"task": "shop.charge"}])
def test_headers_that_can_be_read_are_not_called_unreadable(headers: Any) -> None:
    """Nor are headers that are missing."""
    assert not are_unreadable(headers)
