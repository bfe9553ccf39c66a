"""Storage for the states of redrives and discards."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol


class JobStore(Protocol):
    """Keeps the states of the newest 500 jobs. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """Return the current time by the store's clock, which decides if a job has gone silent."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Save the state of a job; return True if its cancellation was requested."""

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the state of a job, or ``None``."""

    def all(self) -> list[Mapping[str, Any]]:
        """Return the states of all jobs, newest first."""

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Request the cancellation of a job, or withdraw the request."""

    def succeeded(self, job_id: str) -> int:
        """Return how many messages of a redrive succeeded; only guarded queues report this."""

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Return True for the first process that asks to do this run of a job, else False."""
