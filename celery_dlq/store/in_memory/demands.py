"""Demands in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timezone

from celery_dlq.store.base import MOST_DEMANDS, Demand


class MemoryDemands:
    """The `DemandStore` in memory."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._demands: dict[str, Demand] = {}
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def add(self, demand: Demand) -> bool:
        """Add a demand."""
        with self._lock:
            if demand.task_id not in self._demands and len(self._demands) >= MOST_DEMANDS:
                return False
            self._demands[demand.task_id] = demand
        self._changed()
        return True

    def get(self, task_id: str) -> Demand | None:
        """Return the demand for a task."""
        found = self._demands.get(task_id)
        return found if found is not None and found.until > self.now() else None

    def all(self) -> list[Demand]:
        """Return the demands in force."""
        now = self.now()
        with self._lock:
            self._demands = {one.task_id: one for one in self._demands.values() if one.until > now}
            return sorted(self._demands.values(), key=lambda one: (one.at, one.task_id))

    def remove(self, task_id: str) -> bool:
        """Remove the demand for a task."""
        with self._lock:
            return self._demands.pop(task_id, None) is not None
