"""Holds in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timezone

from celery_dlq.store.base import Hold


class MemoryHolds:
    """The `HoldStore` in memory."""

    def __init__(self, changed: Callable[[], None], length: Callable[[str], int]) -> None:
        self._changed = changed
        self._length = length
        self._holds: dict[str, Hold] = {}
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def all(self) -> list[Hold]:
        """Return all holds."""
        return sorted(self._holds.values(), key=lambda hold: (hold.created_at, hold.id))

    def replace(self, known: Hold | None, hold: Hold | None) -> bool:
        """Add, change or remove a hold."""
        target = known or hold
        if target is None:
            return False
        with self._lock:
            if self._holds.get(target.id) != known:
                return False
            if hold is not None:
                self._holds[hold.id] = hold
            elif self._length(target.id):
                return False
            else:
                del self._holds[target.id]
        self._changed()
        return True
