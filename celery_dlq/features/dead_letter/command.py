"""``dlq dead-letter``: a message that has not ended becomes a letter."""

from __future__ import annotations

import click

from celery_dlq.cli.context import console_of, dead_letters_of, print_answer
from celery_dlq.cli.options import json_option
from celery_dlq.cli.table import say


@click.command()
@click.argument("task_id")
@click.option("--reason", default="", help="Why; the letter shows it.")
@click.option("--withdraw", is_flag=True, help="Take it back, if no worker has done it yet.")
@json_option
@click.pass_context
def dead_letter(
    ctx: click.Context, task_id: str, *, reason: str, withdraw: bool, as_json: bool
) -> None:
    """Stop one message by its task ID: it becomes a letter.

    The command does not ask. If the message waits in a worker for its ETA, it becomes a
    letter within seconds. If it runs, a prefork pool terminates it; other pools cannot.
    If it waits in a queue, it becomes a letter when a worker receives it within 72 hours,
    before it starts.

    To stop all messages of a task, use `dlq hold --task NAME`.
    """
    dead_letters = dead_letters_of(ctx)
    if withdraw:
        dead_letters.withdraw(task_id)
        say(console_of(ctx), f"{task_id} may run again.")
        return
    report = dead_letters.dead_letter(task_id, reason)
    print_answer(ctx, report, report.text, as_json=as_json)
