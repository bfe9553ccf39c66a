"""``dlq triage``: what fails and why, from an export."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from celery_dlq.cli.context import console_of, print_lines
from celery_dlq.cli.letters import reason
from celery_dlq.cli.options import MOMENT, json_option
from celery_dlq.cli.table import block, letters_text, line, say, table, utc
from celery_dlq.letters.printable import shortened

if TYPE_CHECKING:
    from celery_dlq.spark.triage.rows import Triage

_MOST_GROUPS, _MOST_ROWS = 20, 30


@click.command(short_help="Show what fails and why, from an export, with PySpark.")
@click.argument("path", type=click.Path())
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
@click.option("--since", type=MOMENT, help="Died since then: 2h, yesterday, 2026-01-31 (UTC).")
@click.option("--until", type=MOMENT, help="Died before a time, in the forms of --since.")
@click.option("--queue", help="Only this dead-letter queue, e.g. orders-DLQ.")
@click.option("--task", help="Only this task, e.g. shop.charge.")
@click.option("--release", help="Only this release of the code, as dlq_release names it.")
@click.option("--fingerprint", help="Only this cause; its first digits are enough.")
@json_option
@click.pass_context
def triage(
    ctx: click.Context,
    /,
    path: str,
    *,
    html: str | None,
    successes: str | None,
    as_json: bool,
    **only: Any,
) -> None:
    """Show what fails and why, from the exported folder PATH, with PySpark.

    With --since, --until or --queue only the files of these days and this queue are read.
    """
    if html is None and successes is not None:
        raise click.UsageError("--successes needs --html: only the report compares")
    result = _result(path, html, successes, only)
    if as_json:
        print_lines([result.to_json()])
    else:
        show_triage(console_of(ctx), result)
        if html is not None:
            say(console_of(ctx), f"Report: {html}")


def _result(path: str, html: str | None, successes: str | None, only: dict[str, Any]) -> Triage:
    from celery_dlq.spark.triage import rows  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.triage.selection import Selection  # noqa: PLC0415

    selection = Selection(**only)
    if html is None:
        return rows.triage(path, selection=selection)
    from celery_dlq.spark.page import write_page  # noqa: PLC0415 - needs more

    found = rows.findings(path, successes=successes, selection=selection)
    write_page(found, html, datetime.now(timezone.utc))
    return found.triage


def show_triage(console: Console, found: Triage) -> None:
    """What is dying, why, when, and after how many deliveries."""
    span = f"{utc(found.first_seen_at)} to {utc(found.last_seen_at)}"
    say(console, f"{letters_text(found.letters)}, {span}", "bold")
    groups = (
        (
            group.letters,
            line(group.task_name, "bold"),
            group.exception_type or ", ".join(group.reasons),
            block(shortened(group.example_description or "", 100)),
        )
        for group in found.groups[:_MOST_GROUPS]
    )
    table(console, "Causes: what fails", (">letters", "task", "cause", "example"), groups)
    _more(console, found.causes - _MOST_GROUPS, "Smaller groups")
    reasons = ((reason(one.reason), one.letters, f"{one.share:.0%}") for one in found.reasons)
    table(console, "Reasons", ("reason", ">letters", ">share"), reasons)
    totals: dict[datetime, int] = {}
    for bucket in found.timeline:
        totals[bucket.bucket_start] = totals.get(bucket.bucket_start, 0) + bucket.letters
    _timeline(console, found.bucket, sorted(totals.items())[-_MOST_ROWS:])
    _more(console, len(totals) - _MOST_ROWS, "Earlier times")
    deliveries = ((one.task_name, one.deliveries, one.letters) for one in found.deliveries)
    columns = ("task", ">deliveries", ">letters")
    table(console, "Deliveries before death", columns, islice(deliveries, _MOST_ROWS))
    _more(console, len(found.deliveries) - _MOST_ROWS, "Rows")


def _more(console: Console, number: int, what: str) -> None:
    if number > 0:
        say(console, f"{what} not shown: {number:,}")


def _timeline(console: Console, bucket: str, totals: list[tuple[datetime, int]]) -> None:
    most = max((letters for _start, letters in totals), default=1)
    rows = (
        (
            f"{start:%Y-%m-%d %H:%M:%S}",
            letters,
            line("█" * max(1, round(30 * letters / most)), "yellow"),
        )
        for start, letters in totals
    )
    table(console, f"Over time, by {bucket}", ("from (UTC)", ">letters", ""), rows)
