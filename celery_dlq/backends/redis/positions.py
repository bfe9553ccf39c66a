"""Positions in Redis, of letters in queues on the broker: the order in which they were stored."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from celery_dlq.backends.base import MessageKey, ordered
from celery_dlq.backends.redis.claims import RedisClaims
from celery_dlq.backends.redis.connect import now, translated
from celery_dlq.backends.redis.exports import RedisExports
from celery_dlq.backends.redis.keys import Keys, spelled
from celery_dlq.backends.redis.overviews import RedisOverviews
from celery_dlq.backends.redis.redriven import RedrivenMessages
from celery_dlq.backends.redis.scripts import Scripts

PATIENCE_SECONDS = 600.0
"""A letter that has a position and is not in its queue yet is waited for this long."""

_GIVEN_AGAIN_SECONDS = 300.0  # a letter that is stored again keeps its position for so long
_LAST_OF_A_MILLISECOND = 10**9  # more letters than any queue gets in one


class PositionIndex:
    """What Redis keeps of queues whose letters are elsewhere: all but the letters.

    A letter gets its position before it is put into its queue. Several workers put theirs at
    once, so the queue is known to have all letters only up to the first that is still on its
    way: this is what `settled` says, and what an export reads up to.

    Args:
        client: A redis-py client that answers bytes.
        url: For messages; its password is never shown.
        keys: Key names.
        ttl_seconds: How long late copies of a dead-lettered message are known to be dead.

    Attributes:
        claims: Which operation may redrive or purge a letter.
        exports: How far queues are exported.
        overviews: Names of queues, and how many letters they got lately.
        redriven: What became of redriven messages.
    """

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float = 72 * 3600.0) -> None:
        self.claims = RedisClaims(client, url, keys)
        self.exports = RedisExports(client, url, keys)
        self.overviews = RedisOverviews(client, url, keys)
        self.redriven = RedrivenMessages(client, url, keys, ttl_seconds)
        self._client = client
        self._url = url
        self._keys = keys
        self._ttl_millis = int(ttl_seconds * 1000)
        self._scripts = Scripts.on(client)

    def check(self) -> None:
        """Ask for a heartbeat."""
        with translated(self._url):
            self._client.ping()

    def now(self) -> datetime:
        """The clock of Redis."""
        return now(self._client, self._url)

    def place(self, dead_letter_queue: str, letter_id: str) -> str:
        """Give a letter its position."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            # The name first: a letter in a queue that no list shows would be lost to people.
            self._client.sadd(keys.queues(), spelled(name))
            position = self._scripts.place(
                keys=[keys.last(name), keys.placing(name), keys.claims(name)],
                args=[spelled(letter_id), int(_GIVEN_AGAIN_SECONDS * 1000)],
            )
        return str(position.decode())

    def placed(self, dead_letter_queue: str, letter_id: str, key: MessageKey) -> None:
        """Note that a letter is in its queue, and forget the message's counters."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            self._scripts.placed(
                keys=[keys.placing(name), keys.arrivals(name), keys.run(key)],
                args=[spelled(letter_id), key.retries, self._ttl_millis],
            )

    def last(self, dead_letter_queue: str) -> str | None:
        """The newest position that was given; ``None``: none ever was."""
        return self._positions(dead_letter_queue)[0]

    def settled(self, dead_letter_queue: str) -> str | None:
        """The position up to which no letter is still on its way."""
        last, placing, at = self._positions(dead_letter_queue)
        if last is None:
            return None
        oldest = (at - PATIENCE_SECONDS) * 1000
        waited = sorted(ordered(text) for text in placing if ordered(text)[0] > oldest)
        if not waited:
            return last
        first, second = waited[0]
        return f"{first}-{second - 1}" if second else f"{first - 1}-{_LAST_OF_A_MILLISECOND}"

    def state(self, dead_letter_queue: str) -> object:
        """A value that changes whenever a letter is stored."""
        last, placing, _at = self._positions(dead_letter_queue)
        return last, sorted(placing)

    def close(self) -> None:
        """Disconnect."""
        with suppress(Exception):
            self._client.close()

    def _positions(self, dead_letter_queue: str) -> tuple[str | None, list[str], float]:
        with translated(self._url):
            pipe = self._client.pipeline(transaction=True)
            pipe.get(self._keys.last(dead_letter_queue))
            pipe.hvals(self._keys.placing(dead_letter_queue))
            pipe.time()
            last, placing, (seconds, micros) = pipe.execute()
        texts = [text.decode() for text in placing]
        return (None if last is None else last.decode()), texts, seconds + micros / 1e6
