"""``dlq export``: letters to Parquet files."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import click

from celery_dlq.cli import operation_tables
from celery_dlq.cli.context import (
    console_of,
    dead_letters_of,
    letter_filter,
    print_lines,
    ready_for_many,
)
from celery_dlq.cli.options import FILTER_NAMES, filter_options, json_option
from celery_dlq.cli.terminal import counting
from celery_dlq.features.redaction.rules import PATTERN_PREFIX


@click.command(short_help="Write letters to Parquet files; later runs add what is new.")
@click.argument("destination")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    help="Export only this dead-letter queue; can be given several times.",
)
@filter_options
@click.option(
    "--redact",
    multiple=True,
    metavar="PATHS",
    help="Replace values by tokens, e.g. kwargs.card,headers.auth; with re: what a regular "
    "expression matches.",
)
@click.option(
    "--redact-key-file",
    type=click.File("rb"),
    metavar="FILE",
    help="Read the secret of the tokens from this file instead of $DLQ_REDACT_KEY.",
)
@click.option("--follow", is_flag=True, help="Wait for new letters until Ctrl-C or SIGTERM.")
@click.option(
    "--roll-rows", type=click.IntRange(min=1), help="Begin a new file after this many letters."
)
@click.option(
    "--roll-bytes",
    type=click.IntRange(min=1),
    help="Begin a new file after this many bytes before compression.",
)
@click.option(
    "--roll-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="With --follow: begin a new file after this many seconds.",
)
@click.option(
    "--then-trim", is_flag=True, help="Remove letters after reading them back from the files."
)
@click.option(
    "--successes",
    is_flag=True,
    help="Export the sample that dlq_sample_successes made, not letters.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Go on in a folder of another store, or of this Redis before it was emptied.",
)
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    destination: str,
    *,
    queues: tuple[str, ...],
    redact: tuple[str, ...],
    redact_key_file: Any,
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write letters to Parquet files in DESTINATION; later runs add what is new.

    DESTINATION is a folder, or a URL such as s3://bucket/letters. All runs into it must
    have the same filter and redaction.
    """
    if redact_key_file is not None and not redact:
        raise click.UsageError("--redact-key-file needs --redact: nothing would be redacted")
    key = redact_key_file.read() if redact_key_file is not None else None
    if key is None and "DLQ_REDACT_KEY" in os.environ:
        key = os.environ["DLQ_REDACT_KEY"].encode()
    rest = {name: value for name, value in options.items() if name not in FILTER_NAMES}
    console, stop = console_of(ctx), _stop_event() if follow else None
    ready_for_many()
    with counting(console, "exported", quiet=as_json) as progress:
        report = dead_letters_of(ctx).export(
            destination,
            queues or None,
            letter_filter(options),
            redact=[rule for some in redact for rule in _rules(some)],
            redact_key=key,
            follow=stop,
            progress=progress,
            expected=progress.expect,
            **rest,
        )
    if as_json:
        print_lines([report.to_json()])
    else:
        operation_tables.exported(console, report)


def _rules(text: str) -> list[str]:
    """Rules separated by commas; a regular expression has commas of its own."""
    return [text] if text.startswith(PATTERN_PREFIX) else text.split(",")


def _stop_event() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets; the second one ends the process at once."""
    stop = threading.Event()

    def ask(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop
