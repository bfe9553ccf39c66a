"""``dlq jobs``: long operations, watched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from celery_dlq.cli.context import (
    ask_for,
    console_of,
    dead_letters_of,
    none_matched,
    print_lines,
)
from celery_dlq.cli.options import StartAt, json_option
from celery_dlq.cli.table import Cell, age, counting, letters_text, line, say, table, utc
from celery_dlq.letters.printable import json_text
from celery_dlq.operations.jobs import check_start

if TYPE_CHECKING:
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.operations.job import Job, JobRun
    from celery_dlq.operations.redrive.checks import DryRun


HELD = (
    "another operator has them, or died with them less than a minute ago; "
    "run the command again later"
)
"""Why letters were skipped."""

_STATE_STYLES = {"running": "green", "failed": "red", "interrupted": "red", "stopped": "yellow"}
_SHOWN = (
    *("id", "actor", "started_at", "updated_at", "ended_at", "filter", "options", "total", "note"),
    *("run", "expires_at", "start_at", "canary", "failed"),
)


@click.group(
    invoke_without_command=True,
    short_help="Show jobs, newest first; or show, cancel or resume one.",
)
@json_option
@click.pass_context
def jobs(ctx: click.Context, *, as_json: bool) -> None:
    """Show jobs, newest first; or one: `status ID`, `cancel ID`, `resume ID`."""
    if ctx.invoked_subcommand is not None:
        return
    found = [_shown(ctx, job) for job in dead_letters_of(ctx).jobs()]
    if as_json:
        print_lines(job.to_json() for job in found)
    else:
        _show_all(console_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@json_option
@click.pass_context
def status(ctx: click.Context, job_id: str, *, as_json: bool) -> None:
    """Show one job, and how many of its letters died again."""
    found = _shown(ctx, dead_letters_of(ctx).job(job_id))
    if as_json:
        print_lines([found.to_json()])
    else:
        _show(console_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.pass_context
def cancel(ctx: click.Context, job_id: str) -> None:
    """End a job after its current batch; no letter is left half done."""
    found = dead_letters_of(ctx).cancel(job_id)
    outcome = "is cancelled" if found.state == "cancelled" else "will end after its current batch"
    say(console_of(ctx), f"Job {job_id} {outcome}.")


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.option("--background", is_flag=True, help="Hand it to the workers or to `dlq web`.")
@json_option
@click.pass_context
def resume(ctx: click.Context, job_id: str, *, background: bool, as_json: bool) -> None:
    """Continue a job that was interrupted, cancelled or stopped."""
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    if background:
        _tell(ctx, dead_letters.resume_in_background(job_id), as_json=as_json)
        return
    with counting(console, "letters", quiet=as_json) as progress:
        report = dead_letters.resume(job_id, progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        _show(console, _shown(ctx, dead_letters.job(job_id)))
    stayed = (getattr(report, name, 0) for name in ("refused", "failures"))
    if report.state != "done" or any(stayed):
        ctx.exit(1)


def in_background(
    ctx: click.Context,
    kind: str,
    queue: str,
    where: LetterFilter,
    how: Mapping[str, Any],
    start_at: StartAt | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Hand an operation on many letters to another process."""
    dead_letters = dead_letters_of(ctx)
    if start_at is not None:
        now = dead_letters.job_store.now()
        check_start(start_at(now), now)
    if yes:
        plan = dead_letters.plan(kind, queue, where, **how)
        if where and plan.total == 0:
            raise none_matched(queue)
    else:
        run = agreed(ctx, kind, queue, where, how, as_json=as_json)
        plan = dead_letters.assembly.jobs().keep(run.job)
    at = None if start_at is None else start_at(dead_letters.job_store.now())
    _tell(ctx, dead_letters.start(plan.id, at=at), as_json=as_json)


def agreed(
    ctx: click.Context,
    kind: str,
    queue: str,
    where: LetterFilter,
    how: Mapping[str, Any],
    *,
    as_json: bool,
) -> JobRun:
    """The job to which a person agreed: on the letters that the question counted."""
    # Without a filter, nothing must be read to count them; a second finds what is in the way.
    seconds = float("inf") if where or how["limit"] is not None else 1.0
    with counting(console_of(ctx), "scanned", quiet=as_json) as scanned:
        operations = dead_letters_of(ctx).assembly.operations()
        run, seen = operations.prepare(kind, queue, where, seconds=seconds, scanned=scanned, **how)
    count = run.job.total or 0
    if where and not count:
        raise none_matched(queue)
    if not as_json:
        show_in_the_way(console_of(ctx), seen)
    ask_for(kind, queue, count, by_id=where.ids is not None, yes=False)
    return run


def _tell(ctx: click.Context, job: Job, *, as_json: bool) -> None:
    if as_json:
        print_lines([_shown(ctx, job).to_json()])
    else:
        _show_waiting(console_of(ctx), job)


def _shown(ctx: click.Context, job: Job) -> Job:
    return job.shown(dead_letters_of(ctx).redaction)


def show_in_the_way(console: Console, plan: DryRun) -> None:
    """What the messages would wait for."""
    for what, letters in plan.waits_for.items():
        say(console, f"  {letters_text(letters)} would wait for {what}.", "yellow")


def unfinished(what: str, state: str, job_id: str) -> str:
    """What to say of a job that did not end as it should."""
    return f"The {what} was {state} before its end; `dlq jobs resume {job_id}` continues it."


def _show_all(console: Console, found: Sequence[Job]) -> None:
    """Jobs, a row each."""
    columns = ("!id", "kind, queue", "!state", "done", "!started")
    if not table(console, "Jobs, newest first", columns, map(_row, found)):
        say(console, "There are no jobs yet.")


def _row(one: Job) -> tuple[Cell, ...]:
    planned = one.state == "waiting" and one.start_at is not None
    return (
        one.id,
        (one.kind, one.queue),
        (
            line(one.state, _STATE_STYLES.get(one.state, "")),
            f"for {utc(one.start_at)}" if planned else "",
        ),
        tuple(f"{count:,} {name}" for name, count in one.counts.items() if count),
        age(one.started_at),
    )


def _show_waiting(console: Console, found: Job) -> None:
    """A job that another process is to run."""
    count = found.preview.get("letters", 0)
    least = "" if found.preview.get("exact") else "at least "
    what = f"{found.kind} {least}{letters_text(count)} of {found.queue}"
    if found.start_at is not None:
        what += f", not before {utc(found.start_at)}"
    say(console, f"Job {found.id} is {found.state}: {what}.")
    if found.note:
        say(console, f"  {found.note}", "yellow")
    say(console, f"  `dlq jobs status {found.id}` shows how it does.")


def _show(console: Console, found: Job) -> None:
    """Everything about one job."""
    shown = found.to_json()
    say(console, f"{found.kind} of {found.queue}: {found.state}", "bold")
    for name in _SHOWN:
        value = shown[name]
        if value not in (None, "", {}):
            say(console, f"  {name:<12}{json_text(value) if isinstance(value, dict) else value}")
    for name, count in found.counts.items():
        say(console, f"  {name:<12}{count:,}")
