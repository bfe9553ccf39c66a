"""``dlq redrive``: dry, as it is, or with edited arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from celery_dlq.cli.jobs import (
    JobRequest,
    say_next_steps,
    show_in_the_way,
    skipped_texts,
    unfinished,
)
from celery_dlq.cli.options import DURATION, RATE, StartAt, changes_letters, files_option, options
from celery_dlq.cli.table import letters_text, line_text, print_table, say, unreadable_text
from celery_dlq.letters.conditions import assignment
from celery_dlq.letters.printable import json_text
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.files import check_reachable
from celery_dlq.operations.redrive.message import RedriveOptions

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.checks import DryRun, TargetCheck
    from celery_dlq.operations.redrive.work import RedriveReport

_MAX_ERRORS = 10
_CHORDS = "Parts of chords: {:,}. Such a chord fails; the redrive does not run its body."
_USED_UP = "{:,} would stay: with --keep-count no delivery is left; --force grants one more."
_REFUSED = "{:,} would be lost or have no delivery left, and stay in {}; --force redrives them."
_EDIT_OPTIONS = ("to_queue", "delay", "new_id", "keep_count", "force", "note", "files")
_OPTIONS = (*_EDIT_OPTIONS, "rate", "at_most", "limit", "canary", "max_failures", "canary_wait")


_canary_options = options(
    click.option("--canary", type=int, metavar="N", help="Redrive N letters first, as a trial."),
    click.option(
        "--max-failures", type=int, default=0, show_default=True, help="Failures to accept."
    ),
    click.option(
        "--canary-wait", type=DURATION, default="60s", show_default=True, help="Longest wait."
    ),
)
_message_options = options(
    click.option("--to-queue", help="Publish to this queue instead of each message's own."),
    click.option(
        "--delay", type=DURATION, default=0, help="Run the tasks this much later, e.g. 5m."
    ),
    click.option("--new-id", is_flag=True, help="Give each task a new ID; its old result stays."),
    click.option(
        "--keep-count", is_flag=True, help="Count earlier deliveries instead of starting at 0."
    ),
    click.option("--force", is_flag=True, help="Also publish what --dry-run says would be lost."),
    click.option("--edit", "in_editor", is_flag=True, help="First edit one letter in $EDITOR."),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="PATH=VALUE",
        help="First set an argument or header of one letter, e.g. kwargs.tenant=42.",
    ),
)


@click.command()
@changes_letters("Redrive")
@click.option("--rate", type=RATE, help="At most this many letters a second, e.g. 100/s.")
@click.option(
    "--at-most",
    type=int,
    metavar="N",
    help="Go on only while fewer than N redriven tasks have not ended.",
)
@_message_options
@click.option(
    "--dry-run", is_flag=True, help="Only show what would run and what is missing; change nothing."
)
@_canary_options
@files_option
def redrive(
    ctx: click.Context,
    /,
    *,
    dry_run: bool,
    in_editor: bool,
    assignments: tuple[str, ...],
    background: bool,
    start_at: StartAt | None,
    **given: Any,
) -> None:
    """Run the tasks of letters again, and remove the letters.

    Choose letters by ID, by filter, or with --all. Asks first, unless you name one letter
    by its ID. Without a terminal to ask, it needs --yes.

    Each message is published before its letter is removed. It keeps its body, ID,
    callbacks, chain and group; its counts start at 0.

    A letter stays if its message would be lost: nobody knows its queue, or no live
    worker of its queue has its task. The exit code is then 1.

    --canary N redrives N letters first, spread over the causes. It waits for their tasks
    to end, at most for --canary-wait. The other letters follow if no more than
    --max-failures of the N failed or did not end.
    """
    request = JobRequest.from_command(ctx, "redrive", given, _OPTIONS)
    RedriveOptions.of(**request.how)  # whatever is done with them
    background, edited = background or start_at is not None, in_editor or bool(assignments)
    if background:  # before its letters are counted
        check_reachable(request.how["files"])
    if background and (dry_run or edited):
        raise click.UsageError("--background and --at do not go with --dry-run, --edit or --set")
    if edited:
        how = {name: request.how[name] for name in _EDIT_OPTIONS}
        change = _edit_of(request, assignments, in_editor=in_editor)
        edit = replace(request, kind="edit", how=how)
        _dry_run(edit, change) if dry_run else _print_edit(edit, change)
    elif dry_run:
        _dry_run(request, None)
    elif background:
        request.hand_over(start_at)
    else:
        _redrive(request)


def _redrive(request: JobRequest) -> None:
    dead_letters, bound = request.dead_letters, request.how["at_most"]
    if bound is not None and not request.console.is_terminal:  # a terminal shows how many are open
        click.echo(f"Keeps at most {bound:,} of its messages open: it waits for ends.", err=True)
    at_once = partial(dead_letters.redrive, request.queue, request.where, **request.how)
    report = request.run_or_plan("redriven", at_once, dead_letters.assembly.jobs().run)
    request.refuse_none(report.touched + report.refused or report.state != "done")
    request.print_report(report, show_redriven)
    say_next_steps(request.ctx, report.redrive_id, as_json=request.as_json)
    if report.failures or report.refused or report.state != "done" or not report.done:
        request.ctx.exit(1)


def _dry_run(request: JobRequest, change: Edit | None) -> None:
    _, plan = request.prepared(change=change)
    request.refuse_none(plan.letters + plan.corrupt, plan.warnings)
    request.print_report(plan, _show_dry_run)
    if not plan.ready:
        request.ctx.exit(1)


def _edit_of(request: JobRequest, assignments: tuple[str, ...], *, in_editor: bool) -> Edit:
    if request.where.ids is None or len(request.where.ids) != 1:
        raise click.UsageError("--edit and --set need the ID of exactly one letter")
    assign = dict(map(assignment, assignments))
    (letter_id,) = request.where.ids
    new = edited_by_hand(request.reader, letter_id, request.queue) if in_editor else {}
    return Edit(assign=assign, **new)


def _print_edit(request: JobRequest, change: Edit) -> None:
    (letter_id,) = request.where.ids or ("",)
    report = request.dead_letters.edit(letter_id, change, request.queue, **request.how)
    request.print_report(report, show_redriven)
    if report.failures or not report.published + report.finished:
        request.ctx.exit(1)


def edited_by_hand(reader: Any, letter_id: str, queue: str) -> dict[str, Any]:
    """The arguments as a person leaves them in an editor."""
    args, kwargs = reader.arguments(letter_id, queue)
    before = json_text({"args": args, "kwargs": kwargs}, indent=2)
    after = click.edit(before, extension=".json")
    if after is None or after.strip() == before:
        raise click.ClickException("the arguments were not changed; nothing was done")
    try:
        new = json.loads(after)
        return {"args": [*new["args"]], "kwargs": {**new["kwargs"]}}
    except (ValueError, TypeError, KeyError):
        message = 'expected JSON such as {"args": [], "kwargs": {}}, got something else'
        raise click.ClickException(f"{message}; nothing was done") from None


def _show_dry_run(console: Console, queue: str, plan: DryRun) -> None:
    """What a redrive would do, and whether what it needs is there."""
    letters = max(0, plan.letters - plan.used_up - plan.claimed)
    what = f"{letters_text(letters)} of {queue} ({plan.bytes / 1024:,.0f} KiB)"
    say(console, f"Would redrive {what}; nothing was changed.", "bold")
    if plan.corrupt:
        say(console, f"  Would skip {unreadable_text(plan.corrupt)}.")
    if plan.used_up:
        say(console, f"  {_USED_UP.format(plan.used_up)}", "red")
    if plan.chords:
        say(console, f"  {_CHORDS.format(plan.chords)}", "yellow")
    for kind, checks in (("queue", plan.queues), ("task", plan.tasks)):
        rows = ((check.name, check.letters, _is_there_text(check), check.why) for check in checks)
        print_table(console, "", (kind, ">letters", "!there", "why"), rows)
    show_in_the_way(console, plan)


def show_redriven(console: Console, queue: str, report: RedriveReport) -> None:
    """What a redrive did."""
    total = letters_text(report.published + report.finished)
    say(console, f"Redriven from {queue}: {total} (redrive {report.redrive_id}).")
    for text, style in _redrive_notes(report):
        say(console, f"  {text}", style)
    for letter_id, error in list(report.failed.items())[:_MAX_ERRORS]:
        say(console, f"  failed {letter_id}: {error}", "red")
    if report.failures:
        say(console, f"  {report.failures:,} failed and stay in {queue}.", "red")
    for why, count in list(report.refused_by.items())[:_MAX_ERRORS]:
        say(console, f"  refused {letters_text(count)}: {why}", "red")
    if report.refused:
        say(console, f"  {_REFUSED.format(report.refused, queue)}", "red")


def _redrive_notes(report: RedriveReport) -> Iterator[tuple[str, str]]:
    if report.canary is not None:
        ends = "Canary: {succeeded} of {redriven} succeeded, {died} died again, {open} did not end"
        held = f", held by {', '.join(report.canary['holds'])}" if report.canary["holds"] else ""
        yield f"{ends.format(**report.canary)}{held}. Verdict: {report.canary['verdict']}.", ""
    if report.state != "done":
        yield unfinished("redrive", report, report.redrive_id), "red"
    if report.chords:
        yield _CHORDS.format(report.chords), "yellow"
    if report.corrupt:
        yield f"Skipped {unreadable_text(report.corrupt)}.", ""
    if report.finished:
        yield f"{report.finished:,} of them were published by an interrupted redrive.", ""
    if report.maybe_twice:
        copies = "equal dlq_letter headers show the copies"
        yield f"{report.maybe_twice:,} may have been published before as well; {copies}.", ""
    for text in skipped_texts(report):
        yield text, ""
    if report.doubtful:
        yield f"The broker may have accepted {report.doubtful:,} of those that failed.", "red"


def _is_there_text(check: TargetCheck) -> Text:
    if check.found is None:
        return line_text("unknown", "yellow")
    return line_text("yes", "green") if check.found else line_text("NO", "red")
