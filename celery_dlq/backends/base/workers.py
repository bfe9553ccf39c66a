"""What the processes of an app know of each other: live workers, overrides, the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from celery_dlq.events import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself to all processes of its app.

    Attributes:
        hostname: Its node name, e.g. ``celery@web-1``.
        pid: Its main process.
        version: Version of celery_dlq.
        started_at: When it started, aware UTC.
        queues: The queues it consumes.
        tasks: The names of its registered tasks.
        policies: Policy by queue or pattern, and by task as ``task:<name>``; JSON-ready.
    """

    hostname: str
    pid: int
    version: str
    started_at: datetime
    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One field of a queue's policy, changed at run time until a given moment.

    Attributes:
        queue: The queue, by its exact name.
        key: The policy key.
        value: Its value, JSON-ready; checked like a configured one.
        until: When the configured value comes back, aware UTC, by the store's clock.
        actor: Who set it.
    """

    queue: str
    key: str
    value: Any
    until: datetime
    actor: str


class WorkerRegistry(Protocol):
    """What the processes of one app tell each other. Every method may raise `StoreUnavailable`."""

    def now(self) -> datetime:
        """The present by the clock of the store, by which overrides end."""

    def register(self, info: WorkerInfo) -> None:
        """Put up a worker's info; it stays up while the worker gives heartbeats."""

    def heartbeat(self, hostname: str) -> tuple[bool, int]:
        """Give a worker's heartbeat.

        Returns:
            Whether its info is still up, and the revision of the overrides.
        """

    def deregister(self, hostname: str) -> None:
        """Take a worker's info down."""

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """The infos of live workers, by host name; much lighter without their tasks."""

    def record(self, change: Change) -> None:
        """Keep a change for the audit; the newest ten thousand are kept."""

    def changes(self, *, limit: int) -> list[Change]:
        """The newest changes, newest first."""

    def override(self, override: Override) -> None:
        """Put up an override; replaces an earlier one of the same field."""

    def lift(self, queue: str, key: str) -> bool:
        """Take an override down; whether there was one."""

    def overrides(self) -> list[Override]:
        """The overrides in force, by queue and key; those that ended are taken down."""
