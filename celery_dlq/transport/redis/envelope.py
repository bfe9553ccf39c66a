"""What kombu's Redis transport writes for a message: the key of a list, and its entry."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any
from uuid import uuid4

import redis
from kombu.messaging import Producer
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import JSONEncoder

# Steps of `Producer.publish` and `Channel.basic_publish` that `Envelopes` does by itself.
_STEPS = (
    "basic_publish",
    "prepare_message",
    "_inplace_augment_message",
    "_next_delivery_tag",
    "_put",
)
_TAGS_AT_ONCE = 0x1000
_encode = JSONEncoder().encode  # as kombu's `dumps`, which makes an encoder for each text


class Envelopes:
    """Makes the entries that a producer of kombu's Redis transport would write.

    A message published to the default exchange is one entry of one list: JSON text with the body,
    headers and properties. Making it without the producer takes a third of the time, and it can
    be written by a script.

    Source: ``Channel._put`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
    """

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._channel = producer.channel
        self._tags = _tags()
        self._rest = lru_cache(maxsize=1024)(self._new_rest)
        self._list_key = lru_cache(maxsize=1024)(self._new_list_key)

    @staticmethod
    def supported(producer: Any) -> bool:
        """Return True if nothing but kombu's Redis transport writes what is published.

        A producer or channel of one's own may override how a message is written.
        """
        kind, own = type(producer.channel), kombu_redis.Channel
        return (
            issubclass(kind, own)
            and all(getattr(kind, step) is getattr(own, step) for step in _STEPS)
            and type(producer).publish is Producer.publish
            and not producer.compression
            and type(producer.channel.codecs.get("base64")) is virtual.Base64
        )

    def reaches(self, key: str) -> bool:
        """Return True if the broker's database has a key, without the broker's prefix."""
        client = redis.Redis(connection_pool=self._channel.pool)
        return bool(client.exists(key))

    def expires(self, queue: str) -> bool:
        """Return True if a declared queue expires, which every publish would put off."""
        return queue in getattr(self._channel, "_expires", ())  # new in kombu 5.6

    def list_key(self, queue: str, priority: object) -> bytes:
        """Return the key of a queue's list for a priority, with the broker's prefix."""
        known = isinstance(priority, (int, float, str))  # else kombu takes the default
        return self._list_key(queue, priority if known else None)

    def text(
        self,
        body: bytes,
        *,
        queue: str,
        content_type: str,
        content_encoding: str,
        headers: Mapping[str, Any] | str,
        properties: Mapping[str, Any],
    ) -> str:
        """Return the entry for a message."""
        channel = self._channel
        encoding = channel.body_encoding
        if encoding == "base64":  # as `supported` knows, kombu's, which takes twice the time
            body_text = b2a_base64(body, newline=False).decode("ascii")
        else:
            body_text, encoding = channel.encode_body(body, encoding)
        mode = properties.get("delivery_mode")
        if type(mode) is not int or not mode:
            _, mode = self._producer._delivery_details(self._producer.exchange, mode)  # noqa: SLF001
        properties = {
            **properties,
            "delivery_mode": mode,
            "priority": properties.get("priority") or channel.default_priority,
            "delivery_tag": next(self._tags),
        }
        # Base64 needs no escapes, and the body is most of the text.
        body_json = f'"{body_text}"' if encoding == "base64" else _encode(body_text)
        headers_json = headers if isinstance(headers, str) else _encode(headers)
        own = ", ".join(
            [
                f"{_quoted(name)}: {_quoted(value) if type(value) is str else _json(value)}"
                for name, value in properties.items()
            ]
        )
        rest = self._rest(queue, content_type, content_encoding, encoding)
        return f'{{"body": {body_json}, "headers": {headers_json}, "properties": {{{own}, {rest}'

    def push(self, queue: str, priority: object, entry: bytes) -> None:
        """Write an entry as it is."""
        redis.Redis(connection_pool=self._channel.pool).lpush(self.list_key(queue, priority), entry)

    @staticmethod
    def _new_rest(queue: str, content_type: str, content_encoding: str, encoding: str) -> str:
        """Return the end of an entry, which many messages share."""
        shared = {
            "body_encoding": encoding,
            "delivery_info": {"exchange": "", "routing_key": queue},
        }
        end = {"content-encoding": content_encoding, "content-type": content_type}
        return f"{_encode(shared)[1:]}, {_encode(end)[1:]}"

    def _new_list_key(self, queue: str, priority: object) -> bytes:
        channel = self._channel
        message = {"properties": {"priority": priority}}
        step = channel._get_message_priority(message, reverse=False)  # noqa: SLF001
        key: str = channel.global_keyprefix + channel._q_for_pri(queue, step)  # noqa: SLF001
        return key.encode()


def _json(value: object) -> str:
    """Return a property as JSON text, without an encoder if it is a number."""
    return str(value) if type(value) is int else _encode(value)


def _tags() -> Iterator[str]:
    """Texts like those of random UUIDs, as kombu's: a random beginning, and a number."""
    while True:
        tag = str(uuid4())
        for number in range(_TAGS_AT_ONCE):
            yield f"{tag[:-3]}{number:03x}"
