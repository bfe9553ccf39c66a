"""``dlq export`` and ``triage``: letters as data."""

from __future__ import annotations

import click

from celery_dlq.cli.context import dead_letters_of, print_lines, screen_of
from celery_dlq.cli.options import json_option


@click.command()
@click.argument("destination", type=click.Path(file_okay=False))
@click.option("--queue", "chosen", multiple=True, help="Only this queue; may be given again.")
@json_option
@click.pass_context
def export(ctx: click.Context, destination: str, *, chosen: tuple[str, ...], as_json: bool) -> None:
    """Write letters to Parquet files in the folder DESTINATION; again writes only what is new."""
    screen = screen_of(ctx)
    with screen.counting("exported", quiet=as_json) as progress:
        report = dead_letters_of(ctx).export(destination, chosen or None, progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        screen.exported(report)


@click.command()
@click.argument("path", type=click.Path())
@click.option("--picture", type=click.Path(dir_okay=False), help="Also draw the triage as a PNG.")
@json_option
@click.pass_context
def triage(ctx: click.Context, path: str, *, picture: str | None, as_json: bool) -> None:
    """Say what is dying and why, with PySpark, from the exported folder PATH."""
    from celery_dlq.spark.report import triage as run_triage  # noqa: PLC0415 - PySpark is an extra

    result = run_triage(path, picture)
    if as_json:
        print_lines([result.to_json()])
    else:
        screen_of(ctx).triage(result)
