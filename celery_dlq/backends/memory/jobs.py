"""The states of jobs in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

_MAX_JOBS = 500


class MemoryJobStore:
    """The `JobStore` in memory."""

    def __init__(self) -> None:
        self._states: dict[str, Mapping[str, Any]] = {}
        self._cancelled: set[str] = set()
        self._taken: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Save a state."""
        self._states[job_id] = dict(state)
        for old in sorted(self._states)[:-_MAX_JOBS]:
            del self._states[old]
            self._cancelled.discard(old)
            self._taken.pop(old, None)
        return job_id in self._cancelled

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return one state."""
        return self._states.get(job_id)

    def all(self) -> list[Mapping[str, Any]]:
        """Return all states, newest first."""
        return [state for _, state in sorted(self._states.items(), reverse=True)]

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Request or withdraw the cancellation of a job."""
        if wanted:
            self._cancelled.add(job_id)
        else:
            self._cancelled.discard(job_id)

    def succeeded(self, job_id: str) -> int:  # noqa: ARG002 - nothing counts them here
        """Return 0: successes are not counted."""
        return 0

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Return True for the first caller."""
        with self._lock:
            taken = self._taken.setdefault(job_id, set())
            free = run not in taken
            taken.add(run)
            return free
