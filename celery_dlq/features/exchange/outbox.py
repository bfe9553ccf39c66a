"""The outbox in Redis: one sorted set per dead-letter queue, beside its letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from celery_dlq.logs import readable
from celery_dlq.store.part import Part, of_each


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A letter that is still to be published to a dead-letter exchange."""

    letter_id: str  # The letter's id
    exchange: str  # The name of the exchange
    routing_key: str  # The routing key to publish with
    tries: int = 0  # How often it was published without a confirmation


class Outbox(Part):
    """Entries of letters that are still to be published."""

    lua = "celery_dlq.features.exchange"

    def add(
        self, dead_letter_queue: str, entry: OutboxEntry, *, after_seconds: float = 0.0
    ) -> None:
        """Add an entry, due after so long; an equal entry that is there is due then, too."""
        self._connection.raise_if_away()
        at = int((self.now().timestamp() + after_seconds) * 1000) if after_seconds else 0
        self._client.zadd(self._keys.outbox(dead_letter_queue), {_text(entry): at})

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Return at most ``most`` due entries; they are due again after ``lease_seconds``."""
        found = self._call("due", most, int(lease_seconds * 1000), queue=dead_letter_queue)
        entries = (readable("an entry of an outbox", partial(_entry, text)) for text in found)
        return [entry for entry in entries if entry is not None]

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Remove entries: they are published."""
        if entries:
            texts = [_text(entry) for entry in entries]
            self._client.zrem(self._keys.outbox(dead_letter_queue), *texts)

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those of the given queues that have entries."""
        found = of_each(
            self._client,
            dead_letter_queues,
            lambda pipe, name: pipe.exists(self._keys.outbox(name)),
        )
        return [name for name, (there,) in found if there]

    def waiting(self, dead_letter_queue: str) -> int:
        """Return the number of entries of a queue."""
        return int(self._client.zcard(self._keys.outbox(dead_letter_queue)))


def _text(entry: OutboxEntry) -> str:
    """Return the member of the sorted set; equal for equal entries."""
    return json.dumps([entry.letter_id, entry.exchange, entry.routing_key, entry.tries])


def _entry(text: bytes) -> OutboxEntry:
    letter_id, exchange, routing_key, tries = json.loads(text)[:4]
    return OutboxEntry(letter_id=letter_id, exchange=exchange, routing_key=routing_key, tries=tries)
