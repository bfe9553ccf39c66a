"""``dlq export``: letters to Parquet files."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from celery_dlq.cli.context import console_of, dead_letters_of, print_lines, ready_for_many
from celery_dlq.cli.options import FILTER_NAMES, filter_options, json_option, letter_filter
from celery_dlq.cli.table import (
    FORGET,
    counting,
    letters_text,
    say,
    successes_text,
    unreadable_text,
)
from celery_dlq.errors import ExportError
from celery_dlq.letters.printable import some_of
from celery_dlq.letters.redaction import PATTERN_PREFIX

if TYPE_CHECKING:
    from celery_dlq.export.exporter import ExportReport

_MAX_FOREIGN_FILES = 5
_GIVEN = click.core.ParameterSource.COMMANDLINE


@click.command(short_help="Write letters to Parquet files; later runs add what is new.")
@click.argument("destination")
@click.option(
    "--queue", "queues", multiple=True, help="Only this dead-letter queue; may be repeated."
)
@filter_options
@click.option(
    "--redact",
    multiple=True,
    metavar="PATHS",
    help="Replace these values by tokens, e.g. kwargs.card,headers.auth, or re:EXPRESSION.",
)
@click.option(
    "--redact-key-file",
    type=click.File("rb"),
    metavar="FILE",
    help="File with the key of the tokens.  [default: $DLQ_REDACT_KEY]",
)
@click.option("--follow", is_flag=True, help="Wait for new letters until Ctrl-C or SIGTERM.")
@click.option(
    "--roll-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="With --follow: begin a new file after this many seconds.",
)
@click.option(
    "--then-trim",
    is_flag=True,
    help="Remove the letters, after reading the files back; not those that another folder lacks.",
)
@click.option(
    "--successes", is_flag=True, help="Export the successes that dlq_sample_successes keeps."
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Continue a folder that another Redis began, or this one before it was emptied.",
)
@click.option(
    "--forget",
    is_flag=True,
    help="Export nothing, and keep no more letters for this folder, which may be gone.",
)
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    destination: str,
    *,
    forget: bool,
    queues: tuple[str, ...],
    redact: tuple[str, ...],
    redact_key_file: Any,
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write letters to Parquet files in DESTINATION; later runs add what is new.

    DESTINATION is a folder, or a URL such as s3://bucket/letters. All runs into it must
    have the same filter and redaction. The exit code is 1 where exports to other folders have
    removed letters before.
    """
    if forget:
        _forget_export(ctx, destination)
        return
    if redact_key_file is not None and not redact:
        raise click.UsageError("--redact-key-file needs --redact: nothing would be redacted")
    key = redact_key_file.read() if redact_key_file is not None else None
    if key is None and "DLQ_REDACT_KEY" in os.environ:
        key = os.environ["DLQ_REDACT_KEY"].encode()
    rest = {name: value for name, value in options.items() if name not in FILTER_NAMES}
    console, stop = console_of(ctx), stop_event() if follow else None
    ready_for_many()
    with counting(console, "exported", quiet=as_json) as progress:
        report = dead_letters_of(ctx).export(
            destination,
            queues or None,
            letter_filter(options),
            redact=[rule for some in redact for rule in _split_rules(some)],
            redact_key=key,
            follow=stop,
            progress=progress,
            expected=progress.expect,
            **rest,
        )
    if as_json:
        print_lines([report.to_json()])
    else:
        show_exported(console, report, successes=options["successes"])
    if report.missing:
        raise ExportError(
            f"{report.destination} lacks letters that exports to other folders removed before "
            f"(--then-trim): {report.missing_text()}"
        )


def _forget_export(ctx: click.Context, destination: str) -> None:
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is _GIVEN}
    if given > {"destination", "forget"}:
        raise click.UsageError("--forget exports nothing: it takes no other option")
    queues = dead_letters_of(ctx).forget_export(destination)
    say(console_of(ctx), f"No more letters of {some_of(queues)} are kept for {destination}.")


def _split_rules(text: str) -> list[str]:
    """Rules separated by commas; a regular expression has commas of its own."""
    return [text] if text.startswith(PATTERN_PREFIX) else text.split(",")


def stop_event() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets; the second one ends the process at once."""
    stop = threading.Event()

    def ask(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


def show_exported(console: Console, report: ExportReport, *, successes: bool = False) -> None:
    """What an export wrote: letters, or successes."""
    if report.letters:
        files = f"{report.files:,} file{'' if report.files == 1 else 's'}"
        size = f"{report.bytes / 1024:,.0f} KiB in {files}"
        count = successes_text(report.letters) if successes else letters_text(report.letters)
        what = f"{count} ({size}) to {report.destination}"
        say(console, f"Exported {what}")
    else:
        up_to_date = "" if report.missing else f"; {report.destination} is up to date"
        say(console, f"Nothing new to export{up_to_date}.")
    if report.trimmed:
        say(console, f"Trimmed {letters_text(report.trimmed)}, after reading the files back.")
    _show_others(console, report)
    if report.compared:
        names = ", ".join(report.compared)
        say(console, f"Read again; letters that the files have were left out: {names}", "yellow")
    if report.waiting:
        names = ", ".join(report.waiting)
        say(console, f"Letters that died after --until were left for a later export: {names}")
    if report.unreadable:
        left_out = f"Not exported: {unreadable_text(report.unreadable)}."
        say(console, f"{left_out} `dlq show` and `dlq discard` take a position:", "bold red")
        for place in report.unreadable_at:
            say(console, f"  {place}", "red")
        if more := report.unreadable - len(report.unreadable_at):
            say(console, f"  and {more:,} more", "red")
    if report.foreign:
        names = ", ".join(report.foreign[:_MAX_FOREIGN_FILES])
        say(console, f"No export made these files, and Spark may fail on them: {names}", "yellow")


def _show_others(console: Console, report: ExportReport) -> None:
    """What other folders lack, and what left the queues before this folder was there."""
    for name, folders in report.kept_for.items():
        text = f"Letters of {name} stay there until each of these folders has them"
        say(console, f"{text}: {some_of(folders)}.")
    if report.kept_for:
        say(console, FORGET)
    for name, letters in report.gone.items():
        most = f"{'Besides, at' if report.missing else 'At'} most {letters_text(letters)}"
        why = "redriven, discarded, purged or trimmed; see `dlq audit`"
        say(console, f"{most} left {name} before this first export ({why}).", "yellow")
    for one in report.maybe_missing:
        text = f"Exports to {one['folder']} removed letters of {one['dead_letter_queue']} before"
        why = "it is not known whether the filter of this folder matches any"
        say(console, f"{text}, stored until {one['until']}; {why}.", "yellow")
