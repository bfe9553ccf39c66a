"""``dlq triage``: what fails and why, from an export."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from celery_dlq.cli.context import console_of, print_lines
from celery_dlq.cli.letters import reason_text
from celery_dlq.cli.options import MOMENT, json_option
from celery_dlq.cli.table import letters_text, line_text, print_table, say, utc_text
from celery_dlq.letters.printable import shortened

if TYPE_CHECKING:
    from celery_dlq.spark.triage.against import ComparedPeriod, RateChanges
    from celery_dlq.spark.triage.rows import Findings

_FEW_CAUSES, _MOST_CAUSES, _MOST_ROWS = 20, 100, 30
_MAX_EXAMPLE_CHARS = 100


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
    help="Compare with this folder, which `dlq export --successes` made.",
)
@click.option("--since", type=MOMENT, help="Died since then: 2h, yesterday, 2026-01-31 (UTC).")
@click.option("--until", type=MOMENT, help="Died before a time, in the forms of --since.")
@click.option("--queue", help="Only this dead-letter queue, e.g. orders-DLQ.")
@click.option("--task", help="Only this task, e.g. shop.charge.")
@click.option("--release", help="Only this release of the code, as dlq_release names it.")
@click.option("--fingerprint", help="Only this cause; its first digits are enough.")
@click.option(
    "--against",
    metavar="before|A..B|release=R|FOLDER",
    help="Compare: with the time before --since, from A to B, before a release, another folder.",
)
@click.option(
    "--summaries/--no-summaries",
    default=None,
    help="Keep a summary of each day in the folder, so that the next triage reads new days only. "
    "By default from 8 days and 1 GB of files on, where that is quicker.",
)
@json_option
@click.pass_context
def triage(
    ctx: click.Context,
    /,
    path: str,
    *,
    html: str | None,
    successes: str | None,
    against: str | None,
    summaries: bool | None,
    as_json: bool,
    **only: Any,
) -> None:
    """Show what fails and why, from the exported folder PATH, with PySpark.

    With --since, --until or --queue only the files of these days and this queue are read.

    With --against also what is new, gone, grown or shrunk, beyond chance. This week and last:
    --since 7d --against before. Before and after a release: --against release=v8.
    """
    result = _triage_result(path, html, successes, against, only, summaries=summaries)
    if as_json:
        print_lines([result.to_json()])
    else:
        show_triage(console_of(ctx), result)
        if html is not None:
            say(console_of(ctx), f"Report: {html}")


def _triage_result(
    path: str,
    html: str | None,
    successes: str | None,
    against: str | None,
    only: dict[str, Any],
    *,
    summaries: bool | None,
) -> Findings:
    from celery_dlq.spark.triage import rows  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.triage.selection import Selection  # noqa: PLC0415

    brief = html is None
    found = rows.findings(
        path,
        successes=successes,
        selection=Selection(**only),
        against=None if against is None else _against(against, only["since"]),
        brief=brief,
        summaries=summaries,
    )
    if html is not None:
        from celery_dlq.spark.page import write_page  # noqa: PLC0415 - needs more

        write_page(found, html, datetime.now(timezone.utc))
    return found


def _against(text: str, since: datetime | None) -> ComparedPeriod:
    """Read what ``--against`` names."""
    from celery_dlq.spark.triage.against import ComparedPeriod  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.triage.changes import Period  # noqa: PLC0415

    first, _, last = text.partition("..")
    name, _, release = text.partition("=")
    if text == "before":
        if since is None:
            raise click.UsageError("--against before needs --since, e.g. --since 7d")
        return ComparedPeriod()
    if name == "release" and release:
        if since is not None:
            raise click.UsageError("--against release=… has a begin of its own; leave out --since")
        return ComparedPeriod(release=release)
    if not first or not last or "/" in text:
        return ComparedPeriod(folder=text)
    period = tuple(MOMENT.convert(part, None, None) for part in (first, last))
    return ComparedPeriod(period=Period(*period))


def show_triage(console: Console, findings: Findings) -> None:
    """What is dying and why, in sentences; when, and after how many deliveries."""
    found = findings.triage
    span = f"{utc_text(found.first_seen_at)} to {utc_text(found.last_seen_at)}"
    say(console, f"{letters_text(found.letters)}, {span}", "bold")
    if findings.changes is not None:
        _changes(console, findings.changes, findings)
    _print_causes(console, findings)
    reasons = ((reason_text(one.reason), one.letters, f"{one.share:.0%}") for one in found.reasons)
    print_table(console, "Reasons", ("reason", ">letters", ">share"), reasons)
    totals: dict[datetime, int] = {}
    for bucket in found.timeline:
        totals[bucket.bucket_start] = totals.get(bucket.bucket_start, 0) + bucket.letters
    _timeline(console, found.bucket, sorted(totals.items())[-_MOST_ROWS:])
    _print_more(console, len(totals) - _MOST_ROWS, "Earlier times")
    deliveries = ((one.task_name, one.deliveries, one.letters) for one in found.deliveries)
    columns = ("task", ">deliveries", ">letters")
    print_table(console, "Deliveries before death", columns, islice(deliveries, _MOST_ROWS))
    _print_more(console, len(found.deliveries) - _MOST_ROWS, "Rows")


def _changes(console: Console, found: RateChanges, findings: Findings) -> None:
    """The largest changes against another time."""
    rows = (
        (
            line_text(row.fingerprint, "cyan"),
            line_text(row.kind, "bold"),
            row.letters,
            row.letters_against,
            found.rate_text(row),
            why.headline if why else f"{row.task_name}: {row.exception_type or ''}",
        )
        for row in found.rows
        for why in [findings.causes.get(row.fingerprint)]
    )
    columns = ("!fingerprint", "", ">letters", ">against", "rate", "cause")
    print_table(console, f"What changed: {found.heading}", columns, rows)
    say(console, found.note_text)


def _print_causes(console: Console, found: Findings) -> None:
    """The sentence of each cause that is explained, and its fingerprint for the next command."""
    explained = min(_MOST_CAUSES, len(found.causes))
    shown = found.triage.groups[: max(_FEW_CAUSES, explained)]
    rows = (
        (
            line_text(group.fingerprint, "cyan"),
            group.letters,
            (
                line_text(why.headline, "bold") if why else line_text("Not explained.", "dim"),
                line_text(f"{group.task_name}: {group.exception_type or ', '.join(group.reasons)}"),
                line_text(shortened(group.example_description or "", _MAX_EXAMPLE_CHARS), "dim"),
            ),
        )
        for group in shown
        for why in [found.causes.get(group.fingerprint)]
    )
    print_table(console, "Causes", ("!fingerprint", ">letters", "what fails, and why"), rows)
    _print_more(console, found.triage.causes - len(shown), "Smaller causes")
    causes, letters = found.unexplained
    if causes:
        which = "1 cause" if causes == 1 else f"{causes:,} causes"
        why_not = "20 or fewer of each, of no known cause, or beyond the largest 500 causes"
        say(console, f"Not explained: {which} with {letters_text(letters)}: {why_not}")


def _print_more(console: Console, number: int, what: str) -> None:
    if number > 0:
        say(console, f"{what} not shown: {number:,}")


def _timeline(console: Console, bucket: str, totals: list[tuple[datetime, int]]) -> None:
    most = max((letters for _start, letters in totals), default=1)
    rows = (
        (
            f"{start:%Y-%m-%d %H:%M:%S}",
            letters,
            line_text("█" * max(1, round(30 * letters / most)), "yellow"),
        )
        for start, letters in totals
    )
    print_table(console, f"Over time, by {bucket}", ("from (UTC)", ">letters", ""), rows)
