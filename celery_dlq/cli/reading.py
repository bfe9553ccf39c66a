"""``dlq queues``, ``list``, ``show``, ``groups``: what is there; reading changes nothing."""

from __future__ import annotations

from typing import Any

import click

from celery_dlq.cli.context import dead_letters_of, letter_filter, print_lines, screen_of
from celery_dlq.cli.options import filter_options, json_option


@click.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, *, as_json: bool) -> None:
    """Show all dead-letter queues: letters, ages, reasons."""
    found = dead_letters_of(ctx).queues()
    if as_json:
        from celery_dlq.cli.render import queue_json  # noqa: PLC0415 - see the module's docstring

        print_lines(queue_json(queue) for queue in found)
    else:
        screen_of(ctx).queues(found)


@click.command("list")
@click.argument("queue")
@filter_options
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--oldest-first", is_flag=True, help="Oldest letters first.")
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    /,
    queue: str,
    *,
    limit: int,
    oldest_first: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """List the letters of QUEUE, newest first."""
    letters = dead_letters_of(ctx).letters(
        queue, letter_filter(fields), newest_first=not oldest_first, limit=limit
    )
    if as_json:
        print_lines(letter.to_json() for letter in letters)
    else:
        screen_of(ctx).letters(queue, list(letters), limit)


@click.command()
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in this dead-letter queue.")
@json_option
@click.pass_context
def show(ctx: click.Context, letter_id: str, *, queue: str | None, as_json: bool) -> None:
    """Show everything about one letter; the first digits of its ID will do."""
    letter = dead_letters_of(ctx).get(letter_id, queue)
    if as_json:
        print_lines([letter.to_json()])
    else:
        screen_of(ctx).letter(letter)


@click.command()
@click.argument("queue")
@json_option
@click.pass_context
def groups(ctx: click.Context, queue: str, *, as_json: bool) -> None:
    """Show the letters of QUEUE by cause, largest group first."""
    found = dead_letters_of(ctx).groups(queue)
    if as_json:
        from celery_dlq.cli.render import group_json  # noqa: PLC0415 - see the module's docstring

        print_lines(group_json(group) for group in found)
    else:
        screen_of(ctx).groups(queue, found)
