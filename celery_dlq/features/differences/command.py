"""``dlq differences``: what some letters have that others lack."""

from __future__ import annotations

from typing import Any

import click

from celery_dlq.cli.context import (
    console_of,
    dead_letters_of,
    none_matched,
    print_lines,
    queue_of,
)
from celery_dlq.cli.options import (
    filter_options,
    json_option,
    letter_filter,
    queue_or_cause_argument,
)
from celery_dlq.cli.table import line_text, print_table, say
from celery_dlq.features.differences.findings import Finding

_DEADLINE_SECONDS = 10.0


@click.command(short_help="Show what some letters have that others lack.")
@queue_or_cause_argument
@filter_options
@json_option
@click.pass_context
def differences(ctx: click.Context, /, queue: str | None, *, as_json: bool, **options: Any) -> None:
    """Show what letters of QUEUE that match the filter have and others lack.

    Others are the other letters of QUEUE, and successes if dlq_sample_successes samples
    them. Compares the newest, at most 5,000 messages, and reads for at most 10 seconds.
    """
    queue = queue_of(ctx, queue, options)
    where, console = letter_filter(options), console_of(ctx)
    dead_letters = dead_letters_of(ctx)
    found = dead_letters.differences(queue, where, deadline_seconds=_DEADLINE_SECONDS)
    if where and not found.letters and not found.cut:
        raise none_matched(dead_letters, queue, where)
    if as_json:
        print_lines([found.to_json()])
        return
    for place, text in enumerate(found.sentences):
        say(console, text, "" if place else "bold")
    print_table(console, "Differences", (">here", ">against", ""), map(_row, found.findings))


def _row(one: Finding) -> tuple[Any, ...]:
    also = f"nearly the same letters: {', '.join(one.also)}" if one.also else ""
    shares = f"{one.letters:,} of {one.of_letters:,}", f"{one.others:,} of {one.of_others:,}"
    return (*shares, (one.text, line_text(also, "dim")))
