"""Metrics in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from celery_dlq.metrics import Measured, Series, WorkerGauges


class MemoryMetrics:
    """The `MetricsStore` in memory."""

    def __init__(self) -> None:
        self._counts: Counter[Series] = Counter()
        self._workers: dict[str, WorkerGauges] = {}

    def add(self, counts: Mapping[Series, int], gauges: WorkerGauges | None = None) -> bool:
        """Add counts, and replace the gauges of a worker."""
        self._counts.update(counts)
        if gauges is not None:
            self._workers[gauges.worker] = gauges
        return True

    def read(self) -> Measured:
        """Return all counts and gauges."""
        workers = tuple(gauges for _, gauges in sorted(self._workers.items()))
        return Measured(counts=dict(self._counts), workers=workers)
