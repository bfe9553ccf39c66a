"""One process's part in the metrics: it counts in memory and now and then adds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from celery_dlq.metrics import REDRIVEN, Counts, MetricsStore, WorkerGauges

FLUSH_SECONDS = 5.0
"""A process that is killed loses the counts of at most so long."""


class Measuring:
    """Counts, and adds them to those of the app once every few seconds.

    Args:
        make_store: Makes the store of metrics, when there is first something to add.
        clock: Monotonic seconds.
    """

    def __init__(
        self, make_store: Callable[[], MetricsStore], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = Counts()
        self._make_store = make_store
        self._store: MetricsStore | None = None
        self._clock = clock
        self._flushed_at = clock()
        self._lock = threading.RLock()

    def use(self, store: MetricsStore) -> None:
        """Add up there from now on: a worker has a connection that this may share."""
        with self._lock:
            if self._store is None:
                self._store = store

    def redriven(self, dead_letter_queue: str, letters: int) -> None:
        """Count letters whose messages were published again."""
        self.counts.count(REDRIVEN, dead_letter_queue, by=letters)
        self.tick()

    def tick(self, gauges: Callable[[], WorkerGauges] | None = None) -> None:
        """Add up, if it is time."""
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush(gauges)

    def flush(self, gauges: Callable[[], WorkerGauges] | None = None) -> None:
        """Add up now; without gauges only if something was counted."""
        with self._lock:
            self._flushed_at = self._clock()
            if gauges is None and self.counts.empty:
                return
            if self._store is None:
                self._store = self._make_store()
            self.counts.flush(self._store, gauges() if gauges is not None else None)

    def close(self) -> None:
        """Add up and let go of the connection; the next flush opens another one."""
        with self._lock:
            self.flush()
            if self._store is not None:
                self._store.close()
                self._store = None
