"""``dlq jobs``: long operations, watched from anywhere."""

from __future__ import annotations

import click

from celery_dlq.cli.context import dead_letters_of, print_lines, screen_of
from celery_dlq.cli.options import json_option


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
    from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

    found = dead_letters_of(ctx).jobs()
    if as_json:
        print_lines(job.to_json() for job in found)
    else:
        reports.jobs(screen_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@json_option
@click.pass_context
def status(ctx: click.Context, job_id: str, *, as_json: bool) -> None:
    """Show one job, and how many of its letters died again."""
    from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

    found = dead_letters_of(ctx).job(job_id)
    if as_json:
        print_lines([found.to_json()])
    else:
        reports.job(screen_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.pass_context
def cancel(ctx: click.Context, job_id: str) -> None:
    """End a job after its present batch; no letter is left half done."""
    found = dead_letters_of(ctx).cancel(job_id)
    state = "has ended" if found.state == "cancelled" else "ends after its present batch"
    screen_of(ctx).say(f"Job {job_id} {state}.")


@jobs.command()
@click.argument("job_id", metavar="ID")
@json_option
@click.pass_context
def resume(ctx: click.Context, job_id: str, *, as_json: bool) -> None:
    """Go on with a job that was interrupted, cancelled or stopped."""
    dead_letters, screen = dead_letters_of(ctx), screen_of(ctx)
    with screen.counting("letters", quiet=as_json) as progress:
        report = dead_letters.resume(job_id, progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        from celery_dlq.cli import reports  # noqa: PLC0415 - imports rich

        reports.job(screen, dead_letters.job(job_id))
    if report.state != "done":
        ctx.exit(1)
