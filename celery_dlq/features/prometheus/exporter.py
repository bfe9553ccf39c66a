"""Serves the metrics of all workers to Prometheus, from their counts in the store."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.context import dead_letters_of
from celery_dlq.errors import DLQError, MissingExtra, StoreUnavailable
from celery_dlq.letters.printable import get_logger, one_line
from celery_dlq.registry import Measure, Metric, features
from celery_dlq.store import metrics
from celery_dlq.store.metrics import Measured
from celery_dlq.store.records import QueueSummary

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq.exporter")


class Exporter:
    """Reads the store at every scrape; ``celery_dlq_up`` is 0 if it does not answer."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._up = True
        self._lock = threading.Lock()

    def serve_metrics(self, *, port: int = 9808, address: str = "127.0.0.1") -> Any:
        """Serve the metrics of all workers to Prometheus, in a thread of this process.

        Args:
            port: TCP port; 0 for any free one.
            address: Address to listen on.

        Returns:
            The HTTP server; ``shutdown()`` ends it.

        Raises:
            MissingExtra: prometheus-client is not installed.
            DLQError: The port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
        except ImportError as exc:
            feature, package = "dlq exporter", "prometheus-client"
            raise MissingExtra(feature, package, "prometheus") from exc
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, _thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError) as exc:
            raise DLQError(
                f"expected {address}:{port} to be free for the exporter, got {exc}; stop the "
                f"process that listens there or choose another --port"
            ) from exc
        return server

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Answer one scrape."""
        with self._lock:  # concurrent scrapes share one connection
            try:
                backend = self._assembly.backend
                measured, queues = backend.metrics.read_all(), backend.letters.overviews.queues()
                memory, others = backend.memory(), list(self._of_features())
            except StoreUnavailable as exc:
                self._note_state(up=False, text=f"The store does not answer: {exc}")
                yield _gauge_family(metrics.UP, [((), 0)])
                return
            self._note_state(up=True, text="The store answers again")
        yield _gauge_family(metrics.UP, [((), 1)])
        yield from _counters(measured)
        for metric, samples in _samples(measured, queues, self._assembly.clock()).items():
            yield _gauge_family(metric, samples)
        yield from others
        share = None if memory is None else memory.share
        yield _gauge_family(metrics.MEMORY, [] if share is None else [((), share)])

    def _of_features(self) -> Iterator[GaugeMetricFamily]:
        """The gauges of features."""
        for feature in features():
            for metric in feature.metrics:
                if metric.read:
                    yield _gauge_family(metric, feature.load(metric.read)(self._assembly))

    def _note_state(self, *, up: bool, text: str) -> None:
        if up != self._up:
            self._up = up
            logger.log(logging.INFO if up else logging.ERROR, "%s", text)


@click.command(short_help="Serve the metrics of all workers to Prometheus.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9808,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.pass_context
def exporter(ctx: click.Context, *, port: int, address: str) -> None:
    """Serve the metrics of all workers to Prometheus.

    One process serves all workers of the app: it reads Redis at every scrape. While
    Redis does not answer, celery_dlq_up is 0.
    """
    server = dead_letters_of(ctx).serve_metrics(port=port, address=address)
    click.echo(f"Serving metrics at http://{address}:{server.server_port}/metrics")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    server.shutdown()
    server.server_close()


MetricSamples = Iterable[tuple[tuple[str, ...], float]]


def _counters(measured: Measured) -> Iterator[CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415 - an extra

    for metric in metrics.METRICS.values():
        if metric.measure is not Measure.COUNTER:
            continue
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for (name, *labels), count in sorted(measured.counts.items()):
            if name == metric.name and len(labels) == len(metric.labels):
                family.add_metric(tuple(map(one_line, labels)), count)
        yield family


def _samples(
    measured: Measured, queues: list[QueueSummary], now: datetime
) -> dict[Metric, MetricSamples]:
    workers = measured.workers
    ages = {q.name: (now - q.oldest_at).total_seconds() for q in queues if q.oldest_at}
    ages |= {q.name: 0.0 for q in queues if not q.letters}  # any other unknown age is not 0
    return {
        metrics.WORKERS: [((), len(workers))],
        metrics.SPOOL: [((w.worker,), w.spool) for w in workers],
        metrics.WAITING: [((w.worker,), w.waiting) for w in workers],
        metrics.LENGTH: [((q.name,), q.letters) for q in queues],
        metrics.BYTES: [((q.name,), q.memory_bytes) for q in queues if q.memory_bytes is not None],
        metrics.OLDEST: [((name,), max(0.0, age)) for name, age in ages.items()],
        metrics.LETTERS: [((q.name, why), n) for q in queues for why, n in q.reasons.items()],
    }


def _gauge_family(metric: Metric, samples: MetricSamples) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(tuple(map(one_line, labels)), value)
    return family
