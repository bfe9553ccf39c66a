"""The metrics of the core, those of features beside them, and the counts of one process.

A process counts in memory and regularly adds its counts to those of the app in the store,
where one exporter reads them for all workers. A process that is killed loses the counts of its
last seconds. Numbers of letters are read from the dead-letter queues and are always exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from celery_dlq import registry, timing
from celery_dlq.letters.printable import get_logger
from celery_dlq.registry import Metric

OTHER = "(other)"
"""Replaces names of tasks beyond `MAX_TASKS`, and all labels of series beyond `MAX_SERIES`."""

SUCCEEDED = "succeeded"
"""Outcome of a delivery that did not fail; the other outcomes are those of `Outcome`."""

MAX_TASKS = 200
"""A process counts this many tasks by their names, the others as one."""

MAX_SERIES = 2_000
"""A process counts this many series; more only exist where names are made up at run time."""

DELIVERIES = Metric.counter(
    "deliveries", "queue outcome task", "Deliveries that ended, by their outcome."
)
DUPLICATES = Metric.counter(
    "duplicate_deliveries",
    "queue",
    "Deliveries of messages that still ran elsewhere, or whose letter was stored before.",
)
UNCOUNTED = Metric.counter(
    "uncounted_deliveries", "queue", "Deliveries that ran although the store could not count them."
)
DEAD_LETTERS = Metric.counter(
    "dead_letters", "queue dead_letter_queue reason task", "Letters that workers stored."
)
DIED_AGAIN = Metric.counter(
    "died_again", "queue dead_letter_queue task", "Letters of messages that were redriven before."
)
REGRESSED = Metric.counter(
    "regressed_groups", "queue dead_letter_queue task", "Resolved groups whose cause came back."
)
REDRIVEN = Metric.counter(
    "redriven", "dead_letter_queue", "Letters whose message was published again."
)
RESTORED = Metric.counter(
    "restored_messages", "", "Messages of workers that died, returned to their queues by a lease."
)
LOST_LEASES = Metric.counter(
    "lost_leases", "", "Messages that others took from a worker silent for longer than its lease."
)
STORE_ERRORS = Metric.counter(
    "store_errors", "operation", "Times the store failed, or the broker at a renewal (`lease`)."
)
INTERNAL_ERRORS = Metric.counter(
    "internal_errors", "operation", "Errors of the plugin itself; each is in the log."
)

UP = Metric.gauge("up", "", "1 if the store answered; else 0, and nothing else is shown.")
WORKERS = Metric.gauge("workers", "", "Workers that reported in the last half minute.")
LETTERS = Metric.gauge("letters", "dead_letter_queue reason", "Letters there are now.")
LENGTH = Metric.gauge("queue_length", "dead_letter_queue", "Letters there are now, of any reason.")
OLDEST = Metric.gauge(
    "oldest_letter_age_seconds", "dead_letter_queue", "Age of the oldest letter; 0 without any."
)
BYTES = Metric.gauge(
    "letter_bytes", "dead_letter_queue", "Memory of the letters in Redis, estimated."
)
MEMORY = Metric.gauge("memory_used_ratio", "", "Share of `maxmemory` in use, of the fullest Redis.")
SPOOL = Metric.gauge("spool_letters", "worker", "Letters on the worker's disk, or its host's.")
WAITING = Metric.gauge(
    "waiting_letters", "worker", "Letters in the worker's memory, not acknowledged yet."
)

_CORE = (
    *(DELIVERIES, DUPLICATES, UNCOUNTED, DEAD_LETTERS, DIED_AGAIN, REGRESSED, REDRIVEN),
    *(RESTORED, LOST_LEASES, STORE_ERRORS, INTERNAL_ERRORS),
    *(UP, WORKERS, LETTERS, LENGTH, OLDEST, BYTES, MEMORY, SPOOL, WAITING),
)
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (*_CORE, *(metric for each in registry.features() for metric in each.metrics))
}

Series = tuple[str, ...]
"""The name of a counter and the values of its labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGauges:
    """Gauges that a worker reports with its counts."""

    worker: str
    spool: int = 0  # Letters on its disk
    waiting: int = 0  # Letters in its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The counts of all processes of an app, and the gauges of its live workers."""

    counts: Mapping[Series, int] = field(default_factory=dict)
    workers: tuple[WorkerGauges, ...] = ()


Add = Callable[[Mapping[Series, int], WorkerGauges | None], bool]
"""Adds counts to those of the app, see `MetricsStore`; False if they are to be kept."""


class Counts:
    """The counts of one process, kept in memory until they are flushed."""

    def __init__(self) -> None:
        self._counts: dict[Series, int] = {}
        self._tasks: set[str] = set()
        self._lock = threading.Lock()  # pools of threads end tasks in several

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Count something that happened."""
        series = (metric.name, *labels)
        with self._lock:
            if series not in self._counts:
                series = self._bounded(metric, series)
            self._counts[series] = self._counts.get(series, 0) + by

    def _bounded(self, metric: Metric, series: Series) -> Series:
        """Return a series that is new, or another if there are too many."""
        if metric.labels[-1:] == ("task",):
            if series[-1] not in self._tasks and len(self._tasks) >= MAX_TASKS:
                series = (*series[:-1], OTHER)
            else:
                self._tasks.add(series[-1])
        if series not in self._counts and len(self._counts) >= MAX_SERIES:
            return (metric.name, *(OTHER for _ in metric.labels))
        return series

    def flush(self, add: Add, gauges: WorkerGauges | None = None) -> None:
        """Add all counts to those in the store; keep them for the next flush if that fails."""
        with self._lock:
            counts, self._counts = self._counts, {}
        if (counts or gauges) and not add(counts, gauges):
            for (name, *labels), number in counts.items():
                self.count(METRICS[name], *labels, by=number)

    @property
    def empty(self) -> bool:
        """True if nothing waits to be flushed."""
        return not self._counts


logger = get_logger("celery_dlq.worker")


class Measuring:
    """Counts, and adds them to those of the app once every few seconds."""

    def __init__(self, add: Callable[[], Add]) -> None:
        self.counts = Counts()
        self.gauges: Callable[[], WorkerGauges] | None = None
        self._tells = False  # they were not 0
        self._add = add
        self._flushed_at = time.monotonic()
        self._lock = threading.RLock()

    def redriven(self, dead_letter_queue: str, letters: int) -> None:
        """Count letters whose messages were published again."""
        self.counts.count(REDRIVEN, dead_letter_queue, by=letters)
        self.tick()

    def tick(self) -> None:
        """Add up, if it is time."""
        if time.monotonic() - self._flushed_at >= timing.current.metrics_flush:
            self.flush()

    def flush(self) -> None:
        """Add up now, if something was counted, or a gauge is or was not 0."""
        with self._lock:
            self._flushed_at = time.monotonic()
            gauges, told = self.gauges() if self.gauges else None, self._tells
            self._tells = gauges is not None and (gauges.spool or gauges.waiting) > 0
            if self._tells or told or not self.counts.empty:
                self.counts.flush(self._add(), gauges)

    def close(self) -> None:
        """Add up for the last time; never raises."""
        try:
            self.flush()
        except Exception:
            logger.exception("The last metrics of this process are not written")
