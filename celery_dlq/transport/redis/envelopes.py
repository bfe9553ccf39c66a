"""List entries as kombu's Redis transport writes them: what a redrive publishes in one script.

Source: ``Channel._put`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from uuid import uuid4

import kombu
import redis
from kombu.entity import maybe_delivery_mode
from kombu.messaging import Producer
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import JSONEncoder

from celery_dlq.transport.redis.entries import end_of_list, priority_of

_encode = JSONEncoder().encode  # kombu's `dumps` makes an encoder for each text

# The channels whose way to write a message `Envelopes` knows; one of one's own may have another.
_OF_KOMBU = (kombu_redis.Channel, kombu_redis.SentinelChannel)
_TAGS_AT_ONCE = 0x1000
# Equal ones are written alike; 0.0 and -0.0 are not, nor a time in two zones. Others have no hash.
_WITH_ONE_TEXT = frozenset({str, int, bool, type(None)})


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
        self._client = redis.Redis(connection_pool=self._channel.pool)
        self.database = int(self._client.get_connection_kwargs().get("db") or 0)  # the broker's
        self._tags = _random_tags()
        self._end = lru_cache(maxsize=1024, typed=True)(self._new_end)
        self._list_key = lru_cache(maxsize=1024)(self._new_list_key)

    @staticmethod
    def supported(producer: Any) -> bool:
        """Return True if nothing but kombu's Redis transport writes what is published.

        A producer or channel of one's own may override how a message is written.
        """
        return (
            type(producer.channel) in _OF_KOMBU
            and type(producer).publish is Producer.publish
            and not producer.compression
            and type(producer.channel.codecs.get("base64")) is virtual.Base64
        )

    def reaches(self, key: str) -> bool:
        """Return True if the broker's database has a key, without the broker's prefix."""
        return bool(self._client.exists(key))

    @staticmethod
    def expires(queue: Any) -> bool:
        """Return True if a queue expires, which every publish puts off; new in kombu 5.6."""
        ends = bool(queue.expires or "x-expires" in (queue.queue_arguments or ()))
        return ends and kombu.VERSION >= (5, 6)

    def list_key(self, queue: str, priority: object) -> bytes:
        """Return the key of a queue's list for a priority, with the broker's prefix."""
        known = isinstance(priority, (int, float, str))  # else kombu takes the default
        return self._list_key(queue, priority if known else None)

    def entry_text(
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
            body_json = f'"{b2a_base64(body, newline=False).decode("ascii")}"'  # without escapes
        else:
            body_text, encoding = channel.encode_body(body, encoding)
            body_json = _encode(body_text)
        headers_json = headers if isinstance(headers, str) else _encode(headers)
        others = dict(properties)
        own = f'"delivery_tag": "{next(self._tags)}"'
        if "correlation_id" in others:
            own += f', "correlation_id": {_encode(others.pop("correlation_id"))}'
        shared = (queue, content_type, content_encoding, encoding, tuple(others), *others.values())
        same = _WITH_ONE_TEXT.issuperset(map(type, others.values()))
        end = self._end(*shared) if same else self._new_end(*shared)
        return f'{{"body": {body_json}, "headers": {headers_json}, "properties": {{{own}, {end}'

    def push_entry(self, queue: str, priority: object, entry: bytes) -> None:
        """Write an entry as it is."""
        self._client.lpush(self.list_key(queue, priority), entry)

    def _new_end(self, *shared: Any) -> str:
        """Return the end of an entry, which many messages share."""
        queue, content_type, content_encoding, encoding, names, *values = shared
        given = dict(zip(names, values, strict=True))
        mode = given.get("delivery_mode")
        if type(mode) is not int or not mode:
            mode = maybe_delivery_mode(mode or self._producer.exchange.delivery_mode)
        properties = {
            **given,
            "delivery_mode": mode,
            "priority": given.get("priority") or self._channel.default_priority,
            "body_encoding": encoding,
            "delivery_info": {"exchange": "", "routing_key": queue},
        }
        end = {"content-encoding": content_encoding, "content-type": content_type}
        return f"{_encode(properties)[1:]}, {_encode(end)[1:]}"

    def _new_list_key(self, queue: str, priority: object) -> bytes:
        channel = self._channel
        message = {"properties": {"priority": priority}}
        step = priority_of(channel, message)
        key: str = channel.global_keyprefix + queue + end_of_list(channel, step)
        return key.encode()


def _random_tags() -> Iterator[str]:
    """Texts like those of random UUIDs, as kombu's: a random beginning, and a number."""
    while True:
        tag = str(uuid4())
        for number in range(_TAGS_AT_ONCE):
            yield f"{tag[:-3]}{number:03x}"
