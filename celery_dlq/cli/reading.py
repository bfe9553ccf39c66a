"""``dlq queues``, ``list``, ``show``, ``groups``, ``apart``, ``tail``, ``audit``: all read only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli import letter_tables, operation_tables
from celery_dlq.cli.context import (
    console_of,
    dead_letters_of,
    letter_filter,
    none_matched,
    print_lines,
)
from celery_dlq.cli.letter_tables import Unreadable
from celery_dlq.cli.options import filter_options, json_option
from celery_dlq.cli.terminal import counting, letters_text, say
from celery_dlq.errors import CorruptLetter
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.letters import json_codec
from celery_dlq.letters.printable import one_line
from celery_dlq.letters.record import DeadLetter, iso
from celery_dlq.store.records import OPEN_GROUP, Group, GroupState, QueueSummary

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.selection import RawEntry

_MAX_VALUE_CHARS = 1000
_APART_SECONDS = 10.0


@click.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, *, as_json: bool) -> None:
    """Show all dead-letter queues: letters, growth, ages, reasons."""
    dead_letters = dead_letters_of(ctx)
    found, warnings = dead_letters.queues(), dead_letters.warnings()
    if as_json:
        print_lines(map(_as_json, found))
        for warning in warnings:
            click.echo(one_line(warning), err=True)  # names of queues may be hostile
        return
    console = console_of(ctx)
    letter_tables.queues(console, found)
    if held := dead_letters.assembly.held().all():
        holds, count = f"{len(held)} hold{'s' if len(held) > 1 else ''}", sum(h.held for h in held)
        say(console, f"Held by {holds}: {count:,}; see `dlq holds`.", "yellow")
    for text in (*letter_tables.memory(found, dead_letters.memory()), *warnings):
        say(console, text, "dim")


@click.command("list")
@click.argument("queue")
@filter_options
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Letters on a page."
)
@click.option("--page", type=click.IntRange(min=1), default=1, help="Number of the page to show.")
@click.option("--oldest-first", is_flag=True, help="Show the oldest letters first.")
@click.option("--discarded", is_flag=True, help="Show discarded letters, the last discarded first.")
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
    **options: Any,
) -> None:
    """List the letters of QUEUE, newest first."""
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    where = letter_filter(options)
    with counting(console, "scanned", quiet=as_json or not where) as scanned:
        entries: Iterable[RawEntry]
        if discarded:
            binned = dead_letters.discarded(queue)
            entries = (found for found in binned if where.matches_fields(found.fields))
        else:
            entries = dead_letters.entries(
                queue, where, newest_first=not oldest_first, scanned=scanned
            )
        page_of = islice(entries, (page - 1) * limit, page * limit)
        letters = (_readable(found, dead_letters.redaction) for found in page_of)
        if as_json:
            shown = print_lines(map(_entry_json, letters))
        else:
            shown = letter_tables.letters(console, queue, letters)
    if where and not shown:
        raise none_matched(queue)
    if as_json:
        return
    if not shown and page > 1:
        say(console, f"Page {page} of {queue} is empty.")
    elif not shown:
        say(console, f"{queue} has no discarded letters." if discarded else f"{queue} is empty.")
    elif shown == limit:
        say(console, f"{letters_text(limit)} shown; --page {page + 1} shows the next.")


@click.command(short_help="Show everything about one letter.")
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in this dead-letter queue.")
@json_option
@click.pass_context
def show(ctx: click.Context, letter_id: str, *, queue: str | None, as_json: bool) -> None:
    """Show everything about one letter; the first 6 characters of its ID are enough."""
    dead_letters = dead_letters_of(ctx)
    name, found = dead_letters.entry(letter_id, queue)
    letter = _readable(found, dead_letters.redaction)
    if as_json:
        print_lines([_entry_json(letter)])
    elif isinstance(letter, Unreadable):
        letter_tables.unreadable(console_of(ctx), name, letter)
    else:
        size = len(found.fields.get(b"body", b""))
        letter_tables.letter(console_of(ctx), letter, body_bytes=size)


@click.command()
@click.argument("queue")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Show at most this many groups.",
)
@click.option(
    "--state",
    type=click.Choice([state.value for state in GroupState]),
    help="Only groups in this state; also without letters, unless they are open.",
)
@json_option
@click.pass_context
def groups(ctx: click.Context, queue: str, *, limit: int, state: str | None, as_json: bool) -> None:
    """Show the letters of QUEUE by cause, largest group first."""
    found = dead_letters_of(ctx).groups(queue, limit=limit, state=state)
    if as_json:
        print_lines(map(_group_json, found))
        return
    console = console_of(ctx)
    if found:
        letter_tables.groups(console, queue, found)
    elif state:
        say(console, f"{queue} has no {state} group.")
    else:
        say(console, f"{queue} is empty.")
    if len(found) == limit:
        say(console, f"The {limit} largest groups; --limit shows more.")


@click.command(short_help="Show what letters of QUEUE have that others lack.")
@click.argument("queue")
@filter_options
@json_option
@click.pass_context
def apart(ctx: click.Context, /, queue: str, *, as_json: bool, **options: Any) -> None:
    """Show what the newest letters of QUEUE that match the filter have and others lack.

    Others are the other letters of QUEUE, and successes if dlq_sample_successes samples them.
    At most 5,000 messages are compared, and reading them ends after 10 seconds.
    """
    where = letter_filter(options)
    found = dead_letters_of(ctx).apart(queue, where, deadline_seconds=_APART_SECONDS)
    if where and not found.letters and not found.cut:
        raise none_matched(queue)
    if as_json:
        print_lines([found.to_json()])
    else:
        letter_tables.apart(console_of(ctx), found)


@click.command(short_help="Show the newest letters of QUEUE; with --follow, also new ones.")
@click.argument("queue")
@filter_options
@click.option(
    "--lines",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Show this many of the newest letters.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new letters until Ctrl-C.")
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
    **options: Any,
) -> None:
    """Show the newest letters of QUEUE, one a line; with --follow, also new ones."""
    dead_letters, where, console = dead_letters_of(ctx), letter_filter(options), console_of(ctx)
    coming = dead_letters.tail(queue, where) if follow else iter(())  # from this moment on
    found = dead_letters.letters(queue, where, newest_first=True, limit=lines)
    newest = [letter.id for letter in found]
    shown = set(newest)
    # Each is read again, because all of them together may be large.
    read = (dead_letters.store.get(queue, letter_id) for letter_id in reversed(newest))
    coming = (letter for letter in coming if letter.id not in shown)
    redaction = dead_letters.redaction
    try:
        for one in chain(read, coming):
            if one is None:  # removed meanwhile
                continue
            letter = redaction.letter(one)
            if as_json:
                print_lines([letter.to_json()])
            else:
                letter_tables.letter_line(console, letter)
    except KeyboardInterrupt:
        return


@click.command()
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many changes.",
)
@json_option
@click.pass_context
def audit(ctx: click.Context, *, limit: int, as_json: bool) -> None:
    """Show who changed letters or policies, newest first."""
    redaction = dead_letters_of(ctx).redaction
    changes = [redaction.shown(change, "detail") for change in dead_letters_of(ctx).changes(limit)]
    if as_json:
        print_lines(change.to_json() for change in changes)
    else:
        operation_tables.audit(console_of(ctx), changes)


def _readable(found: RawEntry, redaction: Redaction) -> DeadLetter | Unreadable:
    try:
        return redaction.letter(found.letter())
    except CorruptLetter as exc:
        values = {
            name.decode("utf-8", "backslashreplace"): json_codec.safe_repr(value, _MAX_VALUE_CHARS)
            for name, value in found.fields.items()
        }
        shown = redaction.fields(values)
        return Unreadable(position=found.position, error=_error(exc, redaction), fields=shown)


def _error(exc: CorruptLetter, redaction: Redaction) -> str:
    return "an entry that cannot be read" if redaction else str(exc)


def _entry_json(entry: DeadLetter | Unreadable) -> dict[str, Any]:
    if isinstance(entry, DeadLetter):
        return entry.to_json()
    return {"corrupt": True, "id": None, **_as_json(entry)}


def _group_json(group: Group) -> dict[str, Any]:
    values = _as_json(replace(group, status=OPEN_GROUP))
    return {**values, "state": group.status.state.value, "status": group.status.to_json()}


def _as_json(record: QueueSummary | Group | Unreadable) -> dict[str, Any]:
    values = asdict(record)
    times = {name: iso(value) for name, value in values.items() if isinstance(value, datetime)}
    return {**values, **times}
