"""``dlq dead-letter``: a message that has not ended becomes a letter."""

from __future__ import annotations

import click

from celery_dlq.cli.context import answer, console_of, dead_letters_of
from celery_dlq.cli.options import json_option
from celery_dlq.cli.table import say


@click.command(short_help="Dead-letter the message of a task instead of executing it.")
@click.argument("task_id")
@click.option("--reason", default="", help="Why, for whoever sees the letter.")
@click.option("--withdraw", is_flag=True, help="Take back a demand that no worker has met.")
@json_option
@click.pass_context
def dead_letter(
    ctx: click.Context, task_id: str, *, reason: str, withdraw: bool, as_json: bool
) -> None:
    """End the task TASK_ID as a letter, wherever its message is.

    A message that waits in a worker for its ETA becomes a letter within seconds. A running
    task is terminated, in a prefork pool. A message that waits in a queue becomes a letter
    when a worker is given it, before it starts.
    """
    dead_letters = dead_letters_of(ctx)
    if withdraw:
        dead_letters.withdraw(task_id)
        say(console_of(ctx), f"{task_id} may be executed again.")
        return
    report = dead_letters.dead_letter(task_id, reason)
    answer(ctx, report, report.text, as_json=as_json)
