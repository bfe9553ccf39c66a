"""Counts the messages that a hold could not judge, because their arguments cannot be read."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import Command

if TYPE_CHECKING:
    from collections.abc import Collection

    from celery_dlq.store.keys import Keys
    from celery_dlq.store.store import Store

KEPT_SECONDS = 32 * 24 * 3600
"""The counts expire this many seconds after the last one: longer than a hold with an end lasts."""


class Unread(Part):
    """The counts of all holds."""

    def __init__(self, store: Store, keys: Keys | None = None) -> None:
        super().__init__(store, keys)
        self._waiting: deque[str] = deque()  # thread pools add while the tick takes

    def add_message(self, hold_id: str) -> None:
        """Count a message that was not held. Sends nothing, never raises."""
        self._waiting.append(hold_id)

    def send_counts(self) -> None:
        """Send the counts without waiting; drop them if that fails. Never raises."""
        new = Counter(self._waiting.popleft() for _ in range(len(self._waiting)))
        if new:
            key = self._keys.unread()
            commands: list[Command] = [("HINCRBY", key, name, by) for name, by in new.items()]
            self._connection.send_unanswered([*commands, ("EXPIRE", key, KEPT_SECONDS)])

    def counts_by_hold(self) -> dict[str, int]:
        """The number of messages by hold."""
        found = self._client.hgetall(self._keys.unread())
        return {name.decode("utf-8", "replace"): int(count) for name, count in found.items()}

    def keep_only(self, hold_ids: Collection[str]) -> None:
        """Forget the counts of all other holds."""
        gone = [name for name in self.counts_by_hold() if name not in hold_ids]
        if gone:
            self._client.hdel(self._keys.unread(), *gone)
