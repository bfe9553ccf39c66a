"""The brokers of the fuzz: where messages are put, and what is left of them afterwards."""

from __future__ import annotations

import base64
import json
from typing import Any, Protocol

import amqp
import redis
from fuzz.app import QUEUE, TOKEN
from kombu import Connection
from kombu.exceptions import KombuError


class Place(Protocol):
    """The broker of one side."""

    url: str

    def allows(self, draft: dict[str, Any]) -> bool:
        """True if such a message can be in a queue of this broker, and read by kombu."""

    def publish(self, draft: dict[str, Any]) -> None:
        """Put a message into the queue."""

    def waiting(self) -> int:
        """Number of messages that are in the queue or unacknowledged."""

    def left(self) -> list[str]:
        """The tokens of all of them; on RabbitMQ only while no worker runs."""

    def clear(self) -> None:
        """Remove all messages."""


class RedisPlace:
    """Database 0 of a Redis.

    Args:
        url: Of that database.
    """

    sees_unacknowledged = True

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = redis.Redis.from_url(url)
        self._kombu = Connection(f"{url.rpartition('/')[0]}/3")

    def allows(self, draft: dict[str, Any]) -> bool:
        """Tried out in another database: kombu takes the entry and notes it as unacknowledged."""
        channel = self._kombu.default_channel
        try:
            message = channel.Message(json.loads(_entry(draft)), channel=channel)
            channel.qos.append(message, message.delivery_tag)
            channel.qos.ack(message.delivery_tag)
        except Exception:
            return False
        return True

    def publish(self, draft: dict[str, Any]) -> None:
        self._client.lpush(QUEUE, _entry(draft))

    def waiting(self) -> int:
        return sum(self._client.llen(key) for key in self._lists()) + self._client.hlen("unacked")

    def left(self) -> list[str]:
        """Also in other queues: one that comes back goes where its routing key says."""
        lists = self._client.scan_iter(_type="list")
        entries = [e for key in lists for e in self._client.lrange(key, 0, -1)]
        entries += self._client.hvals("unacked")
        return [_token(entry) for entry in entries]

    def clear(self) -> None:
        lists = [key for key in self._client.scan_iter(_type="list") if key[:4] != b"dlq:"]
        self._client.delete("unacked", "unacked_index", "unacked_mutex", *lists)

    def _lists(self) -> list[bytes]:
        """The queue, and those that kombu makes of it for priorities."""
        return [QUEUE.encode(), *self._client.keys(f"{QUEUE}\x06\x16*")]


class RabbitPlace:
    """A queue of RabbitMQ behind an exchange that takes every routing key.

    Args:
        url: Of the virtual host.
        port: The node's.
        kind: ``classic`` or ``quorum``.
    """

    sees_unacknowledged = False
    _EXCHANGE = "anything"
    _TRIAL = "trial"

    def __init__(self, url: str, port: int, vhost: str, kind: str) -> None:
        self.url = url
        self._where = {"host": f"127.0.0.1:{port}", "virtual_host": vhost}
        self._arguments = {"x-queue-type": "quorum"} if kind == "quorum" else {}
        with amqp.Connection(**self._where) as connection:
            channel = connection.channel()
            channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments=self._arguments)
            channel.exchange_declare(self._EXCHANGE, "fanout", auto_delete=False, durable=True)
            channel.queue_bind(QUEUE, self._EXCHANGE)

    def allows(self, draft: dict[str, Any]) -> bool:
        """Tried out in another queue: py-amqp can write it, and RabbitMQ does not close on us."""
        try:
            message, key = _amqp_message(draft)
            key.encode()
            with amqp.Connection(**self._where, confirm_publish=True) as connection:
                channel = connection.channel()
                channel.queue_declare(self._TRIAL, arguments={"x-max-length": 1})
                channel.basic_publish(message, "", self._TRIAL)
                return channel.basic_get(self._TRIAL, no_ack=True) is not None
        except Exception:
            return False

    def publish(self, draft: dict[str, Any]) -> None:
        with amqp.Connection(**self._where, confirm_publish=True) as connection:
            message, key = _amqp_message(draft)
            connection.channel().basic_publish(message, self._EXCHANGE, key)

    def waiting(self) -> int:
        with amqp.Connection(**self._where) as connection:
            return int(connection.channel().queue_declare(QUEUE, passive=True).message_count)

    def left(self) -> list[str]:
        found = []
        with amqp.Connection(**self._where) as connection:
            channel = connection.channel()
            while (message := channel.basic_get(QUEUE)) is not None:
                body = message.body if isinstance(message.body, bytes) else message.body.encode()
                found.append(_token(repr(message.properties).encode() + body))
        return found  # the connection's end gives them back

    def clear(self) -> None:
        with amqp.Connection(**self._where) as connection:
            connection.channel().queue_purge(QUEUE)


def _entry(draft: dict[str, Any]) -> str:
    body = draft.get("body")
    if isinstance(body, bytes):
        body = base64.b64encode(body).decode()
    return json.dumps({**draft, "body": body} if "body" in draft else draft)


def _amqp_message(draft: dict[str, Any]) -> tuple[amqp.Message, str]:
    """The message and its routing key.

    Raises:
        Exception: It cannot be said in AMQP.
    """
    if not isinstance(draft.get("body"), bytes) or not isinstance(draft["properties"], dict):
        raise KombuError("AMQP has no such message")
    if not isinstance(draft.get("headers", {}), dict):
        raise KombuError("AMQP has no such headers")
    properties = dict(draft["properties"])
    delivery = properties.pop("delivery_info", {})
    for name in ("body_encoding", "delivery_tag"):
        properties.pop(name, None)
    if not isinstance(delivery, dict) or delivery.get("exchange") != "":
        raise KombuError("AMQP has no such delivery")
    for draft_name, name in (
        ("content-type", "content_type"),
        ("content-encoding", "content_encoding"),
    ):
        if draft_name in draft:
            properties[name] = draft[draft_name]
    if "headers" in draft:
        properties["application_headers"] = draft["headers"]
    if None in properties.values():
        raise KombuError("AMQP has no null here")
    return amqp.Message(draft["body"], **properties), delivery.get("routing_key")


def _token(data: bytes) -> str:
    found = TOKEN.search(data.decode("latin-1"))
    return found[0] if found else "?"
