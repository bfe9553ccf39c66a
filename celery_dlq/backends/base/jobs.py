"""What is kept of redrives and discards."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol


class JobStore(Protocol):
    """Keeps what is known of jobs, bounded. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """The present by the clock of the store, by which jobs fall silent."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Keep the state of a job; whether somebody wants it cancelled.

        The states of the five hundred newest jobs are kept.
        """

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """The state of a job, or ``None``."""

    def all(self) -> list[Mapping[str, Any]]:
        """The states of all jobs, newest first."""

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Want a job cancelled, or no more."""

    def succeeded(self, job_id: str) -> int:
        """How many messages of a redrive have succeeded, as far as guarded queues tell."""

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Become the one process that does this run of a job; whether nobody else has."""
