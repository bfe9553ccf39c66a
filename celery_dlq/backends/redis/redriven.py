"""Redriven messages in Redis: their outcomes, and the counts they begin with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from celery_dlq.backends.base import MessageKey, RedriveOutcome
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.part import RedisPart
from celery_dlq.record import Delivery, to_micros


class RedrivenMessages(RedisPart):
    """Marks and reads redriven messages in the hash of their counts.

    Args:
        client: A redis-py client that returns bytes.
        url: Shown in messages, without its password.
        keys: Key names.
        ttl_seconds: Time for which a message is remembered.
    """

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float) -> None:
        super().__init__(client, url, keys)
        self._ttl_millis = int(ttl_seconds * 1000)

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Set a mark in the hash of the message's counts."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hset(self._keys.run(key), "watched", 1)
                pipe.pexpire(self._keys.run(key), self._ttl_millis)
            pipe.execute()

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Read the hashes: a worker deletes them on success, and records a death in them."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hkeys(self._keys.run(key))
            return [_outcome(names) for names in pipe.execute()]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Write the count with an ended last delivery, which must not look vanished."""
        run, place = self._keys.run(key), f"{key.retries}:{deliveries}"
        end = json.dumps(last.to_json(), separators=(",", ":"))
        start = f"{to_micros(last.started_at)}|{last.worker_pid or 0}@{last.worker_hostname}#0"
        fields = {f"count:{key.retries}": deliveries, f"start:{place}": start, f"end:{place}": end}
        with translated(self._url):
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(run, mapping=fields)
            pipe.pexpire(run, self._ttl_millis)
            pipe.execute()


def _outcome(names: Sequence[bytes]) -> RedriveOutcome:
    if not names:
        return RedriveOutcome.SUCCEEDED
    return (
        RedriveOutcome.DIED
        if any(name.startswith(b"dead:") for name in names)
        else RedriveOutcome.OPEN
    )
