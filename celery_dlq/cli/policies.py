"""``dlq policies`` and ``dlq trim``: what rules which queue, for now, and what it removes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from celery_dlq.cli.context import dead_letters_of, print_lines, screen_of
from celery_dlq.cli.options import Duration, json_option


@click.group(
    invoke_without_command=True, short_help="Show every policy, and where each value comes from."
)
@click.option("--queue", help="Only this queue.")
@json_option
@click.pass_context
def policies(ctx: click.Context, *, queue: str | None, as_json: bool) -> None:
    """Show every queue's and task's policy, and where each value comes from."""
    if ctx.invoked_subcommand is not None:
        return
    _load_tasks(ctx.obj.app)
    shown = dead_letters_of(ctx).policies(queue)
    if as_json:
        print_lines(shown.to_json())
    else:
        from celery_dlq.cli.render_policies import show_policies  # noqa: PLC0415 - see cli.context

        show_policies(screen_of(ctx).console, shown)


@policies.command("set")
@click.argument("queue")
@click.argument("values", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option(
    "--for", "span", type=Duration(), required=True, help="How long, e.g. 30m, 2h, 7d; at most 30d."
)
@click.pass_context
def set_(ctx: click.Context, queue: str, values: tuple[str, ...], *, span: float) -> None:
    """Override policy keys of QUEUE for a while, without a deploy.

    Workers notice within seconds. At the end the configured values come back.
    """
    pairs = dict(_pair(text) for text in values)
    length = timedelta(seconds=span)
    dead_letters_of(ctx).override_policy(queue, length, **pairs)
    named = ", ".join(values)
    screen_of(ctx).say(f"Policy of {queue} overridden for {length}: {named}.")


@policies.command()
@click.argument("queue")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.pass_context
def unset(ctx: click.Context, queue: str, keys: tuple[str, ...]) -> None:
    """Take overrides of QUEUE back before their time; all of them, or only KEYs."""
    lifted = dead_letters_of(ctx).lift_policy(queue, *keys)
    screen_of(ctx).say(f"Overrides of {queue} taken back: {', '.join(lifted)}.")


@click.command(short_help="Remove letters that their policies do not keep any longer.")
@click.argument("queues", metavar="[QUEUE]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Say what would be trimmed, and change nothing.")
@json_option
@click.pass_context
def trim(ctx: click.Context, queues: tuple[str, ...], *, dry_run: bool, as_json: bool) -> None:
    """Remove letters past dead_letter_ttl or over dead_letter_max_length now.

    Workers do this by themselves, some hundred letters a second; this is for a queue
    that no worker looks after. Letters that a redrive holds are left alone.
    """
    changes = dead_letters_of(ctx).trim(*queues, dry_run=dry_run)
    if as_json:
        print_lines(change.to_json() for change in changes)
        return
    screen = screen_of(ctx)
    for change in changes:
        cause: Any = change.detail["cause"]
        verb = "Would trim" if dry_run else "Trimmed"
        screen.say(f"{verb} {change.letters:,} from {change.target} because of {cause}.")
    if not changes:
        screen.say("Nothing to trim.")


def _load_tasks(app: Any) -> None:
    """Import the task modules as a worker does: until then, autodiscovered tasks are unknown."""
    try:
        app.loader.import_default_modules()
    except Exception as exc:
        raise click.ClickException(
            f"expected the app's task modules to load, got {type(exc).__name__}: {exc}"
        ) from exc


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise click.UsageError(f"expected KEY=VALUE such as max_deliveries=3, got {text!r}")
    return key.strip(), value.strip()
