"""``dlq policies``: the policies in force, and overrides of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from celery_dlq.cli.context import console_of, dead_letters_of, load_tasks, print_lines
from celery_dlq.cli.options import DURATION, json_option, yes_option
from celery_dlq.cli.table import line_text, print_facts, say
from celery_dlq.letters.printable import one_line
from celery_dlq.operations.policies import PolicyAdmin, PolicyReport, PolicyView
from celery_dlq.operations.removal import Removal
from celery_dlq.policies.checks import check_names
from celery_dlq.policies.policy import policy_keys
from celery_dlq.policies.table import NOTHING_GUARDED, PolicyTable, of_whole_queues

_IN_SECONDS = {"crash_delay", "default_delay", "dead_letter_ttl"}


@click.group(invoke_without_command=True, short_help="Show the policies of queues and tasks.")
@click.option("--queue", help="Show only this queue.")
@json_option
@click.pass_context
def policies(ctx: click.Context, *, queue: str | None, as_json: bool) -> None:
    """Show the policy of every queue and task, and where each value comes from.

    `set` overrides a policy for a limited time.
    """
    if ctx.invoked_subcommand is not None:
        return
    load_tasks(ctx.obj.app)
    shown = dead_letters_of(ctx).policies(queue)
    if as_json:
        print_lines(shown.to_json())
    else:
        show_policies(console_of(ctx), shown)


@policies.command("set")
@click.argument("queue")
@click.argument("values", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option(
    "--for",
    "span",
    type=DURATION,
    required=True,
    help="How long the override lasts, e.g. 30m, 2h, 7d; at most 30d.",
)
@yes_option
@click.pass_context
def set_(
    ctx: click.Context, queue: str, values: tuple[str, ...], *, span: float, yes: bool
) -> None:
    """Override policy keys of QUEUE for a limited time, without a deploy.

    Workers notice within seconds. The value `none` switches a key off. When the override
    ends, the configured values apply again; an earlier override does not come back.

    If the new values remove or redrive letters that exist, the command asks first. They
    do so after one minute; until then `unset` prevents it.
    """
    pairs: dict[str, Any] = dict(map(_parsed_pair, values))
    check_names("policy keys", pairs, policy_keys())
    length = timedelta(seconds=span)
    load_tasks(ctx.obj.app)
    admin = PolicyAdmin(dead_letters_of(ctx).assembly)
    _ask_before_change(
        ctx, queue, pairs, admin.after(admin.check_override(queue, length, **pairs)), yes=yes
    )
    dead_letters_of(ctx).override_policy(queue, length, **pairs)
    say(console_of(ctx), f"Policy of {queue} overridden for {length}: {', '.join(values)}.")
    _say_when(ctx, pairs)


@policies.command()
@click.argument("queue")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@yes_option
@click.pass_context
def unset(ctx: click.Context, queue: str, keys: tuple[str, ...], *, yes: bool) -> None:
    """End overrides of QUEUE early: all, or only those of KEYs.

    Asks first if this removes or redrives letters.
    """
    load_tasks(ctx.obj.app)
    admin = PolicyAdmin(dead_letters_of(ctx).assembly)
    wanted = admin.check_lift(queue, *keys)
    _ask_before_change(
        ctx, queue, wanted, admin.after(lifted=[(queue, key) for key in wanted]), yes=yes
    )
    lifted = dead_letters_of(ctx).lift_policy(queue, *wanted)
    say(console_of(ctx), f"Overrides of {queue} ended: {', '.join(lifted)}.")
    _say_when(ctx, wanted)


def _ask_before_change(
    ctx: click.Context, queue: str, keys: Iterable[str], after: PolicyTable, *, yes: bool
) -> None:
    """Ask before a change that removes or redrives letters."""
    if yes:
        return
    effect = str(
        Removal(dead_letters_of(ctx).assembly).policy_effect_on(queue, frozenset(keys), after)
    )
    if effect and not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed without a terminal: in one minute, this {effect}")
    if effect:
        click.confirm(
            f"In one minute, this {one_line(effect)}. Change the policy?", abort=True, err=True
        )


def _say_when(ctx: click.Context, keys: Iterable[str]) -> None:
    """Say when a change begins that is about letters."""
    if late := sorted({*keys} & {*of_whole_queues()}):
        names = ", ".join(late)
        say(console_of(ctx), f"{names}: changes in one minute; until then its letters stay.")


def _parsed_pair(text: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in text.partition("="))
    if not key or not value:
        raise click.UsageError(f"expected KEY=VALUE such as max_deliveries=3, got {text!r}")
    return key, value


def show_policies(console: Console, report: PolicyReport) -> None:
    """Each queue and task with the values that are set and their sources, then what is unset."""
    if not report.views:
        say(console, f"{NOTHING_GUARDED}.")
    for view in report.views:
        console.print(_view_title(view))
        unset = [name for name, sourced in view.fields.items() if sourced.value is None]
        rows = (
            (f"  {name}", _shown_value(name, sourced.value).split("\n"), sourced.source)
            for name, sourced in view.fields.items()
            if name not in unset
        )
        print_facts(console, rows, ("", "", "dim"))
        console.print(Padding(line_text(f"not set: {', '.join(unset)}", "dim"), (0, 0, 0, 2)))
        console.print()
    for warning in report.warnings:
        console.print(line_text(f"! {warning}", "yellow"))


def _view_title(view: PolicyView) -> Text:
    of = f"queue {view.queue}" if view.task is None else f"task {view.task}"
    source = "" if view.task is None else f" from queue {view.queue}"
    target = line_text(f" → {view.dead_letter_queue}", "dim")
    return Text.assemble(line_text(of, "bold"), line_text(source), target)


def _shown_value(name: str, value: Any) -> str:
    if value is False:
        return "off"
    if name in _IN_SECONDS and isinstance(value, float):
        return _duration(value)
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value))) or "none"
    return str(value)


def _duration(seconds: float) -> str:
    """The largest unit of which it is a whole number."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,g} s"
