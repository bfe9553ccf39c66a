"""What operators read of workers and of each other, in Redis: metrics and the audit log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from celery_dlq import timing
from celery_dlq.events import Change
from celery_dlq.letters.printable import get_logger, readable
from celery_dlq.store.keys import compact
from celery_dlq.store.metrics import Measured, WorkerGauges
from celery_dlq.store.registrations import NewCounts, Registrations

logger = get_logger("celery_dlq.store")

_MAX_CHANGES = 10_000
_MAX_OPEN_CHANGES = 1_000  # of processes that were killed, and of jobs that nobody resumed


class OpenChange(NamedTuple):
    """The change of an operation that has not ended; its letters are counted by the operation."""

    change: Change
    before: int  # Letters of the operation that earlier changes have
    text: str  # Both as they are stored


_Changes = tuple[list[Change], dict[str, OpenChange]]


class WorkerRegistry(Registrations):
    """Keeps what workers report of themselves, and the audit log."""

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


class MetricsStore(NewCounts):
    """Adds up the counts of all processes of an app, in one hash."""

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


def _shortened(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


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
