"""``dlq hold``, ``dlq holds`` and ``dlq release``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import click
from rich.console import Console

from celery_dlq.cli.context import (
    confirm_doubt,
    console_of,
    dead_letters_of,
    load_tasks,
    print_answer,
    print_lines,
)
from celery_dlq.cli.jobs import unfinished
from celery_dlq.cli.next_command import say_next
from celery_dlq.cli.options import DURATION, RATE, conditions_option, json_option, yes_option
from celery_dlq.cli.table import (
    about_hold,
    age_text,
    counting,
    line_text,
    print_table,
    say,
    utc_text,
)
from celery_dlq.errors import DLQError
from celery_dlq.letters.bodies import unread_text
from celery_dlq.letters.printable import one_line
from celery_dlq.operations.incidents import Incidents, names_cause
from celery_dlq.operations.redrive.work import RedriveReport
from celery_dlq.operations.release import HeldMessages
from celery_dlq.store.holds import Hold

_MAX_ERRORS = 10
_STATE_STYLES = {"full": "red", "ended": "yellow"}


@click.command(short_help="Keep the messages of a task or queue from starting.")
@click.option("--task", help="Name of the task, or a pattern such as 'shop.*'.")
@click.option("--queue", help="Name of the queue, or a pattern.")
@conditions_option
@click.option("--for", "span", type=DURATION, help="Release them after this time, e.g. 2h, 30d.")
@click.option("--reason", default="", help="Why; `holds` shows it.")
@yes_option
@json_option
@click.pass_context
def hold(
    ctx: click.Context,
    *,
    task: str | None,
    queue: str | None,
    conditions: tuple[str, ...],
    span: float | None,
    reason: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Keep messages from starting until `dlq release`.

    Workers notice within 2 seconds. Tasks that run go on. Held messages keep their order;
    they are neither counted nor dead-lettered. A worker that cannot reach Redis runs them.

    Asks only if workers run, and none of them has the task.
    """
    if task is None and queue is None:
        raise click.UsageError("expected --task or --queue, got neither")
    load_tasks(ctx.obj.app)
    length = None if span is None else timedelta(seconds=span)
    dead_letters = dead_letters_of(ctx)
    dead_letters.check_hold(task, queue=queue, conditions=conditions)
    doubt = dead_letters.assembly.known_names().doubt_of_task(task)
    confirm_doubt(doubt, f"hold {task}", yes=yes)
    made = dead_letters.hold(task, queue=queue, conditions=conditions, span=length, reason=reason)
    end = "until `dlq release`" if length is None else f"for {length}"
    text = f"{made.id} holds tasks {made.task} of queues {made.queue} {end}."
    print_answer(ctx, made, text, as_json=as_json)
    if not as_json and length is None:
        say_next(console_of(ctx), f"release {made.id}", when="it is mended")


@click.command()
@json_option
@click.pass_context
def holds(ctx: click.Context, *, as_json: bool) -> None:
    """Show holds and how many messages they have.

    A hold that has ended is shown while it has messages. Messages run if a hold asks for
    arguments, and theirs cannot be read; they are counted.
    """
    dead_letters = dead_letters_of(ctx)
    found = [one.shown(dead_letters.redaction) for one in dead_letters.holds()]
    if as_json:
        print_lines(one.to_json() for one in found)
    else:
        show_holds(console_of(ctx), found)


@click.command()
@click.argument("hold_id", metavar="[ID]", required=False)
@click.option("--all", "every", is_flag=True, help="End all holds, also those of circuit breakers.")
@click.option("--rate", type=RATE, help="Release at most this many messages a second.")
@click.option(
    "--limit", type=int, help="Release only the oldest messages, this many; the hold goes on."
)
@json_option
@click.pass_context
def release(
    ctx: click.Context,
    *,
    hold_id: str | None,
    every: bool,
    rate: float | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """End a hold: its messages return to their queues and run.

    They keep their order. The command does not ask.

    A message stays held if it would be lost: nobody knows its queue, or no live worker of
    its queue has its task. The exit code is then 1, as for a hold without messages. The
    release is a job: see `dlq jobs`.
    """
    if (hold_id is None) is not every:
        raise click.UsageError("expected the ID of a hold, or --all")
    if every and limit is not None:
        raise click.UsageError("expected --limit with the ID of a hold, got it with --all")
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    found = {one.hold.id: one.hold for one in dead_letters.holds()}
    chosen, whole = [hold_id] if hold_id else [*found], True
    for one in chosen:
        try:
            with counting(console, "released", quiet=as_json) as progress:
                report = dead_letters.release(one, rate=rate, limit=limit, progress=progress)
        except DLQError as exc:
            if not every:
                raise
            click.echo(f"Error: {one_line(str(exc))}", err=True)  # of this one; the others go on
            whole = False
            continue
        if as_json:
            print_lines([report.to_json()])
        else:
            show_released(console, one, report)
            if one in found:
                _say_redrive(ctx, found[one])
        whole &= not (report.failures or report.refused) and report.state == "done"
    if not chosen and not as_json:
        say(console, "Nothing is held.")
    if not whole:
        ctx.exit(1)


def _say_redrive(ctx: click.Context, hold: Hold) -> None:
    """The command for the letters that the hold came too late for: the cause that it names.

    That is the one in its reason, as `hold_command` and the pages write it, else its largest.
    """
    incidents = Incidents(dead_letters_of(ctx).assembly)
    causes = [one for one in incidents.causes() if hold.covers(one[1].task_name, hold.queue)]
    causes.sort(key=lambda one: not names_cause(hold.reason, one[1]))
    for queue, group in causes[:1]:
        say_next(console_of(ctx), incidents.canary_command(queue, group))


def show_holds(console: Console, found: Sequence[HeldMessages]) -> None:
    """Holds, a row each."""
    rows = (
        (
            (
                line_text(one.hold.id, "bold"),
                line_text(one.state, _STATE_STYLES.get(one.state, "")),
            ),
            about_hold(one.hold, one.hold.task, one.hold.queue, *one.hold.where),
            one.held,
            (age_text(one.oldest_at), utc_text(one.hold.until) if one.hold.until else "released"),
        )
        for one in found
    )
    columns = ("!id\nstate", "task, queue, reason, by", ">held", "!oldest\nuntil")
    if not print_table(console, "Holds", columns, rows):
        say(console, "Nothing is held.")
    for one in found:
        if one.unread:
            text = unread_text(one.unread, "message", "not held")
            say(console, f"{one.hold.id}: {text}.", "yellow")


def show_released(console: Console, hold_id: str, report: RedriveReport) -> None:
    """What a release did."""
    done = report.published + report.finished
    say(console, f"Released from {hold_id}: {done:,} messages (job {report.redrive_id}).")
    if report.maybe_twice:
        copies = "equal dlq_letter headers show the copies"
        say(console, f"  {report.maybe_twice:,} may be in their queues twice; {copies}.", "yellow")
    for letter_id, error in list(report.failed.items())[:_MAX_ERRORS]:
        say(console, f"  failed {letter_id}: {error}", "red")
    for why, count in list(report.refused_by.items())[:_MAX_ERRORS]:
        say(console, f"  {count:,} stay held, because they would be lost: {why}", "red")
    if report.skipped:
        say(console, f"  {report.skipped:,} are being released by another process.")
    if report.state != "done":
        say(console, f"  {unfinished('release', report, report.redrive_id)}", "red")
