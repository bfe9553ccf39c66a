"""``dlq discard``, ``purge``, ``restore``, ``trim``: letters leave their queue, or return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli import operation_tables
from celery_dlq.cli.context import (
    chosen,
    console_of,
    dead_letters_of,
    none_matched,
    print_lines,
    ready_for_many,
)
from celery_dlq.cli.jobs import StartAt, hand_over, in_background
from celery_dlq.cli.options import background_options, filter_options, json_option
from celery_dlq.cli.terminal import counting, letters_text, say
from celery_dlq.letters.printable import one_line
from celery_dlq.operations.results import DiscardReport

if TYPE_CHECKING:
    from celery_dlq.filters import LetterFilter
    from celery_dlq.operations.jobs import JobRun


def _removal_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments and options of ``discard`` and ``purge``."""
    for option in (
        click.pass_context,
        json_option,
        background_options,
        click.option(
            "--export-first",
            type=click.Path(),
            metavar="PATH",
            help="First write the letters to this Parquet file, or into this folder.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--limit", type=int, help="Remove at most this many letters."),
        click.option("--all", "everything", is_flag=True, help="Remove all letters of the queue."),
        filter_options,
        click.argument("letter_ids", metavar="[ID]...", nargs=-1),
        click.argument("queue"),
    ):
        command = option(command)
    return command


@click.command(short_help="Remove letters; for 24 hours `restore` brings them back.")
@click.option(
    "--forever", is_flag=True, help="Remove the letters for good; `restore` will not find them."
)
@_removal_options
def discard(ctx: click.Context, /, *, forever: bool, **given: Any) -> None:
    """Remove letters from QUEUE; for 24 hours `restore` brings them back.

    Choose letters by ID, by filter, or with --all. Choose an entry that is not a
    letter by its position, which `list` shows.
    """
    _remove(ctx, "discard", "Discarded", {"forever": forever}, **given)


@click.command()
@_removal_options
def purge(ctx: click.Context, /, **given: Any) -> None:
    """Remove letters from QUEUE for good.

    Choose letters by ID, by filter, or with --all.
    """
    _remove(ctx, "purge", "Purged", {}, **given)


@click.command()
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only among the discarded letters of this dead-letter queue.")
@click.pass_context
def restore(ctx: click.Context, letter_id: str, *, queue: str | None) -> None:
    """Put a discarded letter back into its queue."""
    name = dead_letters_of(ctx).restore(letter_id, queue)
    say(console_of(ctx), f"Restored {letter_id} to {name}.")


@click.command(short_help="Remove letters that exceed the limits of their policy.")
@click.argument("queues", metavar="[QUEUE]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@json_option
@click.pass_context
def trim(ctx: click.Context, queues: tuple[str, ...], *, dry_run: bool, as_json: bool) -> None:
    """Remove letters past dead_letter_ttl or over dead_letter_max_length now.

    Workers do this by themselves, some hundred letters a second. This command is for
    queues without a worker. Letters that a redrive holds are left alone.
    """
    changes = dead_letters_of(ctx).trim(*queues, dry_run=dry_run)
    if as_json:
        print_lines(change.to_json() for change in changes)
        return
    console, verb = console_of(ctx), "Would trim" if dry_run else "Trimmed"
    for change in changes:
        what = f"{letters_text(change.letters)} from {change.target}"
        say(console, f"{verb} {what} because of {change.detail['cause']}.")
    if not changes:
        say(console, "Nothing to trim.")


def _remove(
    ctx: click.Context,
    verb: str,
    done: str,
    how: dict[str, Any],
    *,
    queue: str,
    letter_ids: tuple[str, ...],
    everything: bool,
    limit: int | None,
    yes: bool,
    export_first: str | None,
    background: bool,
    start_at: StartAt | None,
    as_json: bool,
    **fields: Any,
) -> None:
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    background = background or start_at is not None
    if background and export_first:
        raise click.UsageError(
            "--export-first goes with neither --background nor --at: the file would be on the "
            "machine of a worker; run `dlq export` first"
        )
    where = chosen(dead_letters, queue, fields, letter_ids, everything=everything)
    how["limit"] = limit
    if yes and background:
        in_background(ctx, verb, queue, where, how, start_at, as_json=as_json)
        return
    if yes:
        if where and not any(True for _ in dead_letters.entries(queue, where, limit=1)):
            raise none_matched(queue)
        operation: Callable[..., DiscardReport] = getattr(dead_letters, verb)
        remove, count = partial(operation, queue, where, export_first=export_first, **how), None
    else:
        run = _agreed(ctx, verb, queue, where, how, as_json=as_json)
        if background:
            plan = dead_letters.assembly.plans().keep(run.job)
            hand_over(ctx, plan, start_at, as_json=as_json)
            return
        remove = partial(dead_letters.assembly.removal().run, run, export_first)
        count = run.job.total
    ready_for_many()
    with counting(console, done.lower(), quiet=as_json, total=count) as progress:
        report = remove(progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        operation_tables.discarded(console, queue, done, report)
    if report.state != "done":
        ctx.exit(1)


def _agreed(
    ctx: click.Context,
    verb: str,
    queue: str,
    where: LetterFilter,
    how: dict[str, Any],
    *,
    as_json: bool,
) -> JobRun:
    """The job to which a person agreed: on the letters that the question counted."""
    # Without a filter, nothing must be read to count them.
    seconds = float("inf") if where or how["limit"] is not None else 0.0
    with counting(console_of(ctx), "scanned", quiet=as_json) as scanned:
        run, _ = (
            dead_letters_of(ctx)
            .assembly.plans()
            .prepare(verb, queue, where, seconds=seconds, scanned=scanned, **how)
        )
    count = run.job.total or 0
    if where and not count:
        raise none_matched(queue)
    if count > 1 and not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed to {verb} {count:,} letters without a terminal")
    if count > 1:
        click.confirm(f"{verb.capitalize()} {count:,} letters of {one_line(queue)}?", abort=True)
    return run
