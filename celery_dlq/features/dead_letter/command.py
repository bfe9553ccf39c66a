"""``dlq dead-letter``: a message that has not ended becomes a letter."""

from __future__ import annotations

import click

from celery_dlq.cli.context import ask, console_of, dead_letters_of, load_tasks, print_lines
from celery_dlq.cli.options import json_option, yes_option
from celery_dlq.cli.terminal import say
from celery_dlq.errors import NotFound
from celery_dlq.letters.printable import one_line


@click.command(short_help="Dead-letter the message of a task instead of executing it.")
@click.argument("task_id")
@click.option("--reason", default="", help="Why, for whoever sees the letter.")
@click.option("--withdraw", is_flag=True, help="Take back a demand that no worker has met.")
@yes_option
@json_option
@click.pass_context
def dead_letter(
    ctx: click.Context, task_id: str, *, reason: str, withdraw: bool, yes: bool, as_json: bool
) -> None:
    """End the task TASK_ID as a letter, wherever its message is.

    A message that waits in a queue of a Redis broker, or in a worker for its ETA, becomes
    a letter at once. A running task is terminated, in a prefork pool. Where the message
    is not found, the worker that is given it dead-letters it before it starts; what
    nobody knows is asked for.
    """
    load_tasks(ctx.obj.app)
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    if withdraw:
        dead_letters.withdraw(task_id)
        say(console, f"{task_id} may be executed again.")
        return
    try:
        report = dead_letters.dead_letter(task_id, reason, must_be_known=not yes)
    except NotFound as exc:
        click.echo(one_line(str(exc)), err=True)
        ask(f"dead-letter {task_id} if it comes to a worker", yes=False)
        report = dead_letters.dead_letter(task_id, reason)
    if as_json:
        print_lines([report.to_json()])
    else:
        say(console, report.text)
