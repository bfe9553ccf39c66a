"""``dlq policies``: the policies in force, and overrides of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from celery_dlq.cli import policy_tables
from celery_dlq.cli.context import console_of, dead_letters_of, load_tasks, print_lines
from celery_dlq.cli.options import Duration, json_option
from celery_dlq.cli.terminal import say


@click.group(
    invoke_without_command=True,
    short_help="Show the policy of every queue and task; or override one.",
)
@click.option("--queue", help="Show only this queue.")
@json_option
@click.pass_context
def policies(ctx: click.Context, *, queue: str | None, as_json: bool) -> None:
    """Show the policy of every queue and task, and where each value comes from."""
    if ctx.invoked_subcommand is not None:
        return
    load_tasks(ctx.obj.app)
    shown = dead_letters_of(ctx).policies(queue)
    if as_json:
        print_lines(shown.to_json())
    else:
        policy_tables.policies(console_of(ctx), shown)


@policies.command("set")
@click.argument("queue")
@click.argument("values", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option(
    "--for",
    "span",
    type=Duration(),
    required=True,
    help="Time until the override ends, e.g. 30m, 2h, 7d; at most 30d.",
)
@click.pass_context
def set_(ctx: click.Context, queue: str, values: tuple[str, ...], *, span: float) -> None:
    """Override policy keys of QUEUE for a limited time, without a deploy.

    The app, a live worker or a letter must know QUEUE. Workers notice within seconds.
    At the end the configured values apply again.
    """
    pairs: dict[str, Any] = dict(map(_pair, values))
    length = timedelta(seconds=span)
    load_tasks(ctx.obj.app)
    dead_letters_of(ctx).override_policy(queue, length, **pairs)
    say(console_of(ctx), f"Policy of {queue} overridden for {length}: {', '.join(values)}.")


@policies.command()
@click.argument("queue")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.pass_context
def unset(ctx: click.Context, queue: str, keys: tuple[str, ...]) -> None:
    """End overrides of QUEUE early: all of them, or only those of KEYs."""
    lifted = dead_letters_of(ctx).lift_policy(queue, *keys)
    say(console_of(ctx), f"Overrides of {queue} ended: {', '.join(lifted)}.")


def _pair(text: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in text.partition("="))
    if not key or not value:
        raise click.UsageError(f"expected KEY=VALUE such as max_deliveries=3, got {text!r}")
    return key, value
