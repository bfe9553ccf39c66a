"""Storage for the states of jobs: redrives, discards and edits, planned, running or ended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

MOST_JOBS = 550
"""Number of jobs that a store keeps: 500 that were started, and 50 plans."""


def may_start_at(state: Mapping[str, Any]) -> int | None:
    """When a job that waits may start, in milliseconds since 1970; ``None`` if it does not wait."""
    if state.get("state") != "waiting":
        return None
    return int(state.get("start_at") or state.get("updated_at") or 0) // 1000


class JobStore(Protocol):
    """Keeps the newest `MOST_JOBS` jobs, and all that wait.

    Every method may raise `StoreUnavailable`.
    """

    def now(self) -> datetime:
        """Return the current time by the store's clock, which decides if a job has gone silent."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Save the state of a job; return True if its cancellation was requested."""

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the state of a job, or ``None``."""

    def all(self) -> list[Mapping[str, Any]]:
        """Return the states of all jobs, newest first."""

    def due(self) -> list[str]:
        """Return the ids of the jobs that wait and may start now, who waits longest first."""

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Request the cancellation of a job, or withdraw the request."""

    def succeeded(self, job_id: str) -> int:
        """Return how many messages of a redrive succeeded; only guarded queues report this."""

    def replace(
        self, job_id: str, known: Mapping[str, Any], state: Mapping[str, Any] | None
    ) -> bool:
        """Save a state if the job still has the ``state`` and ``run`` of the known one.

        So one process of many starts, resumes or cancels a job, at one moment.
        """
