"""``dlq queues``, ``list``, ``show``, ``groups``, ``tail``, ``audit``: reading changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.context import (
    dead_letters_of,
    letter_filter,
    none_matched,
    print_lines,
    screen_of,
)
from celery_dlq.cli.options import filter_options, json_option

if TYPE_CHECKING:
    from celery_dlq.operations.selection import RawEntry


@click.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, *, as_json: bool) -> None:
    """Show all dead-letter queues: letters, ages, reasons, growth."""
    dead_letters = dead_letters_of(ctx)
    found = dead_letters.queues()
    if as_json:
        from celery_dlq.cli.render import queue_json  # noqa: PLC0415 - see the module's docstring

        print_lines(queue_json(queue) for queue in found)
    else:
        screen_of(ctx).queues(found)
        if found and not dead_letters.store.capabilities.overviews:
            screen_of(ctx).say("Queues on the broker: reasons and ages with `dlq groups QUEUE`.")


@click.command("list")
@click.argument("queue")
@filter_options
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--page", type=click.IntRange(min=1), default=1, help="Which LIMIT of letters.")
@click.option("--oldest-first", is_flag=True, help="Oldest letters first.")
@click.option("--discarded", is_flag=True, help="What lies in the bin, last discarded first.")
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    /,
    queue: str,
    *,
    limit: int,
    page: int,
    oldest_first: bool,
    discarded: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """List the letters of QUEUE, newest first."""
    from celery_dlq.cli.reports import entry_json, row_of  # noqa: PLC0415 - imports rich

    where, screen = letter_filter(fields), screen_of(ctx)
    with screen.counting("scanned", quiet=as_json or not where) as scanned:
        dead_letters = dead_letters_of(ctx)
        entries: Iterator[RawEntry]
        if discarded:
            binned = dead_letters.discarded(queue)
            entries = (found for found in binned if where.matches_fields(found.fields))
        else:
            entries = dead_letters.entries(
                queue, where, newest_first=not oldest_first, scanned=scanned
            )
        wanted = islice(entries, (page - 1) * limit, page * limit)
        if as_json:
            shown = print_lines(map(entry_json, wanted))
        else:
            rows = [row_of(found) for found in wanted]
            shown = len(rows)
    if where and not shown:
        raise none_matched(queue)
    if not as_json:
        screen.letters(queue, rows, limit)


@click.command(short_help="Show everything about one letter.")
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in this dead-letter queue.")
@json_option
@click.pass_context
def show(ctx: click.Context, letter_id: str, *, queue: str | None, as_json: bool) -> None:
    """Show everything about one letter; the first digits of its ID will do."""
    from celery_dlq.cli.render import Unreadable  # noqa: PLC0415 - imports rich
    from celery_dlq.cli.reports import corrupt, entry_json, readable  # noqa: PLC0415 - the same

    name, found = dead_letters_of(ctx).entry(letter_id, queue)
    if as_json:
        print_lines([entry_json(found)])
        return
    letter = readable(found)
    if isinstance(letter, Unreadable):
        corrupt(screen_of(ctx), name, found)
    else:
        screen_of(ctx).letter(letter)


@click.command()
@click.argument("queue")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True)
@json_option
@click.pass_context
def groups(ctx: click.Context, queue: str, *, limit: int, as_json: bool) -> None:
    """Show the letters of QUEUE by cause, largest group first."""
    found = dead_letters_of(ctx).groups(queue, limit=limit)
    if as_json:
        from celery_dlq.cli.render import group_json  # noqa: PLC0415 - see the module's docstring

        print_lines(group_json(group) for group in found)
    else:
        screen_of(ctx).groups(queue, found, limit)


@click.command(short_help="Show the newest letters of QUEUE; with --follow, new ones.")
@click.argument("queue")
@filter_options
@click.option(
    "--lines",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Newest letters to begin with.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more, until Ctrl-C.")
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    /,
    queue: str,
    *,
    lines: int,
    follow: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Show the newest letters of QUEUE, a line each; with --follow also those to come."""
    dead_letters, where, screen = dead_letters_of(ctx), letter_filter(fields), screen_of(ctx)
    coming = dead_letters.tail(queue, where) if follow else iter(())  # from this moment on
    found = dead_letters.letters(queue, where, newest_first=True, limit=lines)
    newest = [letter.id for letter in found]
    shown = set(newest)
    # Read again, one by one: all of them together may be large.
    read = (dead_letters.store.get(queue, letter_id) for letter_id in reversed(newest))
    coming = (letter for letter in coming if letter.id not in shown)
    try:
        for letter in chain(read, coming):
            if letter is None:  # removed meanwhile
                continue
            if as_json:
                print_lines([letter.to_json()])
            else:
                screen.line(letter)
    except KeyboardInterrupt:
        return


@click.command()
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
@click.pass_context
def audit(ctx: click.Context, *, limit: int, as_json: bool) -> None:
    """Show who changed letters or policies, newest first."""
    from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

    changes = dead_letters_of(ctx).changes(limit)
    if as_json:
        print_lines(change.to_json() for change in changes)
    else:
        reports.audit(screen_of(ctx), changes)
