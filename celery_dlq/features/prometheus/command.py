"""``dlq exporter``: the metrics of all workers, for Prometheus."""

from __future__ import annotations

import signal
import threading

import click

from celery_dlq.cli.context import dead_letters_of


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
