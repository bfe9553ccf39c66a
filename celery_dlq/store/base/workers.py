"""State that the processes of an app share: live workers, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from celery_dlq.events import Change

MAX_TASKS = 5000
"""A worker lists at most this many tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's description of itself for all processes of its app."""

    hostname: str  # Its node name, e.g. `celery@web-1`
    pid: int  # Process id of its main process
    version: str  # Version of celery_dlq
    started_at: datetime  # When it started, aware UTC
    queues: tuple[str, ...] = ()  # The queues it consumes
    tasks: tuple[str, ...] = ()  # The names of its registered tasks
    # Policy by queue or pattern, and by task as `task:<name>`; JSON-ready
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class HeartbeatReply(NamedTuple):
    """What a worker learns with its heartbeat."""

    known: bool  # True if its info is stored; else it registers again
    revision: int  # The revision of the instructions; it changes with each of them
    job_waits: bool  # True if a job waits for a process that runs jobs, and may start now


class WorkerRegistry(Protocol):
    """Stores what the processes of one app share. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """Return the current time by the store's clock."""

    def register(self, info: WorkerInfo) -> None:
        """Save a worker's info; it is kept while the worker sends heartbeats."""

    def heartbeat(self, hostname: str) -> HeartbeatReply:
        """Record that a worker is alive."""

    def deregister(self, hostname: str) -> None:
        """Remove a worker's info."""

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """Return the infos of live workers, by host name; much smaller without their tasks."""

    def record(self, change: Change) -> None:
        """Add a change to the audit log, which keeps about the newest 10,000."""

    def changes(self, *, limit: int) -> list[Change]:
        """Return at most ``limit`` changes, newest first."""
