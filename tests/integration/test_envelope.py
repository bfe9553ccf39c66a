"""What a redrive in one step writes is what the installed kombu writes for the same message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pytest
from builders import an_app
from kombu import Queue
from kombu.transport import virtual
from kombu.transport.redis import Channel
from servers import RedisServer

from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.operations.redrive.publisher import Publisher, PublishResult
from celery_dlq.transport.redis.envelopes import Envelopes

Make = Callable[..., Publisher]

HEADERS = {
    "lang": "py",
    "task": "shop.charge",
    "id": "0f9f2b1e",
    "retries": 0,
    "eta": None,
    "timelimit": [None, 1.5],
    "tenant": "Größe ☃ \U0001f600",
    "stamps": {"a": ["b"]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A broker."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def publisher(server: RedisServer) -> Iterator[Make]:
    """Makes publishers to an empty broker, with transport options."""
    server.client().flushall()
    with ExitStack() as stack:

        def make(queues: tuple[Queue, ...] = (), **options: Any) -> Publisher:
            app = an_app(
                broker_url=server.url, broker_transport_options=options, task_queues=queues
            )
            return stack.enter_context(closing(Publisher(app)))

        yield make


def message(**changes: Any) -> Outgoing:
    """A message to redrive."""
    values: dict[str, Any] = {
        "letter_id": "letter",
        "task_id": "0f9f2b1e",
        "redrives": 1,
        "queue": "orders",
        "body": b'[["Gr\xc3\xb6\xc3\x9fe"], {}, {}]',
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "own_headers": dict(HEADERS),
        "properties": {"correlation_id": "0f9f2b1e", "reply_to": "me", "priority": 3},
    }
    return Outgoing(**{**values, **changes})


@lru_cache(maxsize=1)
def envelopes_of(publisher: Publisher) -> Envelopes:
    """What makes the entries; one for a publisher, as in a redrive, with what it keeps."""
    found = publisher.envelopes()
    assert found is not None
    return found


def ours(publisher: Publisher, sent: Outgoing) -> tuple[bytes, Any]:
    """The list and the entry that a redrive in one step writes, without the delivery tag."""
    envelopes = envelopes_of(publisher)
    text = envelopes.entry_text(
        sent.body,
        queue=sent.queue,
        content_type=sent.content_type,
        content_encoding=sent.content_encoding,
        headers=sent.headers_text or sent.headers,
        properties=sent.properties,
    )
    return envelopes.list_key(sent.queue, sent.properties.get("priority")), _untagged(text)


def kombus(server: RedisServer, publisher: Publisher, sent: Outgoing) -> tuple[bytes, Any]:
    """The same of kombu's own publish."""
    result = PublishResult()
    publisher.publish([sent], result)
    assert result.confirmed == [sent.letter_id], result
    client = server.client()
    (key,) = client.scan_iter(_type="list")
    (entry,) = client.lrange(key, 0, -1)
    return key, _untagged(entry)


def _untagged(text: str | bytes) -> Any:
    found = json.loads(text)
    tag = found["properties"].pop("delivery_tag")
    assert len(tag) == 36
    assert tag[14] == "4"
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"properties": {}},
        {"properties": {"delivery_mode": 1, "priority": 9, "type": "t", "timestamp": 12}},
        {"properties": {"delivery_mode": "transient", "priority": "5", "app_id": "a"}},
        {"properties": {"nested": {"a": [1, None]}, "half": 0.5, "on": True, 'q"': 'ö"\\'}},
        {"properties": {"priority": True}},
        {"properties": {"priority": -7}},
        {"properties": {"priority": 2.9}},
        {"properties": {"priority": ["odd"]}},
        {"own_headers": {}},
        {"own_headers": {"raw": b"\xff\x00", "text": b"text"}},
        {"headers_text": json.dumps(HEADERS)},
        {"body": b"\x80\x04N.", "content_type": "application/x-python-serialize"},
        {"body": b"\xff", "content_type": "application/data", "content_encoding": "binary"},
        {"body": b""},
        {"queue": "größe"},
    ],
)
def test_an_entry_is_that_of_kombu(
    server: RedisServer, publisher: Make, changes: dict[str, Any]
) -> None:
    """Every field of the envelope, and the key of the list with the step of the priority."""
    made = publisher()
    assert ours(made, message(**changes)) == kombus(server, made, message(**changes))


@pytest.mark.parametrize(
    "options",
    [
        {"global_keyprefix": "shop:"},
        {"sep": ":"},
        {"priority_steps": [0, 2, 4, 5]},
        {"queue_order_strategy": "priority", "priority_steps": list(range(10)), "sep": "/"},
        {"body_encoding": "utf-8"},
    ],
)
def test_options_of_the_transport_are_followed(
    server: RedisServer, publisher: Make, options: dict[str, Any]
) -> None:
    """Prefix, separator, priority steps and the encoding of bodies are the broker's."""
    made = publisher(**options)
    sent = message(body=b"[[], {}, {}]")
    if options.get("body_encoding") == "utf-8":  # kombu writes bytes with a type tag
        sent = message(own_headers={}, body=b"text")
    assert ours(made, sent) == kombus(server, made, sent)


def test_every_entry_has_a_delivery_tag_of_its_own(publisher: Make) -> None:
    """Two messages with one tag would overwrite each other in ``unacked``."""
    envelopes = envelopes_of(publisher())
    arguments: dict[str, Any] = {
        "queue": "orders",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {},
        "properties": {},
    }
    texts = [envelopes.entry_text(b"[]", **arguments) for _ in range(1200)]
    assert len({json.loads(text)["properties"]["delivery_tag"] for text in texts}) == 1200


def test_equal_properties_of_other_types_are_other_entries(
    server: RedisServer, publisher: Make
) -> None:
    """What messages share is made once, and 1, 1.0 and true are equal."""
    made = publisher()
    texts = []
    for value in (1, True, 1.0):
        sent = message(properties={"correlation_id": "0f9f2b1e", "priority": value, "x": value})
        texts.append(json.dumps(ours(made, sent)[1]))
        assert texts[-1] == json.dumps(ours(made, sent)[1])
    assert len(set(texts)) == 3


def test_equal_properties_with_other_texts_are_other_entries(
    server: RedisServer, publisher: Make
) -> None:
    """0.0 equals -0.0, and a number or a time equals itself in another form."""
    made, noon = publisher(), datetime(2026, 3, 4, 12, tzinfo=timezone.utc)
    for value in (
        *(0.0, -0.0, Decimal("1.0"), Decimal("1.00")),
        *(noon, noon.astimezone(timezone(timedelta(hours=2)))),
    ):
        sent = message(properties={"x": value})
        (_, got), (_, expected) = ours(made, sent), kombus(server, made, sent)
        assert json.dumps(got["properties"]["x"]) == json.dumps(expected["properties"]["x"])
        server.client().flushall()


def test_a_queue_that_expires_is_known(publisher: Make) -> None:
    """Every publish puts off its end, which the script does not do."""
    made = publisher((Queue("short", expires=60), Queue("orders")))
    envelopes = envelopes_of(made)
    found = {queue.name: envelopes.expires(queue) for queue in made.declare({"short", "orders"})}
    is_put_off = hasattr(Channel, "_maybe_update_queues_expire")
    assert found == {"short": is_put_off, "orders": False}
    assert envelopes.expires(Queue("old", queue_arguments={"x-expires": 60})) is is_put_off


def test_a_channel_that_writes_in_its_own_way_is_left_alone(
    publisher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may encrypt, or count: then it publishes itself, whatever of kombu's it overrides."""

    class Own(Channel):  # type: ignore[misc,unused-ignore]
        """Writes in a way that nobody but its author knows."""

    made = publisher()
    assert made.envelopes() is not None
    monkeypatch.setattr(made.producer.channel, "__class__", Own)
    assert made.envelopes() is None


def test_a_codec_of_ones_own_is_left_alone(publisher: Make) -> None:
    """The body of an entry is made without the channel's codec only if it is kombu's."""

    class Own(virtual.Base64):  # type: ignore[misc,unused-ignore]
        """Compresses, or encrypts."""

    made = publisher()
    channel = made.producer.channel
    channel.codecs = {**channel.codecs, "base64": Own()}
    assert made.envelopes() is None


def test_the_databases_of_a_server_are_told_apart(server: RedisServer, publisher: Make) -> None:
    """A key is seen only in the broker's own database, whatever its prefix."""
    envelopes = envelopes_of(publisher(global_keyprefix="shop:"))
    client = server.client()
    client.set("marker", 1)
    assert envelopes.reaches("marker")
    client.flushall()
    client.execute_command("SELECT", 1)
    assert not envelopes.reaches("marker")
