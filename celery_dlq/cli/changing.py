"""``dlq redrive``: what operators do to letters."""

from __future__ import annotations

from typing import Any

import click

from celery_dlq.cli.context import dead_letters_of, given, letter_filter, print_lines, screen_of
from celery_dlq.cli.options import filter_options, json_option


@click.command()
@click.argument("queue")
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--all", "everything", is_flag=True, help="All letters of the queue.")
@click.option("--rate", type=float, help="Most letters a second.")
@click.option("--limit", type=int, help="Most letters.")
@json_option
@click.pass_context
def redrive(
    ctx: click.Context,
    /,
    queue: str,
    letter_ids: tuple[str, ...],
    *,
    everything: bool,
    rate: float | None,
    limit: int | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Publish the original messages of letters again, then remove the letters.

    Choose letters by ID, by filter, or with --all. Body, id, callbacks, chain and
    group of a message stay as they were; its counts start anew.
    """
    where = letter_filter(fields, letter_ids)
    if not where and not everything:
        message = "expected IDs, a filter such as --fingerprint, or --all; got none of them"
        raise click.UsageError(message)
    dead_letters = dead_letters_of(ctx)
    if letter_ids:
        from celery_dlq.filters import LetterFilter  # noqa: PLC0415 - see the module's docstring

        whole = frozenset(dead_letters.get(letter_id, queue).id for letter_id in letter_ids)
        where = LetterFilter(**{**given(fields), "ids": whole})
    screen = screen_of(ctx)
    with screen.counting("redriven", quiet=as_json) as progress:
        report = dead_letters.redrive(queue, where, rate=rate, limit=limit, progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        screen.redriven(queue, report)
    if report.failed:
        ctx.exit(1)
