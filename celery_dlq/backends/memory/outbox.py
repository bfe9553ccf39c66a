"""The outbox of dead-letter exchanges in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from celery_dlq.backends.base import OutboxEntry


class MemoryOutbox:
    """The `Outbox` in memory."""

    def __init__(self) -> None:
        self._notices: dict[str, dict[OutboxEntry, float]] = {}
        self._lock = threading.Lock()

    def add(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Keep a entry."""
        with self._lock:
            self._notices.setdefault(dead_letter_queue, {})[entry] = 0.0

    def due(self, dead_letter_queue: str, *, most: int, lease_seconds: float) -> list[OutboxEntry]:
        """Notices that nobody tried lately."""
        with self._lock:
            kept, now = self._notices.get(dead_letter_queue, {}), time.monotonic()
            found = [entry for entry, at in kept.items() if at <= now][:most]
            kept.update(dict.fromkeys(found, now + lease_seconds))
            return found

    def done(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Forget entries."""
        with self._lock:
            for entry in entries:
                self._notices.get(dead_letter_queue, {}).pop(entry, None)

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those that have entries."""
        return [name for name in dead_letter_queues if self._notices.get(name)]

    def waiting(self, dead_letter_queue: str) -> int:
        """How many are kept."""
        return len(self._notices.get(dead_letter_queue, {}))
