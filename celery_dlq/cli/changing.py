"""``dlq redrive``, ``discard``, ``purge``, ``restore``: what operators do to letters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.context import (
    chosen,
    dead_letters_of,
    none_matched,
    print_lines,
    ready_for_many,
    screen_of,
)
from celery_dlq.cli.options import Duration, Rate, filter_options, json_option
from celery_dlq.letters.printable import json_text

if TYPE_CHECKING:
    from celery_dlq.cli.render import Screen
    from celery_dlq.filters import LetterFilter
    from celery_dlq.operations.results import DiscardReport
    from celery_dlq.plugin import DeadLetters


@click.command(short_help="Publish letters' messages again, then remove the letters.")
@click.argument("queue")
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--all", "everything", is_flag=True, help="All letters of the queue.")
@click.option("--rate", type=Rate(), help="Most letters a second, e.g. 100/s.")
@click.option("--limit", type=int, help="Most letters.")
@click.option("--to-queue", help="Publish to this queue instead of each message's own.")
@click.option("--delay", type=Duration(), default=0, help="The messages may run after so long.")
@click.option("--new-id", is_flag=True, help="Give each task a new id.")
@click.option("--keep-count", is_flag=True, help="Earlier deliveries count.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen, and what is missing.")
@click.option(
    "--canary",
    type=int,
    metavar="N",
    help="Redrive N letters first, spread over the groups, and watch them.",
)
@click.option(
    "--max-failures",
    type=int,
    default=0,
    show_default=True,
    help="Go on when at most so many of the canary die again.",
)
@click.option(
    "--canary-wait",
    type=Duration(),
    default=60,
    show_default=True,
    help="How long to watch the canary.",
)
@click.option("--edit", "in_editor", is_flag=True, help="Edit one letter's arguments in $EDITOR.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change one letter's argument, e.g. kwargs.tenant=42.",
)
@json_option
@click.pass_context
def redrive(
    ctx: click.Context,
    /,
    queue: str,
    letter_ids: tuple[str, ...],
    *,
    everything: bool,
    dry_run: bool,
    in_editor: bool,
    assignments: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Publish the original messages of letters again, then remove the letters.

    Choose letters by ID, by filter, or with --all. Body, id, callbacks, chain and
    group of a message stay as they were; its counts start anew.
    """
    dead_letters = dead_letters_of(ctx)
    where = chosen(dead_letters, queue, options, letter_ids, everything=everything)
    how = {name: options[name] for name in _REDRIVE_OPTIONS}
    if dry_run:
        _dry_run(ctx, queue, where, how, as_json=as_json)
    elif in_editor or assignments:
        _edit(ctx, queue, where, how, assignments, in_editor=in_editor, as_json=as_json)
    else:
        _redrive(ctx, queue, where, how, as_json=as_json)


_REDRIVE_OPTIONS = (
    "rate",
    "limit",
    "to_queue",
    "delay",
    "new_id",
    "keep_count",
    "canary",
    "max_failures",
    "canary_wait",
)
_EDIT_OPTIONS = ("to_queue", "delay", "new_id", "keep_count")


def _redrive(
    ctx: click.Context, queue: str, where: LetterFilter, how: dict[str, Any], *, as_json: bool
) -> None:
    dead_letters, screen = dead_letters_of(ctx), screen_of(ctx)
    total = _size(dead_letters, queue, where, how["limit"])
    ready_for_many()
    with screen.counting("redriven", quiet=as_json, total=total) as progress:
        report = dead_letters.redrive(queue, where, progress=progress, **how)
    if where and not report.touched and report.state == "done":
        raise none_matched(queue)
    if as_json:
        print_lines([report.to_json()])
    else:
        screen.redriven(queue, report)
    if report.failures or report.state != "done":
        ctx.exit(1)


def _dry_run(
    ctx: click.Context, queue: str, where: LetterFilter, how: dict[str, Any], *, as_json: bool
) -> None:
    from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

    screen = screen_of(ctx)
    with screen.counting("scanned", quiet=as_json) as scanned:
        found = dead_letters_of(ctx).dry_run(
            queue, where, limit=how["limit"], to_queue=how["to_queue"], scanned=scanned
        )
    if where and not found.letters + found.corrupt:
        raise none_matched(queue)
    if as_json:
        print_lines([found.to_json()])
    else:
        reports.dry_run(screen, queue, found)
    if not found.ready:
        ctx.exit(1)


def _edit(
    ctx: click.Context,
    queue: str,
    where: LetterFilter,
    how: dict[str, Any],
    assignments: tuple[str, ...],
    *,
    in_editor: bool,
    as_json: bool,
) -> None:
    from celery_dlq.operations.edit import Edit, assignment  # noqa: PLC0415 - imports kombu

    if where.ids is None or len(where.ids) != 1:
        raise click.UsageError("expected the ID of the one letter to edit")
    dead_letters, (letter_id,) = dead_letters_of(ctx), where.ids
    new = _edited(dead_letters, letter_id, queue) if in_editor else {}
    change = Edit(assign=dict(map(assignment, assignments)), **new)
    report = dead_letters.edit(
        letter_id, change, queue, **{name: how[name] for name in _EDIT_OPTIONS}
    )
    if as_json:
        print_lines([report.to_json()])
    else:
        screen_of(ctx).redriven(queue, report)
    if report.failures or not report.published + report.finished:
        ctx.exit(1)


def _edited(dead_letters: DeadLetters, letter_id: str, queue: str) -> dict[str, Any]:
    """What a person makes of the arguments in an editor."""
    args, kwargs = dead_letters.arguments(letter_id, queue)
    before = json_text({"args": args, "kwargs": kwargs}, indent=2)
    after = click.edit(before, extension=".json")
    if after is None or after.strip() == before:
        raise click.ClickException(
            "expected a change of the arguments, got none; nothing was redriven"
        )
    try:
        new = json.loads(after)
        return {"args": [*new["args"]], "kwargs": {**new["kwargs"]}}
    except (ValueError, TypeError, KeyError):
        message = 'expected JSON such as {"args": [], "kwargs": {}}, got something else'
        raise click.ClickException(f"{message}; nothing was redriven") from None


def _removal_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``discard`` and ``purge``."""
    for option in (
        click.pass_context,
        json_option,
        click.option(
            "--export-first",
            type=click.Path(),
            metavar="PATH",
            help="Write the letters to this Parquet file, or into this folder, before.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--limit", type=int, help="Most letters."),
        click.option("--all", "everything", is_flag=True, help="All letters of the queue."),
        filter_options,
        click.argument("letter_ids", metavar="[ID]...", nargs=-1),
        click.argument("queue"),
    ):
        command = option(command)
    return command


@click.command(short_help="Take letters out of QUEUE, into a bin for 24 hours.")
@click.option("--forever", is_flag=True, help="For good; not even the bin keeps them.")
@_removal_options
def discard(ctx: click.Context, /, *, forever: bool, **given: Any) -> None:
    """Take letters out of QUEUE; for 24 hours `restore` brings them back.

    Choose letters by ID, by filter, or with --all. An entry that is no letter is
    chosen by its position, which `list` shows.
    """
    _remove(ctx, "discard", "Discarded", {"forever": forever}, **given)


@click.command()
@_removal_options
def purge(ctx: click.Context, /, **given: Any) -> None:
    """Remove letters of QUEUE for good.

    Choose letters by ID, by filter, or with --all.
    """
    _remove(ctx, "purge", "Purged", {}, **given)


@click.command()
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in the bin of this dead-letter queue.")
@click.pass_context
def restore(ctx: click.Context, letter_id: str, *, queue: str | None) -> None:
    """Put a discarded letter back into its queue."""
    name = dead_letters_of(ctx).restore(letter_id, queue)
    screen_of(ctx).say(f"Restored {letter_id} to {name}.")


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
    as_json: bool,
    **fields: Any,
) -> None:
    from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

    dead_letters, screen = dead_letters_of(ctx), screen_of(ctx)
    where = chosen(dead_letters, queue, fields, letter_ids, everything=everything)
    count = _count(dead_letters, screen, queue, where, limit, as_json=as_json, enough=yes)
    if where and not count:
        raise none_matched(queue)
    if count > 1 and not yes:
        _ask(verb, queue, count)
    operation: Callable[..., DiscardReport] = getattr(dead_letters, verb)
    ready_for_many()
    with screen.counting(done.lower(), quiet=as_json, total=None if yes else count) as progress:
        report = operation(
            queue, where, limit=limit, export_first=export_first, progress=progress, **how
        )
    if as_json:
        print_lines([report.to_json()])
    else:
        reports.discarded(screen, queue, done, report)
    if report.state != "done":
        ctx.exit(1)


def _ask(verb: str, queue: str, count: int) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"expected --yes to {verb} {count:,} letters where nobody can be asked"
        )
    click.confirm(f"{verb.capitalize()} {count:,} letters of {queue}?", abort=True)


def _size(
    dead_letters: DeadLetters, queue: str, where: LetterFilter, limit: int | None
) -> int | None:
    """How many letters there are to do, when that is known without reading them."""
    if where.ids is not None:
        return len(where.ids)
    if where:
        return limit
    found = dead_letters.store.length(queue)
    return found if limit is None else min(found, limit)


def _count(
    dead_letters: DeadLetters,
    screen: Screen,
    queue: str,
    where: LetterFilter,
    limit: int | None,
    *,
    as_json: bool,
    enough: bool,
) -> int:
    """How many letters match; with ``enough`` only whether one does."""
    if not where or where.ids is not None:
        return _size(dead_letters, queue, where, limit) or 0
    with screen.counting("scanned", quiet=as_json) as scanned:
        most = 1 if enough else limit
        return sum(1 for _ in dead_letters.entries(queue, where, limit=most, scanned=scanned))
