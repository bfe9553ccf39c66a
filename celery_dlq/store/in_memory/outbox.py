"""The outbox in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from celery_dlq.store.base import OutboxEntry


class MemoryOutbox:
    """The `Outbox` in memory."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[OutboxEntry, float]] = {}
        self._lock = threading.Lock()

    def add(
        self, dead_letter_queue: str, entry: OutboxEntry, *, after_seconds: float = 0.0
    ) -> None:
        """Add an entry, due after so long."""
        at = time.monotonic() + after_seconds if after_seconds else 0.0
        with self._lock:
            self._entries.setdefault(dead_letter_queue, {})[entry] = at

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Return due entries and postpone them."""
        with self._lock:
            kept, now = self._entries.get(dead_letter_queue, {}), time.monotonic()
            found = [entry for entry, at in kept.items() if at <= now][:most]
            kept.update(dict.fromkeys(found, now + lease_seconds))
            return found

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Remove entries."""
        with self._lock:
            for entry in entries:
                self._entries.get(dead_letter_queue, {}).pop(entry, None)

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those with entries."""
        return [name for name in dead_letter_queues if self._entries.get(name)]

    def waiting(self, dead_letter_queue: str) -> int:
        """Return the number of entries."""
        return len(self._entries.get(dead_letter_queue, {}))
