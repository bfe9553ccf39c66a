"""The worker registry in memory."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from datetime import datetime, timezone

from celery_dlq.events import Change
from celery_dlq.store.base import HeartbeatReply, JobStore, Override, WorkerInfo
from celery_dlq.store.in_memory.jobs import MemoryJobStore

_MAX_CHANGES = 10_000


class MemoryWorkerRegistry:
    """The `WorkerRegistry` in memory; infos never expire."""

    def __init__(self, jobs: JobStore | None = None) -> None:
        self._jobs = jobs or MemoryJobStore()
        self._infos: dict[str, WorkerInfo] = {}
        self._changes: deque[Change] = deque(maxlen=_MAX_CHANGES)
        self._overrides: dict[tuple[str, str], Override] = {}
        self._revision = 0
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time of this process."""
        return datetime.now(timezone.utc)

    def register(self, info: WorkerInfo) -> None:
        """Save a worker's info."""
        self._infos[info.hostname] = info

    def heartbeat(self, hostname: str) -> HeartbeatReply:
        """Return if the worker is registered, the revision, and if a job waits."""
        waits = bool(self._jobs.due())
        return HeartbeatReply(hostname in self._infos, self._revision, waits)

    def deregister(self, hostname: str) -> None:
        """Remove a worker's info."""
        self._infos.pop(hostname, None)

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """Return all infos."""
        infos = [info for _, info in sorted(self._infos.items())]
        return infos if with_tasks else [replace(info, tasks=()) for info in infos]

    def record(self, change: Change) -> None:
        """Add a change to the audit log."""
        self._changes.append(change)

    def changes(self, *, limit: int) -> list[Change]:
        """Return the newest changes."""
        return list(reversed(self._changes))[:limit]

    def override(self, override: Override) -> None:
        """Set an override."""
        with self._lock:
            self._overrides[override.queue, override.key] = override
            self._revision += 1

    def lift(self, queue: str, key: str) -> bool:
        """Remove an override."""
        with self._lock:
            self._revision += 1
            return self._overrides.pop((queue, key), None) is not None

    def changed(self) -> None:
        """Let all workers read again: a hold was changed."""
        with self._lock:
            self._revision += 1

    def overrides(self) -> list[Override]:
        """Return the overrides that have not ended."""
        now = self.now()
        for place in [place for place, o in self._overrides.items() if o.until <= now]:
            self.lift(*place)
        return [override for _, override in sorted(self._overrides.items())]
