"""Positions, in Redis, of letters in queues on the broker: their order of storing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery_dlq.letters.record import DeadLetter, to_micros
from celery_dlq.store.base import MessageKey, ordered
from celery_dlq.store.claims import RedisClaims
from celery_dlq.store.connect import translated
from celery_dlq.store.exports import RedisExports
from celery_dlq.store.keys import Keys, spelled
from celery_dlq.store.overviews import RedisOverviews, release_text
from celery_dlq.store.part import RedisPart
from celery_dlq.store.redriven import RedrivenMessages
from celery_dlq.store.scripts import DeadLetterReply

PATIENCE_SECONDS = 600.0
"""Maximum wait for a letter that has a position and is not in its queue yet."""

_KEPT_SECONDS = 300.0  # a letter that is stored again within this time keeps its position
_MAX_PER_MILLISECOND = 10**9  # more letters than any queue gets in one


class PositionIndex(RedisPart):
    """State in Redis of queues whose letters are elsewhere.

    A letter gets its position before it is put into its queue. Several workers do so at once,
    so the queue is complete only up to the first letter that is still being put: `settled`
    returns that position, and exports read up to it.
    """

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float = 72 * 3600.0) -> None:
        super().__init__(client, url, keys)
        self.claims = RedisClaims(client, url, keys)
        self.exports = RedisExports(client, url, keys)
        self.overviews = RedisOverviews(client, url, keys)
        self.redriven = RedrivenMessages(client, url, keys, ttl_seconds)
        self._ttl_millis = int(ttl_seconds * 1000)

    def place(self, dead_letter_queue: str, letter_id: str) -> str:
        """Assign a position to a letter."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            # The name first: operators would never find a letter in a queue that is not listed.
            self._client.sadd(keys.queues(), spelled(name))
            position = self._scripts.place(
                keys=[keys.last(name), keys.placing(name), keys.claims(name)],
                args=[spelled(letter_id), int(_KEPT_SECONDS * 1000)],
            )
        return str(position.decode())

    def placed(self, letter: DeadLetter, key: MessageKey) -> bool:
        """Record that a letter is in its queue, and delete the message's counters."""
        keys, name = self._keys, letter.dead_letter_queue
        with translated(self._url):
            reply = self._scripts.placed(
                keys=[keys.placing(name), keys.arrivals(name), keys.run(key), keys.states(name)],
                args=[
                    spelled(letter.id),
                    key.retries,
                    self._ttl_millis,
                    letter.reason.value,
                    letter.fingerprint,
                    to_micros(letter.dead_lettered_at),
                    release_text(letter.release),
                ],
            )
        return bool(reply == DeadLetterReply.REGRESSED)

    def last(self, dead_letter_queue: str) -> str | None:
        """Return the newest position assigned, or ``None``."""
        return self._positions(dead_letter_queue)[0]

    def settled(self, dead_letter_queue: str) -> str | None:
        """Return the position up to which no letter is still being put."""
        last, placing, at = self._positions(dead_letter_queue)
        if last is None:
            return None
        oldest = (at - PATIENCE_SECONDS) * 1000
        pending = sorted(ordered(text) for text in placing if ordered(text)[0] > oldest)
        if not pending:
            return last
        first, second = pending[0]
        return f"{first}-{second - 1}" if second else f"{first - 1}-{_MAX_PER_MILLISECOND}"

    def state(self, dead_letter_queue: str) -> object:
        """Return a value that changes whenever a letter is stored."""
        last, placing, _at = self._positions(dead_letter_queue)
        return last, sorted(placing)

    def close(self) -> None:
        """Disconnect."""
        with suppress(Exception):
            self._client.close()

    def _positions(self, dead_letter_queue: str) -> tuple[str | None, list[str], float]:
        with translated(self._url):
            keys = [self._keys.last(dead_letter_queue), self._keys.placing(dead_letter_queue)]
            last, placing, (seconds, micros) = self._scripts.positions(keys=keys)
        texts = [text.decode() for text in placing]
        at = int(seconds) + int(micros) / 1e6
        return (last.decode() or None), texts, at
