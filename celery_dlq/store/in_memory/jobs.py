"""The states of jobs in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery_dlq.letters.record import to_micros
from celery_dlq.store.base import MOST_JOBS, may_start_at


class MemoryJobStore:
    """The `JobStore` in memory."""

    def __init__(self) -> None:
        self._states: dict[str, Mapping[str, Any]] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Save a state."""
        with self._lock:
            self._states[job_id] = dict(state)
            for old in sorted(self._states)[:-MOST_JOBS]:
                if may_start_at(self._states[old]) is None:
                    self._forget(old)
            return job_id in self._cancelled

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return one state."""
        return self._states.get(job_id)

    def all(self) -> list[Mapping[str, Any]]:
        """Return all states, newest first."""
        with self._lock:
            return [state for _, state in sorted(self._states.items(), reverse=True)]

    def due(self) -> list[str]:
        """Return the ids of the jobs that may start now."""
        millis = to_micros(self.now()) // 1000
        with self._lock:
            starts = [(may_start_at(state), job_id) for job_id, state in self._states.items()]
        return [
            job_id
            for start, job_id in sorted(
                (start, job_id) for start, job_id in starts if start is not None and start <= millis
            )
        ]

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Request or withdraw the cancellation of a job."""
        if wanted:
            self._cancelled.add(job_id)
        else:
            self._cancelled.discard(job_id)

    def succeeded(self, job_id: str) -> int:  # noqa: ARG002 - nothing counts them here
        """Return 0: successes are not counted."""
        return 0

    def replace(
        self, job_id: str, known: Mapping[str, Any], state: Mapping[str, Any] | None
    ) -> bool:
        """Save or delete a state if nobody has changed it."""
        with self._lock:
            there = self._states.get(job_id)
            if there is None or any(there.get(k) != known.get(k) for k in ("state", "run")):
                return False
            if state is None:
                self._forget(job_id)
            else:
                self._states[job_id] = dict(state)
            return True

    def _forget(self, job_id: str) -> None:
        del self._states[job_id]
        self._cancelled.discard(job_id)
