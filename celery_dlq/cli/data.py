"""``dlq export`` and ``triage``: letters as data."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.context import (
    dead_letters_of,
    letter_filter,
    print_lines,
    ready_for_many,
    screen_of,
)
from celery_dlq.cli.options import FILTER_NAMES, filter_options, json_option

if TYPE_CHECKING:
    from celery_dlq.spark.report import Triage


@click.command(short_help="Write letters to Parquet files; again writes what is new.")
@click.argument("destination")
@click.option("--queue", "chosen", multiple=True, help="Only this queue; may be given again.")
@filter_options
@click.option(
    "--redact",
    multiple=True,
    metavar="PATHS",
    help="Replace values by tokens, e.g. kwargs.card,headers.auth.",
)
@click.option(
    "--redact-key-file",
    type=click.File("rb"),
    metavar="FILE",
    help="File with the tokens' secret; else $DLQ_REDACT_KEY.",
)
@click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C or SIGTERM.")
@click.option("--roll-rows", type=click.IntRange(min=1), help="Close files after so many letters.")
@click.option(
    "--roll-bytes", type=click.IntRange(min=1), help="Or after so many bytes before compression."
)
@click.option(
    "--roll-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Or, with --follow, after so many seconds.",
)
@click.option(
    "--then-trim", is_flag=True, help="Remove letters once they were read back from the files."
)
@click.option(
    "--successes", is_flag=True, help="Write the sample that dlq_sample_successes made instead."
)
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    destination: str,
    *,
    chosen: tuple[str, ...],
    redact: tuple[str, ...],
    redact_key_file: Any,
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write letters to Parquet files in DESTINATION; again writes only what is new.

    DESTINATION is a folder, or a URL such as s3://bucket/letters. It keeps to the filter
    and the redaction that it was begun with.
    """
    if redact_key_file is not None and not redact:
        raise click.UsageError("--redact-key-file needs --redact, or nothing would be redacted")
    key = redact_key_file.read() if redact_key_file is not None else None
    if key is None and "DLQ_REDACT_KEY" in os.environ:
        key = os.environ["DLQ_REDACT_KEY"].encode()
    rest = {name: value for name, value in options.items() if name not in FILTER_NAMES}
    screen, stop = screen_of(ctx), _stop_event() if follow else None
    ready_for_many()
    with screen.counting("exported", quiet=as_json) as progress:
        report = dead_letters_of(ctx).export(
            destination,
            chosen or None,
            letter_filter(options),
            redact=[path for some in redact for path in some.split(",")],
            redact_key=key,
            follow=stop,
            progress=progress,
            expected=progress.expect,
            **rest,
        )
    if as_json:
        print_lines([report.to_json()])
    else:
        screen.exported(report)


def _stop_event() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets; the second one ends the process at once."""
    stop = threading.Event()

    def ask(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


@click.command(short_help="Say what is dying and why, with PySpark, from an export.")
@click.argument("path", type=click.Path())
@click.option("--picture", type=click.Path(dir_okay=False), help="Also draw the triage as a PNG.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Also write a report that says why: one file that needs no network.",
)
@click.option(
    "--successes",
    type=click.Path(),
    help="Folder made by dlq export --successes, for the report to compare with.",
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
    """Say what is dying and why, with PySpark, from the exported folder PATH."""
    from celery_dlq.spark.report import triage as run_triage  # noqa: PLC0415 - PySpark is an extra

    if html is None and successes is not None:
        raise click.UsageError("--successes needs --html: the report is what compares")
    result = (
        run_triage(path, picture) if html is None else _with_page(path, picture, html, successes)
    )
    if as_json:
        print_lines([result.to_json()])
    else:
        screen_of(ctx).triage(result)
        if html is not None:
            screen_of(ctx).say(f"Report: {html}")


def _with_page(path: str, picture: str | None, html: str, successes: str | None) -> Triage:
    from celery_dlq.spark.findings import findings  # noqa: PLC0415 - PySpark is an extra
    from celery_dlq.spark.page import write_page  # noqa: PLC0415
    from celery_dlq.spark.picture import draw  # noqa: PLC0415

    found = findings(path, successes=successes)
    write_page(found, html, datetime.now(timezone.utc))
    drawn = None if picture is None else draw(found.triage, picture)
    return replace(found.triage, picture=drawn)
