"""``dlq note``: what operators know of a cause."""

from __future__ import annotations

import click

from celery_dlq.cli import letter_tables
from celery_dlq.cli.context import console_of, dead_letters_of, print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.cli.terminal import say


@click.command(short_help="Add a note to a group of letters, or show its notes.")
@click.argument("fingerprint")
@click.argument("text", required=False)
@click.option("--queue", required=True, help="The dead-letter queue of the group.")
@json_option
@click.pass_context
def note(
    ctx: click.Context, fingerprint: str, text: str | None, *, queue: str, as_json: bool
) -> None:
    """Add a note to the letters of one FINGERPRINT; without TEXT, show the notes."""
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    if text is not None:
        notes = [dead_letters.note(queue, fingerprint, text)]
    else:
        notes = dead_letters.notes(queue, fingerprint)
    if as_json:
        print_lines(note.to_json() for note in notes)
    elif text is not None:
        say(console, f"Noted on {fingerprint} of {queue}.")
    elif notes:
        letter_tables.notes(console, fingerprint, notes)
    else:
        say(console, f"There are no notes on {fingerprint} of {queue}.")
