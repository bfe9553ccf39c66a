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
    from celery_dlq.spark.triage.rows import Triage


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
    if html is None and successes is not None:
        raise click.UsageError("--successes needs --html: only the report compares")
    result = _result(path, picture, html, successes)
    if as_json:
        print_lines([result.to_json()])
    else:
        triage_tables.triage(console_of(ctx), result)
        if html is not None:
            say(console_of(ctx), f"Report: {html}")


def _result(path: str, picture: str | None, html: str | None, successes: str | None) -> Triage:
    from celery_dlq.spark.triage import rows  # noqa: PLC0415 - PySpark is an extra

    if html is None:
        result = rows.triage(path)
    else:
        from celery_dlq.spark.render.page import write_page  # noqa: PLC0415 - needs more

        found = rows.findings(path, successes=successes)
        write_page(found, html, datetime.now(timezone.utc))
        result = found.triage
    if picture is None:
        return result
    from celery_dlq.spark.render.charts import draw  # noqa: PLC0415 - Matplotlib takes its time

    # Without Spark: by now its memory is free again.
    return replace(result, picture=draw(result, picture))
