"""``dlq queues``, ``groups`` and ``audit``: what there is, by cause, and who changed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from celery_dlq.cli.context import console_of, dead_letters_of, load_tasks, print_lines, reader_of
from celery_dlq.cli.letters import class_name, reason_text
from celery_dlq.cli.options import files_option, json_option, limit_option, queue_argument
from celery_dlq.cli.table import Cell, age_text, block_text, line_text, print_table, say
from celery_dlq.events import Change, GroupState
from celery_dlq.letters.printable import json_text, one_line, shortened
from celery_dlq.letters.record import iso
from celery_dlq.policies.table import NOTHING_GUARDED
from celery_dlq.store.records import OPEN_GROUP, Group, QueueSummary
from celery_dlq.store.worker_records import ServerMemory

_MAX_DETAIL_CHARS = 200
_MOST_EMPTIED = 20
_MOST_CHANGES = 10_000  # as many as are kept


@click.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, *, as_json: bool) -> None:
    """Show all dead-letter queues: letters, ages, reasons.

    `groups QUEUE` shows why the letters of one of them failed.
    """
    dead_letters = dead_letters_of(ctx)
    found = dead_letters.queues()
    if as_json:
        print_lines(map(_as_json, found))
        return
    console = console_of(ctx)
    if not show_queues(console, found):
        load_tasks(ctx.obj.app)  # which may have policies
        guarded = dead_letters.policies().views
        say(console, "There are no dead letters yet." if guarded else f"{NOTHING_GUARDED}.")
    if held := dead_letters.assembly.held_queues().held_messages():
        holds, count = f"{len(held)} hold{'s' if len(held) > 1 else ''}", sum(h.held for h in held)
        say(console, f"Held by {holds}: {count:,}; see `dlq holds`.", "yellow")
    for text in _memory_lines(found, dead_letters.memory()):
        say(console, text, "dim")


@click.command()
@queue_argument
@limit_option(100, "causes")
@click.option(
    "--state",
    type=click.Choice([state.value for state in GroupState]),
    help="Only causes in this state; those that are not open, also without letters.",
)
@files_option
@json_option
@click.pass_context
def groups(
    ctx: click.Context, queue: str, *, limit: int, state: str | None, files: str, as_json: bool
) -> None:
    """Show the letters of QUEUE by cause, largest first.

    A cause is one kind of error at one place in the code. Other commands take its
    fingerprint, of which the first digits are enough.
    """
    if files and state:
        raise click.UsageError("--from does not go with --state: files know no states")
    found = reader_of(dead_letters_of(ctx), files).groups(queue, limit=limit, state=state)
    if as_json:
        print_lines(map(_group_json, found))
        return
    console = console_of(ctx)
    if not show_groups(console, queue, found):
        say(console, f"{queue} has no {state} cause." if state else _without_causes(ctx, queue))
    for at, gone in [] if state or files else dead_letters_of(ctx).emptied(queue)[:_MOST_EMPTIED]:
        what = f"{gone.exception_type or gone.reason} of {gone.task_name or 'no task'}"
        say(console, f"{gone.fingerprint} {what}: no letters since {age_text(at)}.", "dim")
    if len(found) == limit:
        say(console, f"These are the {limit} largest causes; --limit shows more.")


@click.command()
@limit_option(50, "changes")
@click.option("--actor", default="", help="Only by people or workers whose name has this text.")
@click.option("--action", default="", help="Only this kind of change, e.g. redriven or purged.")
@json_option
@click.pass_context
def audit(ctx: click.Context, *, limit: int, actor: str, action: str, as_json: bool) -> None:
    """Show who changed what, newest first.

    Changes of letters, causes, holds, circuit breakers and policies are recorded. The
    newest 10,000 are kept.
    """
    dead_letters, most = dead_letters_of(ctx), _MOST_CHANGES if actor or action else limit
    found = (c for c in dead_letters.changes(most) if actor in c.actor and action in c.action.value)
    changes = [dead_letters.redaction.shown(one, "detail") for one in islice(found, limit)]
    if as_json:
        print_lines(change.to_json() for change in changes)
        return
    columns = ("when, who", "what, where", ">letters", "how")
    if not print_table(
        console_of(ctx), "Changes, newest first", columns, map(_change_row, changes)
    ):
        none = "No change matches." if actor or action else "Nothing has been changed yet."
        say(console_of(ctx), none)


def _without_causes(ctx: click.Context, queue: str) -> str:
    """What there is in a queue whose letters have no causes."""
    length = dead_letters_of(ctx).store.length(queue)
    return (
        f"{queue} has no causes; {length:,} entries are no letters."
        if length
        else (f"{queue} is empty.")
    )


def show_queues(console: Console, summaries: Sequence[QueueSummary]) -> int:
    """Dead-letter queues, a row each; returns how many."""
    columns = ("queue", ">letters", ">last hour", "!oldest\nnewest", "!reasons")
    rows = (
        (
            line_text(queue.name, "bold"),
            queue.letters,
            f"+{queue.last_hour:,}",
            (age_text(queue.oldest_at), age_text(queue.newest_at)),
            tuple(f"{count:,} {name}" for name, count in queue.reasons.items()),
        )
        for queue in summaries
    )
    return print_table(console, "Dead-letter queues", columns, rows)


def show_groups(console: Console, queue: str, found: Sequence[Group]) -> int:
    """Groups, a row each; returns how many."""
    columns = ("!fingerprint, state", ">letters", "task, cause", "!seen")
    return print_table(console, f"{queue} by cause", columns, map(_group_row, found))


def _group_row(group: Group) -> tuple[Cell, ...]:
    cause, state = reason_text(group.reason), group.status.state
    if group.exception_type is not None:
        cause = Text.assemble(cause, " ", line_text(class_name(group.exception_type)))
    return (
        (group.fingerprint, line_text(state.value, state.colour), group.status.owner),
        group.letters,
        (line_text(group.task_name, "bold"), cause),
        (f"first {age_text(group.first_seen_at)}", f"last  {age_text(group.last_seen_at)}"),
    )


def _change_row(change: Change) -> tuple[Cell, ...]:
    detail = block_text(_detail_text(change.detail))
    what = (change.action.value, change.target)
    return (age_text(change.at), change.actor), what, change.letters, detail


def _detail_text(detail: Mapping[str, Any]) -> str:
    """Names and values, a line each: narrow enough for a column."""
    texts = (
        one_line(f"{name}: {value if isinstance(value, str) else json_text(value)}")
        for name, value in detail.items()
        if value not in (None, "", {}, [])
    )
    return "\n".join(shortened(text, _MAX_DETAIL_CHARS) for text in texts)


def _memory_lines(summaries: Sequence[QueueSummary], server: ServerMemory | None) -> Iterator[str]:
    """What the letters take of Redis, in a line; nothing where that is unknown."""
    taken = sum(queue.memory_bytes or 0 for queue in summaries)
    if taken:
        share = None if server is None else server.share
        of = "" if share is None else f", which uses {share:.0%} of its maxmemory"
        yield f"The letters take {taken / 1e6:,.1f} MB of Redis{of}."


def _group_json(group: Group) -> dict[str, Any]:
    values = _as_json(replace(group, status=OPEN_GROUP))
    return {**values, "state": group.status.state.value, "status": group.status.to_json()}


def _as_json(record: QueueSummary | Group) -> dict[str, Any]:
    values = asdict(record)
    times = {name: iso(value) for name, value in values.items() if isinstance(value, datetime)}
    return {**values, **times}
