"""``dlq export`` and ``triage``: letters as data."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from celery_dlq.cli.context import dead_letters_of, print_lines, screen_of
from celery_dlq.cli.options import json_option

if TYPE_CHECKING:
    from celery_dlq.spark.report import Triage


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
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Also write a report that says why: one file that needs no network.",
)
@json_option
@click.pass_context
def triage(
    ctx: click.Context, path: str, *, picture: str | None, html: str | None, as_json: bool
) -> None:
    """Say what is dying and why, with PySpark, from the exported folder PATH."""
    from celery_dlq.spark.report import triage as run_triage  # noqa: PLC0415 - PySpark is an extra

    if html is None:
        result = run_triage(path, picture)
    else:
        result = _with_page(path, picture, html)
    if as_json:
        print_lines([result.to_json()])
    else:
        screen_of(ctx).triage(result)
        if html is not None:
            screen_of(ctx).say(f"Report: {html}")


def _with_page(path: str, picture: str | None, html: str) -> Triage:
    from celery_dlq.spark.findings import findings  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.page import write_page  # noqa: PLC0415
    from celery_dlq.spark.picture import draw  # noqa: PLC0415

    found = findings(path)
    write_page(found, html, datetime.now(timezone.utc))
    drawn = None if picture is None else draw(found.triage, picture)
    return replace(found.triage, picture=drawn)
