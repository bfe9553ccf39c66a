"""State that the processes of an app share: live workers, policy overrides, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from celery_dlq.events import Change
from celery_dlq.letters.record import EPOCH

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A temporary change of one key of a queue's policy."""

    queue: str  # The queue, by its exact name
    key: str  # The policy key
    value: Any  # The new value, JSON-ready; validated like a configured one
    until: datetime  # End of the override, aware UTC, by the store's clock
    actor: str  # Who set it
    # Its beginning, by the same clock. Until then, the letters of the queue are left alone; one
    # that ends as it begins is an override that was lifted
    since: datetime = EPOCH


class HeartbeatReply(NamedTuple):
    """What a worker learns with its heartbeat."""

    known: bool  # True if its info is stored; else it registers again
    revision: int  # The revision of the overrides, which changes with every `override` and `lift`
    job_waits: bool  # True if a job waits for a process that runs jobs, and may start now


class WorkerRegistry(Protocol):
    """Stores what the processes of one app share. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """Return the current time by the store's clock, which decides when overrides end."""

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

    def override(self, override: Override) -> None:
        """Set an override; replaces an earlier one of the same queue and key."""

    def lift(self, queue: str, key: str) -> bool:
        """Remove an override; return True if there was one."""

    def overrides(self) -> list[Override]:
        """Return the overrides that have not ended, by queue and key; removes the others."""
