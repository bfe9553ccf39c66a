"""The console script ``celery-dlq``, also ``python -m celery_dlq``."""

from __future__ import annotations

import click

from celery_dlq import __version__
from celery_dlq.cli.commands import PlainErrors


@click.group(cls=PlainErrors)
@click.version_option(__version__, prog_name="celery-dlq")
def main() -> None:
    """Dead-letter queues for Celery. The commands for operators are: celery -A PROJECT dlq."""


@main.command()
@click.option(
    "--folder",
    default="celery-dlq-demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Folder for the Parquet files, the report and the worker's log.",
)
@click.option("--web", is_flag=True, help="Show the letters in a browser, until Ctrl-C.")
def demo(folder: str, *, web: bool) -> None:
    """Show it on this machine: failing tasks, their letters, a report, a redrive.

    Needs no Redis, no Java and no network; takes about 20 seconds.
    """
    from celery_dlq.demo import run_demo  # noqa: PLC0415 - brings pyarrow and PySpark

    run_demo(folder, web=web)


if __name__ == "__main__":
    main()
