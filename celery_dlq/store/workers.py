"""The worker registry in Redis: worker infos, the audit log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest

from celery_dlq.events import Change
from celery_dlq.letters.printable import readable
from celery_dlq.letters.record import to_micros
from celery_dlq.store.keys import compact
from celery_dlq.store.part import Part
from celery_dlq.store.records import HeartbeatReply, WorkerInfo

SILENT_SECONDS = 30.0
"""A worker without a heartbeat for this long is no longer live."""

_MAX_CHANGES = 10_000


class WorkerRegistry(Part):
    """The `WorkerRegistry` in Redis."""

    def register(self, info: WorkerInfo) -> None:
        """Save a worker's info; it is kept while the worker sends heartbeats."""
        text = info.to_stored()
        tasks = text.pop("tasks")
        self._node(info.hostname, compact(text), compact(tasks))

    def heartbeat(self, hostname: str) -> HeartbeatReply:
        """Record that a worker is alive."""
        return self._node(hostname, "", "")

    def deregister(self, hostname: str) -> None:
        """Remove a worker's info."""
        self._client.zrem(self._keys.nodes(), hostname)
        self._client.hdel(self._keys.worker_infos(), hostname)
        self._client.hdel(self._keys.tasks(), hostname)

    def workers(self, *, with_tasks: bool = True) -> list[WorkerInfo]:
        """Return the infos of live workers, by host name; much smaller without their tasks."""
        live = self._live()
        infos = self._client.hmget(self._keys.worker_infos(), live) if live else []
        tasks = self._client.hmget(self._keys.tasks(), live) if live and with_tasks else []
        found = (
            readable("what a worker said of itself", partial(_info, info, names or b"[]"))
            for info, names in zip_longest(infos, tasks)
            if info is not None
        )
        return [info for info in found if info is not None]

    def record(self, change: Change) -> None:
        """Add a change to the audit log, which keeps about the newest 10,000."""
        self._client.xadd(
            self._keys.changes(),
            {"change": compact(change.to_stored())},
            maxlen=_MAX_CHANGES,
            approximate=True,
        )

    def changes(self, *, limit: int) -> list[Change]:
        """Return at most ``limit`` changes, newest first."""
        entries = self._client.xrevrange(self._keys.changes(), count=limit)
        found = (
            readable(f"the change {entry.decode()}", partial(_change, fields))
            for entry, fields in entries
        )
        return [change for change in found if change is not None]

    def _node(self, hostname: str, info: str, tasks: str) -> HeartbeatReply:
        args = (hostname, int(SILENT_SECONDS * 1000), info, tasks)
        known, revision, jobs = self._written("node", *args)
        return HeartbeatReply(bool(known), int(revision), bool(jobs))

    def _live(self) -> list[bytes]:
        millis = to_micros(self.now()) // 1000 - int(SILENT_SECONDS * 1000)
        live = self._client.zrangebyscore(self._keys.nodes(), millis, "+inf")
        return sorted(live)


def _change(fields: Mapping[bytes, bytes]) -> Change:
    return Change.from_stored(json.loads(fields[b"change"]))


def _info(info: bytes, tasks: bytes) -> WorkerInfo:
    return WorkerInfo.from_stored({**json.loads(info), "tasks": json.loads(tasks)})
