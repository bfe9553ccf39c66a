"""``dlq delayed``: messages that wait for their time."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click
from rich.console import Console

from celery_dlq.cli.context import console_of, dead_letters_of, print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.cli.terminal import age, line, say, table, two_lines, utc

if TYPE_CHECKING:
    from celery_dlq.features.dead_letter.delayed import DelayedMessages


@click.command(short_help="List messages that wait for their delay or ETA.")
@click.argument("queue")
@click.option("--limit", type=int, default=100, show_default=True, help="Show at most this many.")
@json_option
@click.pass_context
def delayed(ctx: click.Context, queue: str, *, limit: int, as_json: bool) -> None:
    """List the messages of QUEUE that wait for their delay or ETA, those due first.

    On Redis, those in the queue and those that workers hold. Elsewhere, those that live
    workers hold, and on RabbitMQ the number in each of its delay queues.
    """
    found = dead_letters_of(ctx).delayed(queue, limit=limit)
    if as_json:
        print_lines(found.to_json())
    else:
        show(console_of(ctx), queue, found)


def show(console: Console, queue: str, found: DelayedMessages) -> None:
    """Delayed messages, a row each."""
    now = datetime.now(timezone.utc)
    if found.messages:
        rows = table(f"Delayed in {queue}", "!eta", "task, id, where")
        for one in found.messages:
            where = "in the queue" if one.place == "queue" else one.worker or "a worker"
            rows.add_row(
                f"{utc(one.eta)}\n{age(one.eta, now)}",
                two_lines(
                    line(one.task_name), two_lines(line(one.task_id, "bold"), line(where, "dim"))
                ),
            )
        console.print(rows)
        if found.total > len(found.messages):
            say(console, f"{len(found.messages):,} of {found.total:,} are shown.")
    else:
        say(console, f"No message of {queue} that waits for its time was seen.")
    for name, messages in found.levels.items():
        say(console, f"{name}: {messages:,}, of all queues together.")
    for text in found.unseen:
        say(console, f"Not seen: {text}.", "dim")
