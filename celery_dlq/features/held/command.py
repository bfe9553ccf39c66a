"""``dlq held``: look at the messages of a hold before anybody starts them; edit or stop one."""

from __future__ import annotations

from typing import Any

import click

from celery_dlq.cli.context import ask_before, console_of, dead_letters_of, print_lines
from celery_dlq.cli.letters import letters, show_entry
from celery_dlq.cli.next_command import say_next
from celery_dlq.cli.options import filter_options, json_option, letter_filter, yes_option
from celery_dlq.cli.redrive import edited_by_hand
from celery_dlq.cli.table import say
from celery_dlq.errors import DLQError
from celery_dlq.features.held.operations import HeldWindow
from celery_dlq.letters.conditions import assignment
from celery_dlq.letters.printable import json_text
from celery_dlq.operations.edit import Edit

_note_option = click.option("--note", default="", help="Why, e.g. a ticket; the audit shows it.")


@click.group()
def held() -> None:
    """Look at the messages of a hold; edit or stop one of them.

    `holds` shows the IDs of holds. A hold with --where keeps messages back until somebody
    has looked at them, also those of a queue with a delay.
    """


@held.command("list")
@click.argument("hold_id")
@filter_options
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show this many."
)
@json_option
@click.pass_context
def list_(
    ctx: click.Context, /, hold_id: str, *, limit: int, as_json: bool, **options: Any
) -> None:
    """List the messages of HOLD_ID, the oldest first."""
    dead_letters, console, where = dead_letters_of(ctx), console_of(ctx), letter_filter(options)
    some = dead_letters.held_messages(hold_id, where, limit=limit)
    found = map(dead_letters.redaction.letter, some)
    if as_json:
        print_lines(one.to_json() for one in found)
    elif not letters(console, f"Held by {hold_id}, the oldest first", found):
        say(console, f"No message of {hold_id} matches." if where else f"{hold_id} has none.")


@held.command()
@click.argument("hold_id")
@click.argument("message_id", metavar="ID")
@json_option
@click.pass_context
def show(ctx: click.Context, hold_id: str, message_id: str, *, as_json: bool) -> None:
    """Show one held message with its arguments.

    The first 6 characters of the ID are enough.
    """
    window = HeldWindow(dead_letters_of(ctx).assembly)
    show_entry(ctx, *window.reading.entry(message_id, hold_id), as_json=as_json)


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
@click.pass_context
def edit(
    ctx: click.Context, hold_id: str, message_id: str, *, assignments: tuple[str, ...], note: str
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
    console, task = console_of(ctx), letter.task_name or "no task"
    say(console, f"Edited {letter.id} of {hold_id}; {task} runs with the new arguments.")
    say_next(console, f"held show {hold_id} {letter.id[:8]}", f"release {hold_id}")


@held.command()
@click.argument("hold_id")
@click.argument("message_id", metavar="ID")
@_note_option
@yes_option
@click.pass_context
def discard(ctx: click.Context, hold_id: str, message_id: str, *, note: str, yes: bool) -> None:
    """Stop one held message for good: no worker runs it, and nothing brings it back."""
    window = HeldWindow(dead_letters_of(ctx).assembly)
    found = window.reading.entry(message_id, hold_id)[1]
    task = found.text("task_name") or "no task"
    ask_before(f"discard the message of {task} for good", yes=yes)
    window.discard_held(hold_id, found.key, note=note)
    say(console_of(ctx), f"Discarded {found.key} of {hold_id}; {task} does not run it.")
