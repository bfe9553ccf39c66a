"""The metrics of all processes in Redis, which add their counts to one hash."""

from __future__ import annotations

import json
from collections.abc import Mapping

from celery_dlq.letters.printable import get_logger
from celery_dlq.store.keys import compact
from celery_dlq.store.metrics import OTHER, Measured, Series, WorkerGauges
from celery_dlq.store.part import Part

logger = get_logger("celery_dlq.store")

SILENT_SECONDS = 30
"""Gauges of a worker that has not reported for this long are ignored."""

MOST_FIELDS = 5_000


class MetricsStore(Part):
    """Adds up the counts of all processes of an app."""

    def add(self, counts: Mapping[Series, int], gauges: WorkerGauges | None = None) -> bool:
        """Add counts without waiting, and never raise; False if the caller is to keep them."""
        worker = "" if gauges is None else gauges.worker
        values = "" if gauges is None else compact([gauges.spool, gauges.waiting])
        fields = [part for series, count in counts.items() for part in (*_names(series), count)]
        command = self._command("measure", MOST_FIELDS, worker, values, *fields)
        return self._connection.send_unanswered([command])

    def read(self) -> Measured:
        """Return all counts, and the gauges of workers that reported in the last half minute."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(self._keys.counts())
        pipe.hgetall(self._keys.gauges())
        counts, gauges = pipe.execute()
        now, _ = self._client.time()
        found = {}
        for series, count in counts.items():
            try:
                found[tuple(map(str, json.loads(series)))] = int(count)
            except (ValueError, TypeError):  # for example from a later version
                logger.debug("Skipped the count %r, which cannot be read", series)
        workers = (
            _gauges(name.decode("utf-8", "backslashreplace"), text, now)
            for name, text in sorted(gauges.items())
        )
        return Measured(counts=found, workers=tuple(worker for worker in workers if worker))


def _names(series: Series) -> tuple[str, str]:
    """Return the field of a series, and its substitute when there are too many fields."""
    name, *labels = series
    return compact(series), compact([name, *(OTHER for _ in labels)])


def _gauges(worker: str, text: bytes, now: int) -> WorkerGauges | None:
    try:
        at, _, values = text.decode().partition("|")
        spool, waiting, *_ = json.loads(values)
        if now - int(at) > SILENT_SECONDS:
            return None
        return WorkerGauges(worker=worker, spool=int(spool), waiting=int(waiting))
    except (ValueError, TypeError):  # for example from a later version
        logger.debug("Skipped the gauges of %s, which cannot be read: %r", worker, text)
        return None
