"""What workers report of themselves, in Redis: their infos, the audit log, their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from celery_dlq import timing
from celery_dlq.events import Change
from celery_dlq.letters.printable import get_logger, readable
from celery_dlq.letters.record import to_micros
from celery_dlq.store.keys import compact
from celery_dlq.store.metrics import OTHER, Measured, Series, WorkerGauges
from celery_dlq.store.part import Part
from celery_dlq.store.worker_records import HeartbeatReply, WorkerInfo

logger = get_logger("celery_dlq.store")

MOST_FIELDS = 5_000

_MAX_CHANGES = 10_000
_MAX_OPEN_CHANGES = 1_000  # of processes that were killed, and of jobs that nobody resumed


class OpenChange(NamedTuple):
    """The change of an operation that has not ended; its letters are counted by the operation."""

    change: Change
    before: int  # Letters of the operation that earlier changes have
    text: str  # Both as they are stored


_Changes = tuple[list[Change], dict[str, OpenChange]]


class WorkerRegistry(Part):
    """Keeps what workers report of themselves, and the audit log."""

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

    def record_change(self, change: Change) -> None:
        """Add a change to the audit log, which keeps about the newest 10,000."""
        self._client.xadd(
            self._keys.changes(),
            {"change": compact(change.to_stored())},
            maxlen=_MAX_CHANGES,
            approximate=True,
        )

    def changes(self, *, limit: int, quoting: str = "") -> list[Change]:
        """Return at most ``limit`` changes, newest first; of those only what has a text in it."""
        return self.changes_and_open(limit=limit, quoting=quoting)[0]

    def changes_and_open(self, *, limit: int, quoting: str = "") -> _Changes:
        """Return changes, newest first, and those of operations that have not ended, by their id.

        Both at one moment, or a change that is just recorded would be in both, or in neither.
        """
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(self._keys.open_changes())
        pipe.xrevrange(self._keys.changes(), count=limit)
        texts, entries = pipe.execute()
        found = (
            readable(f"the change {entry.decode()}", partial(_parsed_change, fields))
            for entry, fields in entries
            if quoting.encode() in fields.get(b"change", b"")
        )
        read = (
            (name.decode(), readable(f"the change of {name!r}", partial(_open_change, text)))
            for name, text in texts.items()
        )
        open_ones = {name: one for name, one in read if one is not None}
        return [change for change in found if change is not None], open_ones

    def open_change(self, operation: str) -> OpenChange | None:
        """Return the change of an operation that has not ended."""
        text = self._client.hget(self._keys.open_changes(), operation)
        return text and readable(f"the change of {operation}", partial(_open_change, text))

    def begin_change(self, operation: str, change: Change, before: int) -> OpenChange:
        """Save the change of an operation that begins; the oldest make room for it."""
        text = compact({"change": change.to_stored(), "before": before})
        key = self._keys.open_changes()
        self._client.hset(key, operation, text)
        if self._client.hlen(key) > _MAX_OPEN_CHANGES:
            _, found = self.changes_and_open(limit=1)
            oldest = sorted(found, key=lambda name: found[name].change.at)
            self._client.hdel(key, *oldest[: len(oldest) - _MAX_OPEN_CHANGES])
        return OpenChange(change, before, text)

    def end_change(self, operation: str, opened: OpenChange, change: Change | None) -> bool:
        """End an open change, in one step with its record; false if another process did that."""
        text = "" if change is None else compact(change.to_stored())
        return bool(self._run_script("close_change", operation, opened.text, text, _MAX_CHANGES))

    def _heartbeat_of(self, hostname: str, info: str, tasks: str) -> HeartbeatReply:
        args = (hostname, int(timing.current.worker_silent * 1000), info, tasks)
        known, revision, jobs = self._written("node", *args)
        return HeartbeatReply(bool(known), int(revision), bool(jobs))

    def _live_ids(self) -> list[bytes]:
        millis = to_micros(self.now()) // 1000 - int(timing.current.worker_silent * 1000)
        return sorted(self._client.zrangebyscore(self._keys.nodes(), millis, "+inf"))


class MetricsStore(Part):
    """Adds up the counts of all processes of an app, in one hash."""

    def add_counts(self, counts: Mapping[Series, int], gauges: WorkerGauges | None = None) -> bool:
        """Add counts without waiting, and never raise; False if the caller is to keep them."""
        worker = "" if gauges is None else gauges.worker
        values = "" if gauges is None else compact([gauges.spool, gauges.waiting])
        fields = [
            part for series, count in counts.items() for part in (*_series_fields(series), count)
        ]
        command = self._command("measure", MOST_FIELDS, worker, values, *fields)
        return self._connection.send_unanswered([command])

    def read_all(self) -> Measured:
        """Return all counts, and the gauges of live workers: 0 of those who reported none."""
        now, _ = self._client.time()
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(self._keys.counts())
        pipe.hgetall(self._keys.gauges())
        pipe.zrangebyscore(self._keys.nodes(), (now - timing.current.worker_silent) * 1000, "+inf")
        counts, gauges, live = pipe.execute()
        found = {}
        for series, count in counts.items():
            try:
                found[tuple(map(str, json.loads(series)))] = int(count)
            except (ValueError, TypeError):  # for example from a later version
                logger.debug("Skipped the count %r, which cannot be read", series)
        workers = {name: WorkerGauges(worker=_shortened(name)) for name in live}
        for name, text in gauges.items():
            if reported := _parsed_gauges(_shortened(name), text, now):
                workers[name] = reported
        return Measured(counts=found, workers=tuple(workers[name] for name in sorted(workers)))


def _open_change(text: bytes) -> OpenChange:
    found = json.loads(text)
    return OpenChange(Change.from_stored(found["change"]), int(found["before"]), text.decode())


def _parsed_change(fields: Mapping[bytes, bytes]) -> Change:
    return Change.from_stored(json.loads(fields[b"change"]))


def _parsed_info(info: bytes, tasks: bytes) -> WorkerInfo:
    return WorkerInfo.from_stored({**json.loads(info), "tasks": json.loads(tasks)})


def _shortened(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _series_fields(series: Series) -> tuple[str, str]:
    """Return the field of a series, and its substitute when there are too many fields."""
    name, *labels = series
    return compact(series), compact([name, *(OTHER for _ in labels)])


def _parsed_gauges(worker: str, text: bytes, now: int) -> WorkerGauges | None:
    try:
        at, _, values = text.decode().partition("|")
        spool, waiting, *_ = json.loads(values)
        if now - int(at) > timing.current.worker_silent:
            return None
        return WorkerGauges(worker=worker, spool=int(spool), waiting=int(waiting))
    except (ValueError, TypeError):  # for example from a later version
        logger.debug("Skipped the gauges of %s, which cannot be read: %r", worker, text)
        return None
