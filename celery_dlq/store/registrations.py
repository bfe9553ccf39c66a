"""What workers report of themselves, in Redis: their infos, and what they count.

`celery_dlq.store.workers` has what operators read of it, and the audit log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest

from celery_dlq import timing
from celery_dlq.letters.printable import readable
from celery_dlq.letters.record import to_micros
from celery_dlq.store.keys import compact
from celery_dlq.store.metrics import OTHER, Series, WorkerGauges
from celery_dlq.store.part import Part
from celery_dlq.store.worker_records import HeartbeatReply, WorkerInfo

MOST_FIELDS = 5_000


class Registrations(Part):
    """Keeps what workers report of themselves."""

    def register(self, info: WorkerInfo) -> None:
        """Save a worker's info; it is kept while the worker sends heartbeats."""
        text = info.to_stored()
        tasks = text.pop("tasks")
        self._heartbeat_of(info.hostname, compact(text), compact(tasks))

    def heartbeat(self, hostname: str) -> HeartbeatReply:
        """Record that a worker is alive."""
        return self._heartbeat_of(hostname, "", "")

    def deregister(self, hostname: str) -> None:
        """Remove a worker's info."""
        self._client.zrem(self._keys.nodes(), hostname)
        self._client.hdel(self._keys.worker_infos(), hostname)
        self._client.hdel(self._keys.tasks(), hostname)

    def workers(self, *, with_tasks: bool = True, some: int = 0) -> list[WorkerInfo]:
        """Return the infos of live workers, by host name, or of the last ``some``."""
        live = (
            self._send_command("ZRANGE", self._keys.nodes(), -some, -1)
            if some
            else self._live_ids()
        )
        infos = self._send_command("HMGET", self._keys.worker_infos(), *live) if live else []
        tasks = (
            self._send_command("HMGET", self._keys.tasks(), *live) if live and with_tasks else []
        )
        found = (
            readable("what a worker said of itself", partial(_parsed_info, info, names or b"[]"))
            for info, names in zip_longest(infos, tasks)
            if info is not None
        )
        return [info for info in found if info is not None]

    def close_idle_connections(self) -> None:
        """Close pooled connections that are not in use: a healthy worker seldom needs one."""
        if self._client.connection_pool is not None:  # a cluster has one for each node
            self._client.connection_pool.disconnect(inuse_connections=False)

    def _heartbeat_of(self, hostname: str, info: str, tasks: str) -> HeartbeatReply:
        args = (hostname, int(timing.current.worker_silent * 1000), info, tasks)
        known, revision, jobs = self._written("node", *args)
        return HeartbeatReply(bool(known), int(revision), bool(jobs))

    def _live_ids(self) -> list[bytes]:
        millis = to_micros(self.now()) // 1000 - int(timing.current.worker_silent * 1000)
        return sorted(self._client.zrangebyscore(self._keys.nodes(), millis, "+inf"))


class NewCounts(Part):
    """Adds the counts of a process to those of the app, in one hash."""

    def add_counts(self, counts: Mapping[Series, int], gauges: WorkerGauges | None = None) -> bool:
        """Add counts without waiting, and never raise; False if the caller is to keep them."""
        worker = "" if gauges is None else gauges.worker
        values = "" if gauges is None else compact([gauges.spool, gauges.waiting])
        fields = [
            part for series, count in counts.items() for part in (*_series_fields(series), count)
        ]
        command = self._command("measure", MOST_FIELDS, worker, values, *fields)
        return self._connection.send_unanswered([command])


def _parsed_info(info: bytes, tasks: bytes) -> WorkerInfo:
    return WorkerInfo.from_stored({**json.loads(info), "tasks": json.loads(tasks)})


def _series_fields(series: Series) -> tuple[str, str]:
    """Return the field of a series, and its substitute when there are too many fields."""
    name, *labels = series
    return compact(series), compact([name, *(OTHER for _ in labels)])
