"""``dlq breaker``: the circuit breakers that are open, and opening and closing them by hand."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from celery_dlq.cli.context import (
    confirm_doubt,
    console_of,
    dead_letters_of,
    load_tasks,
    print_lines,
)
from celery_dlq.cli.options import json_option, yes_option
from celery_dlq.cli.table import about_hold, line_text, print_table, say
from celery_dlq.features.circuit_breaker.operations import Breakers
from celery_dlq.operations.release import HeldMessages


@click.group(
    invoke_without_command=True,
    short_help="Show the circuit breakers that are open; open or close one.",
)
@json_option
@click.pass_context
def breaker(ctx: click.Context, *, as_json: bool) -> None:
    """Show the circuit breakers that are open, or that are closed and still release.

    An open circuit breaker holds the messages of a task that fails nearly always.
    """
    if ctx.invoked_subcommand is not None:
        return
    dead_letters = dead_letters_of(ctx)
    found = [one.shown(dead_letters.redaction) for one in dead_letters.breakers()]
    if as_json:
        print_lines(one.to_json() for one in found)
    else:
        show_breakers(console_of(ctx), found)


@breaker.command("open")
@click.argument("task")
@click.option("--queue", help="Queue of the task.  [default: by its route]")
@click.option("--reason", default="", help="Why; `breaker` shows it.")
@yes_option
@click.pass_context
def open_(ctx: click.Context, task: str, *, queue: str | None, reason: str, yes: bool) -> None:
    """Open the circuit breaker of TASK by hand.

    Workers hold its messages, and let one start now and then to see if it succeeds. The
    policy of TASK must have circuit_breaker; `dlq hold` needs none. Asks only if workers
    run, and none of them has TASK.
    """
    load_tasks(ctx.obj.app)
    doubt = Breakers(dead_letters_of(ctx).assembly).doubt_of(task, queue)
    confirm_doubt(doubt, f"open the circuit breaker of {task}", yes=yes)
    made = dead_letters_of(ctx).open_breaker(task, queue, reason=reason)
    say(console_of(ctx), f"{made.id} holds {task}; its circuit breaker is open.")


@breaker.command()
@click.argument("task")
@click.option("--queue", help="Queue of the task.  [default: all]")
@click.pass_context
def close(ctx: click.Context, task: str, *, queue: str | None) -> None:
    """Close the circuit breaker of TASK by hand.

    Workers release its messages, slowly at first; `dlq release ID` releases all at once.
    """
    for hold in dead_letters_of(ctx).close_breaker(task, queue):
        say(
            console_of(ctx),
            f"The circuit breaker {hold.id} is closed; workers release its messages.",
        )


def show_breakers(console: Console, found: Sequence[HeldMessages]) -> None:
    """Circuit breakers that are not closed, a row each."""
    rows = (
        (
            (
                line_text(one.hold.id, "bold"),
                line_text(one.state, "red" if one.state == "open" else "yellow"),
            ),
            about_hold(one.hold, circuit.task, circuit.queue),
            one.held,
            (f"{circuit.successes} of {circuit.probes}", f"every {circuit.probe_every:g} s"),
        )
        for one in found
        if (circuit := one.hold.circuit) is not None
    )
    columns = ("!id\nstate", "task, queue, reason, by", ">held", "!probes")
    if not print_table(console, "Circuit breakers", columns, rows):
        say(console, "All circuit breakers are closed.")
