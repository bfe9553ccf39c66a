"""Redriven messages in Redis: what became of them, and with which count they begin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from celery_dlq.backends.base import MessageKey, RedriveOutcome
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.record import Delivery, to_micros


class RedrivenMessages:
    """Messages that are about to be redriven, or were; they are looked up beside their counts.

    Args:
        client: A redis-py client that answers bytes.
        url: For messages; its password is never shown.
        keys: Key names.
        ttl_seconds: How long a message is remembered.
    """

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float) -> None:
        self._client = client
        self._url = url
        self._keys = keys
        self._ttl_millis = int(ttl_seconds * 1000)

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Leave a mark where the message's deliveries will be counted."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hset(self._keys.run(key), "watched", 1)
                pipe.pexpire(self._keys.run(key), self._ttl_millis)
            pipe.execute()

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """A worker takes the mark away with the counts, or leaves a note of the death."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hkeys(self._keys.run(key))
            return [_outcome(names) for names in pipe.execute()]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Write a count, with the end of its last delivery: it is over, it did not vanish."""
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
