"""Entries of Redis lists: what is restored, and what kombu's classes are taken for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str

from celery_dlq.transport.redis.broker import Broker
from celery_dlq.transport.redis.entries import (
    FetchedEntry,
    lists_of,
    recorded,
    redelivered,
    tag_end,
)

DELIVERY = {"exchange": "", "routing_key": "orders"}
ENVELOPE: dict[str, Any] = {"body": "W10=", "properties": {"delivery_info": DELIVERY}}


def decode_body(body: str, encoding: str | None) -> Any:
    return virtual.base.Base64().decode(body) if encoding else body


@pytest.mark.parametrize(
    "entry",
    [
        b"no json",
        b"\xff",
        b"[" * 100_000,
        b'{"properties": {"__type__": "datetime", "__value__": 5}}',
        json.dumps({**ENVELOPE, "headers": "text"}).encode(),
        json.dumps({"body": "W1s", "properties": {**ENVELOPE["properties"], "body_encoding": "x"}})
        .encode()
        .ljust(200),
    ],
)
def test_an_entry_that_is_no_message_is_restored_byte_for_byte(entry: bytes) -> None:
    """So that it is the same letter when it comes again."""
    assert redelivered(entry, decode_body) == (entry, None)


@pytest.mark.parametrize("headers", [None, {}, {"id": "x"}, [], ""])
def test_a_restored_message_is_marked_and_keeps_its_identity(headers: Any) -> None:
    """Even without headers, where kombu loses it; and without an id of its own."""
    entry = json.dumps({**ENVELOPE, "headers": headers}).encode()
    again, envelope = redelivered(entry, decode_body)
    assert envelope["properties"]["delivery_info"]["redelivered"] is True
    tags = [
        FetchedEntry(raw, "tag", "orders")["properties"]["delivery_tag"] for raw in (entry, again)
    ]
    assert tags[0] == tags[1]
    assert not headers or envelope["headers"]["redelivered"] is True


def test_what_is_no_utf_8_is_read_and_restored_as_kombu_does() -> None:
    """With a sign in its place; kombu's workers restore the record in the same way."""
    entry = json.dumps({**ENVELOPE, "headers": {"x": "NOTE"}}).encode().replace(b"NOTE", b"a\xff")
    assert FetchedEntry(entry, "tag", "orders")["headers"] == {"x": "a\N{REPLACEMENT CHARACTER}"}
    again, _envelope = redelivered(entry, decode_body)
    assert json.loads(again)["headers"] == {"x": "a\N{REPLACEMENT CHARACTER}", "redelivered": True}
    assert json.loads(bytes_to_str(b"[" + entry + b',"","orders"]'))[0]["headers"]["x"] == "a\ufffd"


def test_a_record_gives_back_the_entry_whatever_it_is() -> None:
    """Also one that looks like the end of a record."""
    for entry in (b"", b"x", b'{},"","admin"],["x"', b"\x00"):
        assert recorded(b"[" + entry + b',"","or\\"ders"]') == (entry, 'or"ders')
    assert recorded(b'[{"a": 1}, "", "orders"]') is None


def test_an_infinite_priority_is_restored_to_some_list() -> None:
    """Kombu cannot say which."""
    priority = partial(virtual.Channel._get_message_priority, _Steps(), reverse=False)
    broker = Broker(
        client=None,
        url="",
        unacked="u",
        index="i",
        prefix="p:",
        sep=":",
        steps=[0, 3],
        priority_of=priority,
        decode_body=decode_body,
    )
    tag = f"tag{broker.tag_end}"
    assert broker.list_of("orders", {"properties": {"priority": float("inf")}}, tag) == "p:orders"
    assert broker.list_of("orders", {"properties": {"priority": 5}}, tag) == "p:orders:3"


@pytest.mark.parametrize(
    ("sep", "steps"), [(kombu_redis.Channel.sep, (0, 3, 6, 9)), (":", [0]), ('-["\x00é', [3, 6])]
)
def test_a_tag_tells_which_lists_its_app_has(sep: str, steps: Sequence[int]) -> None:
    """With kombu's usual ones it ends with nothing, in every version of kombu."""
    end = tag_end(sep, steps)
    assert lists_of(f"0f-00{end}") == (sep, list(steps))
    assert (end == "") == (sep == "\x06\x16")


class _Steps:
    default_priority, min_priority, max_priority = 0, 0, 9


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (kombu_redis.Channel._do_restore_message, ["payload", "exchange", "routing_key", "pipe"]),
        (kombu_redis.QoS.restore_by_tag, ["tag", "client", "leftmost"]),
        (kombu_redis.MultiChannelPoller.handle_event, ["fileno", "event"]),
        (virtual.Channel.decode_body, ["body", "encoding"]),
        (virtual.Channel.encode_body, ["body", "encoding"]),
        (virtual.Channel._get_message_priority, ["message", "reverse"]),
    ],
)
def test_kombus_methods_are_as_we_call_them(function: Any, expected: list[str]) -> None:
    """Names and arguments of what is overridden or called."""
    found = list(inspect.signature(function).parameters)
    assert found[1 : len(expected) + 1] == expected
