"""``dlq triage``: what is dying and why, from an export."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from celery_dlq.cli import triage_tables
from celery_dlq.cli.context import console_of, print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.cli.terminal import say

if TYPE_CHECKING:
    from celery_dlq.spark.report import Triage


@click.command(short_help="Show what is dying and why, with PySpark, from an export.")
@click.argument("path", type=click.Path())
@click.option(
    "--picture", type=click.Path(dir_okay=False), help="Also draw the triage as a PNG file."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Also write a report on the causes: one HTML file that needs no network.",
)
@click.option(
    "--successes",
    type=click.Path(),
    help="Compare with this folder, which `dlq export --successes` made; needs --html.",
)
@json_option
@click.pass_context
def triage(
    ctx: click.Context,
    path: str,
    *,
    picture: str | None,
    html: str | None,
    successes: str | None,
    as_json: bool,
) -> None:
    """Show what is dying and why, with PySpark, from the exported folder PATH."""
    from celery_dlq.spark.report import triage as run_triage  # noqa: PLC0415 - PySpark is an extra

    if html is None and successes is not None:
        raise click.UsageError("--successes needs --html: only the report compares")
    result = (
        run_triage(path, picture) if html is None else _with_page(path, picture, html, successes)
    )
    if as_json:
        print_lines([result.to_json()])
    else:
        triage_tables.triage(console_of(ctx), result)
        if html is not None:
            say(console_of(ctx), f"Report: {html}")


def _with_page(path: str, picture: str | None, html: str, successes: str | None) -> Triage:
    from celery_dlq.spark.findings import findings  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.page import write_page  # noqa: PLC0415
    from celery_dlq.spark.picture import draw  # noqa: PLC0415

    found = findings(path, successes=successes)
    write_page(found, html, datetime.now(timezone.utc))
    drawn = None if picture is None else draw(found.triage, picture)
    return replace(found.triage, picture=drawn)
