"""``dlq jobs``: long operations, watched from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli import operation_tables
from celery_dlq.cli.context import (
    ask_for,
    console_of,
    dead_letters_of,
    none_matched,
    print_lines,
)
from celery_dlq.cli.options import json_option
from celery_dlq.cli.terminal import counting, say
from celery_dlq.operations.jobs import check_start

if TYPE_CHECKING:
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.operations.job import Job
    from celery_dlq.operations.jobs import JobRun

StartAt = Callable[[datetime], datetime]
"""Returns when a job may start, given the present by the store's clock."""


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
        operation_tables.jobs(console_of(ctx), found)


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
        operation_tables.job(console_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.pass_context
def cancel(ctx: click.Context, job_id: str) -> None:
    """End a job after its current batch; no letter is left half done."""
    found = dead_letters_of(ctx).cancel(job_id)
    said = "is cancelled" if found.state == "cancelled" else "will end after its current batch"
    say(console_of(ctx), f"Job {job_id} {said}.")


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
        operation_tables.job(console, _shown(ctx, dead_letters.job(job_id)))
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
        plan = dead_letters.assembly.plans().keep(run.job)
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
        plans = dead_letters_of(ctx).assembly.plans()
        run, seen = plans.prepare(kind, queue, where, seconds=seconds, scanned=scanned, **how)
    count = run.job.total or 0
    if where and not count:
        raise none_matched(queue)
    if not as_json:
        operation_tables.in_the_way(console_of(ctx), seen)
    ask_for(kind, queue, count, by_id=where.ids is not None, yes=False)
    return run


def _tell(ctx: click.Context, job: Job, *, as_json: bool) -> None:
    if as_json:
        print_lines([_shown(ctx, job).to_json()])
    else:
        operation_tables.waiting(console_of(ctx), job)


def _shown(ctx: click.Context, job: Job) -> Job:
    return job.shown(dead_letters_of(ctx).redaction)
