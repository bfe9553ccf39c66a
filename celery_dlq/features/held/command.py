"""``dlq held``: look at the messages of a hold before anybody starts them; edit or stop one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from celery_dlq.cli.context import (
    ask_before,
    console_of,
    dead_letters_of,
    print_answer,
    print_lines,
)
from celery_dlq.cli.letters import MAX_BODY_CHARS, body_text, show_entry
from celery_dlq.cli.next_command import say_next
from celery_dlq.cli.options import filter_options, json_option, letter_filter, yes_option
from celery_dlq.cli.redrive import edited_by_hand
from celery_dlq.cli.table import Cell, age_text, block_text, print_facts, print_table, say, utc_text
from celery_dlq.errors import CorruptLetter, DLQError
from celery_dlq.features.held.operations import HeldWindow
from celery_dlq.letters.bodies import argument_texts
from celery_dlq.letters.conditions import assignment
from celery_dlq.letters.printable import json_text, shortened
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.edit import Edit, edits_of

_SHORT_ID, _MAX_CHARS = 8, 200
_VERBS = ("show", "edit", "discard")
_note_option = click.option("--note", default="", help="Why, e.g. a ticket; the audit shows it.")


@click.group()
def held() -> None:
    """Look at the messages of a hold; edit or stop one of them.

    `holds` shows the IDs of holds. A hold with --where keeps messages back until somebody
    has looked at them, also those of a queue with a delay.
    """


@held.command("list")
@click.argument("hold_id", required=False)
@filter_options
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show this many."
)
@json_option
@click.pass_context
def list_(
    ctx: click.Context, /, hold_id: str | None, *, limit: int, as_json: bool, **options: Any
) -> None:
    """List the messages of HOLD_ID, or of the only hold, the oldest first."""
    dead_letters, console, where = dead_letters_of(ctx), console_of(ctx), letter_filter(options)
    if hold_id is None:
        ids = [one.hold.id for one in dead_letters.holds()]
        if len(ids) != 1:
            there = f"there are: {', '.join(ids)}" if ids else "nothing is held"
            raise click.UsageError(f"expected the ID of a hold, got none; {there}")
        hold_id = ids[0]
    some = dead_letters.held_messages(hold_id, where, limit=limit)
    found = map(dead_letters.redaction.letter, some)
    if as_json:
        print_lines(one.to_json() for one in found)
        return
    rows = [_row(one) for one in found]
    columns = ("!held", "task", "!id", "arguments")
    if print_table(console, f"Held by {hold_id}, the oldest first", columns, rows):
        say_next(console, *(f"held {verb} {hold_id} {rows[0][2]}" for verb in _VERBS))
    else:
        none = f"{hold_id} has none now. One with an ETA or a delay is held when its time comes."
        say(console, f"No message of {hold_id} matches." if where else none)


def _row(one: DeadLetter) -> tuple[Cell, ...]:
    texts = [shortened(text, _MAX_CHARS) for text in argument_texts(one)]
    return age_text(one.dead_lettered_at), one.task_name, one.id[:_SHORT_ID], texts


@held.command()
@click.argument("hold_id")
@click.argument("message_id", metavar="ID")
@json_option
@click.pass_context
def show(ctx: click.Context, hold_id: str, message_id: str, *, as_json: bool) -> None:
    """Show one held message with its arguments.

    The first 6 characters of the ID are enough.
    """
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    name, entry = HeldWindow(dead_letters.assembly).reading.entry(message_id, hold_id)
    found = None
    with suppress(CorruptLetter):
        found = dead_letters.redaction.letter(entry.letter())
    if as_json or found is None:
        show_entry(ctx, name, entry, as_json=as_json)
        return
    say(console, found.task_name or "no task", "bold")
    print_facts(console, _facts(found))
    say(
        console,
        f"body ({len(entry.fields.get(b'body', b'')):,} bytes, {found.content_type})",
        "dim",
    )
    console.print(block_text(shortened(body_text(found), MAX_BODY_CHARS)))
    say_next(console, *(f"held {verb} {hold_id} {found.id[:_SHORT_ID]}" for verb in _VERBS[1:]))


def _facts(found: DeadLetter) -> Iterator[tuple[str, str]]:
    yield "message", found.id
    yield "task id", found.task_id or "-"
    yield "queue", found.source_queue or "unknown"
    yield "held", f"{utc_text(found.dead_lettered_at)} ({age_text(found.dead_lettered_at)})"
    yield "because", found.description
    if found.eta is not None:
        yield "to run at", utc_text(found.eta)
    for one in edits_of(found.decoded("headers")):
        yield "edited", f"{one.get('at', '')} by {one.get('actor', '')}, from {one.get('from', '')}"


@held.command()
@click.argument("hold_id")
@click.argument("message_id", metavar="ID")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="PATH=VALUE",
    help="Set an argument or header, e.g. kwargs.tenant=42; without it $EDITOR opens.",
)
@_note_option
@json_option
@click.pass_context
def edit(
    ctx: click.Context,
    hold_id: str,
    message_id: str,
    *,
    assignments: tuple[str, ...],
    note: str,
    as_json: bool,
) -> None:
    """Change the arguments of one held message; it stays held, as the newest of its hold."""
    window = HeldWindow(dead_letters_of(ctx).assembly)
    found = window.reading.entry(message_id, hold_id)[1]
    new = {} if assignments else edited_by_hand(window.reading, found.key, hold_id)
    change, seen = Edit(assign=dict(map(assignment, assignments)), **new), new and found.position
    try:
        letter = window.edit_held(hold_id, found.key, change, note=note, seen=seen or "")
    except DLQError:
        if new:  # the editor's file is gone
            click.echo(f"What was typed, and is not saved:\n{json_text(new, indent=2)}", err=True)
        raise
    text = f"Edited {letter.id} of {hold_id}; {letter.task_name or 'no task'} runs with the new"
    _say_done(ctx, letter, f"{text} arguments.", as_json=as_json)
    if not as_json:
        show = f"held show {hold_id} {letter.id[:_SHORT_ID]}"
        say_next(console_of(ctx), show, f"release {hold_id}")


@held.command()
@click.argument("hold_id")
@click.argument("message_id", metavar="ID")
@_note_option
@yes_option
@json_option
@click.pass_context
def discard(
    ctx: click.Context, hold_id: str, message_id: str, *, note: str, yes: bool, as_json: bool
) -> None:
    """Stop one held message for good: no worker runs it, and nothing brings it back."""
    window = HeldWindow(dead_letters_of(ctx).assembly)
    found = window.reading.entry(message_id, hold_id)[1]
    task = found.text("task_name") or "no task"
    ask_before(f"discard the message of {task} for good", yes=yes)
    letter = window.discard_held(hold_id, found.key, note=note)
    text = f"Discarded {letter.id} of {hold_id}; {task} does not run it."
    _say_done(ctx, letter, text, as_json=as_json)


def _say_done(ctx: click.Context, letter: DeadLetter, text: str, *, as_json: bool) -> None:
    """Say what was done to a message, or print it as people may see it."""
    shown = dead_letters_of(ctx).redaction.letter(letter)
    print_answer(ctx, shown, text, as_json=as_json)
