"""``dlq jobs``: long operations, watched from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from celery_dlq.cli.context import (
    ask_for,
    chosen_filter,
    console_of,
    dead_letters_of,
    known_count,
    need_terminal,
    none_matched,
    print_lines,
    queue_of,
    reader_of,
    ready_for_many,
    say_unread,
)
from celery_dlq.cli.next_command import say_next
from celery_dlq.cli.options import StartAt, json_option
from celery_dlq.cli.table import (
    Cell,
    age_text,
    counting,
    letters_text,
    line_text,
    print_table,
    say,
    utc_text,
)
from celery_dlq.errors import NotFound
from celery_dlq.letters.printable import one_line
from celery_dlq.operations.api import Operations
from celery_dlq.operations.jobs import check_start
from celery_dlq.operations.release import OPENED_AGAIN

if TYPE_CHECKING:
    from celery_dlq import DeadLetters
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.operations.files import ExportedFiles
    from celery_dlq.operations.job import Job, JobRun
    from celery_dlq.operations.redrive.checks import DryRun


_ENDS = {
    "cancelled": "was cancelled",
    "stopped": "was stopped",
    "failed": "failed",
    "interrupted": "was interrupted",
}
_MANY, _CANARY = 20, 10  # letters from which a canary is offered, and how many it has
_CLAIMED = "another command works on them, or was killed less than a minute ago"
_STATE_STYLES = {"running": "green", "failed": "red", "interrupted": "red", "stopped": "yellow"}
_SHOWN = (
    *("id", "actor", "started_at", "updated_at", "ended_at", "filter", "options", "total", "note"),
    *("run", "expires_at", "start_at", "canary", "unfinished", "failed"),
)


@click.group(
    invoke_without_command=True,
    short_help="Show redrives and other long operations; cancel or resume one.",
)
@json_option
@click.pass_context
def jobs(ctx: click.Context, *, as_json: bool) -> None:
    """Show jobs, newest first: redrives, discards, purges, restores, releases."""
    if ctx.invoked_subcommand is not None:
        return
    found = [_shown_job(ctx, job) for job in dead_letters_of(ctx).jobs()]
    if as_json:
        print_lines(job.to_json() for job in found)
    else:
        _show_all(console_of(ctx), found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@json_option
@click.pass_context
def status(ctx: click.Context, job_id: str, *, as_json: bool) -> None:
    """Show one job: its progress, and letters that failed again."""
    found = _shown_job(ctx, dead_letters_of(ctx).job(job_id))
    if as_json:
        print_lines([found.to_json()])
    else:
        _print_job(console_of(ctx), found)
        say_next_steps(ctx, job_id)


def say_next_steps(ctx: click.Context, job_id: str, *, as_json: bool = False) -> None:
    """Say what is next after a job, if a feature knows that."""
    steps = getattr(dead_letters_of(ctx), "next_steps", None)
    if steps is not None and not as_json:
        with suppress(NotFound):  # nothing was done: the store has no job
            say_next(console_of(ctx), *(one.command for one in steps(job_id)))


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.pass_context
def cancel(ctx: click.Context, job_id: str) -> None:
    """End a job after its current batch; `resume` continues it."""
    found = dead_letters_of(ctx).cancel(job_id)
    outcome = "is cancelled" if found.state == "cancelled" else "will end after its current batch"
    say(console_of(ctx), f"Job {job_id} {outcome}.")


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.option("--background", is_flag=True, help="Let a worker or `dlq web` continue it.")
@json_option
@click.pass_context
def resume(ctx: click.Context, job_id: str, *, background: bool, as_json: bool) -> None:
    """Continue a job that was interrupted, cancelled or stopped."""
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    if background:
        _print_started(ctx, dead_letters.resume_in_background(job_id), as_json=as_json)
        return
    with counting(console, "letters", quiet=as_json) as progress:
        report = dead_letters.resume(job_id, progress=progress)
    if as_json:
        print_lines([report.to_json()])
    else:
        _print_job(console, _shown_job(ctx, dead_letters.job(job_id)))
        say_next_steps(ctx, job_id)
    stayed = (getattr(report, name, 0) for name in ("refused", "failures"))
    if report.state != "done" or any(stayed):
        ctx.exit(1)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a command asks for: an operation on letters of a queue."""

    ctx: click.Context
    kind: str  # That of its job
    queue: str
    where: LetterFilter
    how: Mapping[str, Any]  # The options of the operation
    yes: bool
    as_json: bool

    @classmethod
    def from_command(
        cls, ctx: click.Context, kind: str, given: Mapping[str, Any], names: Iterable[str]
    ) -> JobRequest:
        """Read the arguments and options of a command; ``names`` are those of ``how``."""
        reader = reader_of(dead_letters_of(ctx), given.get("files", ""))
        queue, everything = queue_of(ctx, given["queue"], given), given["everything"]
        where = chosen_filter(reader, queue, given, given["letter_ids"], everything=everything)
        how = {name: given[name] for name in names}
        return cls(ctx, kind, queue, where, how, yes=given["yes"], as_json=given["as_json"])

    @property
    def console(self) -> Console:
        """Where people read."""
        return console_of(self.ctx)

    @property
    def dead_letters(self) -> DeadLetters:
        """Those of the app."""
        return dead_letters_of(self.ctx)

    @property
    def reader(self) -> DeadLetters | ExportedFiles:
        """What reads its letters."""
        return reader_of(self.dead_letters, self.how.get("files", ""))

    def hand_over(self, start_at: StartAt | None) -> None:
        """Hand it to another process."""
        dead_letters = self.dead_letters
        if start_at is not None:
            now = dead_letters.job_store.now()
            check_start(start_at(now), now)
        if self.yes:
            plan = dead_letters.plan(self.kind, self.queue, self.where, **self.how)
            self.refuse_none(plan.total != 0, plan.preview["warnings"])
        else:
            plan = dead_letters.assembly.jobs().keep_plan(self.agreed().job)
        at = None if start_at is None else start_at(dead_letters.job_store.now())
        _print_started(self.ctx, dead_letters.start(plan.id, at=at), as_json=self.as_json)

    def run_or_plan(self, verb: str, at_once: Callable[..., Any], run: Callable[..., Any]) -> Any:
        """Do it here, with ``--yes`` or else as the job to which a person agreed; its report."""
        job = None if self.yes else self.agreed()
        work = at_once if job is None else partial(run, job)
        counted = self.reader, self.queue, self.where, self.how["limit"]
        total = known_count(*counted) if job is None else job.job.total
        ready_for_many()
        with counting(self.console, verb, quiet=self.as_json, total=total) as progress:
            return work(progress=progress)

    def agreed(self) -> JobRun:
        """The job to which a person agreed: on the letters that the question counted."""
        # Without a filter, nothing must be read to count them; a second finds what is in the way.
        ids, every = self.where.ids, self.where or self.how["limit"] is not None
        if self.where and ids is None:  # before a whole queue is read
            need_terminal(f"{self.kind} letters of {self.queue}")
        run, seen = self.prepared(seconds=float("inf") if every else 1.0)
        count = run.job.total or 0
        self.refuse_none(count, seen.warnings)
        if not self.as_json:
            show_in_the_way(self.console, seen)
        how = f", {self.how['canary']:,} of them first" if self.how.get("canary") else ""
        how += f" (note: {self.how['note']})" if self.how.get("note") else ""
        if "canary" in self.how and not self.how["canary"] and count > _MANY:
            return self._asked_for_canary(run, count, how)
        ask_for(self.kind, self.queue, count, by_id=ids is not None, yes=False, how=how)
        return run

    def _asked_for_canary(self, run: JobRun, count: int, how: str) -> JobRun:
        """Ask before many letters are redriven, and offer to try some of them first."""
        what = one_line(f"redrive {letters_text(count)} of {self.queue}{how}")
        need_terminal(what)
        click.echo(f"{what[:1].upper()}{what[1:]}?", err=True)
        choices = {"canary": f"{_CANARY} of them first", "all": "at once", "no": "nothing"}
        for name, text in choices.items():
            click.echo(f"  {name:<8}{text}", err=True)
        chosen = click.prompt(
            "Choose", type=click.Choice([*choices]), default="canary", show_choices=False, err=True
        )
        if chosen == "no":
            raise click.Abort
        if chosen == "all":
            return run
        return replace(self, how={**self.how, "canary": _CANARY}).prepared(
            seconds=float("inf") if self.where or self.how["limit"] is not None else 1.0
        )[0]

    def prepared(self, **more: Any) -> tuple[JobRun, DryRun]:
        """Its job, and what it would do, without a change of anything."""
        operations = Operations(self.dead_letters.assembly)
        with counting(self.console, "scanned", quiet=self.as_json) as scanned:
            run, seen = operations.prepare(
                self.kind, self.queue, self.where, self.how, scanned=scanned, **more
            )
        say_unread(seen.unread, "letter", "left out")
        return run, seen

    def refuse_none(self, found: object, why: Sequence[str] = ()) -> None:
        """Refuse a filter that matches nothing, or nothing that is left."""
        if not found and self.where and not why:
            raise none_matched(self.reader, self.queue, self.where)
        if not found:
            text = f"nothing is left; {'; '.join(why)}" if why else f"{self.queue!r} has no letters"
            raise click.ClickException(text)

    def print_report(self, report: Any, show: Callable[[Console, str, Any], None]) -> None:
        """Print a report, for programs or for people."""
        if self.as_json:
            print_lines([report.to_json()])
        else:
            show(self.console, self.queue, report)


def _print_started(ctx: click.Context, job: Job, *, as_json: bool) -> None:
    if as_json:
        print_lines([_shown_job(ctx, job).to_json()])
    else:
        _show_waiting(console_of(ctx), job)


def _shown_job(ctx: click.Context, job: Job) -> Job:
    return job.shown(dead_letters_of(ctx).redaction)


def show_in_the_way(console: Console, plan: DryRun) -> None:
    """What the messages would wait for, and letters that others have."""
    for what, letters in plan.waits_for.items():
        say(console, f"  {letters_text(letters)} would wait for {what}.", "yellow")
    for text in plan.warnings:
        say(console, f"  {text[:1].upper()}{text[1:]}.", "yellow")
    for text in plan.notes:
        say(console, f"  Note of {text}", "yellow")
    if plan.claimed:
        say(console, f"  {plan.claimed:,} would be skipped now: {_CLAIMED}.", "yellow")


def unfinished(what: str, report: Any, job_id: str) -> str:
    """What to say of a job that did not end as it should."""
    text = f"The {what} {_ENDS.get(report.state, report.state)} before its end"
    text = f"{text}: {report.note}" if report.note else text
    if report.note == OPENED_AGAIN:
        return f"{text}. `dlq breaker` shows it."
    resume = f"`dlq jobs resume {job_id}` continues it"
    return f"{text}; {'when its cause is fixed, ' if report.state == 'stopped' else ''}{resume}."


def skipped_texts(report: Any) -> Iterator[str]:
    """Why letters were skipped."""
    if held := report.skipped - report.gone:
        yield f"{held:,} skipped: {_CLAIMED}; try again later."
    if report.gone:
        yield f"{report.gone:,} skipped: others have redriven, discarded or trimmed them meanwhile."


def _show_all(console: Console, found: Sequence[Job]) -> None:
    """Jobs, a row each."""
    columns = ("!id", "kind, queue", "!state", "done", "!started")
    if not print_table(console, "Jobs, newest first", columns, map(_job_row, found)):
        say(console, "No job has run yet.")


def _job_row(one: Job) -> tuple[Cell, ...]:
    planned = one.state == "waiting" and one.start_at is not None
    return (
        one.id,
        (one.kind, one.queue, line_text(one.options.get("note", ""), "dim")),
        (
            line_text(one.state, _STATE_STYLES.get(one.state, "")),
            f"for {utc_text(one.start_at)}" if planned else "",
        ),
        tuple(f"{count:,} {name}" for name, count in one.counts.items() if count),
        age_text(one.started_at),
    )


def _show_waiting(console: Console, found: Job) -> None:
    """A job that another process is to run."""
    count = found.preview.get("letters", 0)
    least = "" if found.preview.get("exact") else "at least "
    what = f"{found.kind} {least}{letters_text(count)} of {found.queue}"
    if found.start_at is not None:
        what += f", not before {utc_text(found.start_at)}"
    say(console, f"Job {found.id} is {found.state}: {what}.")
    if found.note:
        say(console, f"  {found.note}", "yellow")
    say(console, f"  `dlq jobs status {found.id}` shows its progress.")


def _print_job(console: Console, found: Job) -> None:
    """Everything about one job."""
    shown = found.to_json()
    say(console, f"{found.kind} of {found.queue}: {found.state}", "bold")
    shown["filter"] = found.readable_filter()
    if found.state == "done" and not found.unfinished.get("in_doubt"):
        shown["unfinished"] = None  # of its last look
    for name in _SHOWN:
        value = shown[name]
        if value not in (None, "", {}, 0):
            say(console, f"  {name:<12}{_plain_value(value)}")
    for name, count in found.counts.items():
        if count:
            still_here = ", still here" if name == "died_again" else ""  # redriven ones are not
            say(console, f"  {name:<12}{count:,}{still_here}")


def _plain_value(value: Any) -> str:
    """A value as people read it: of a mapping its names and values."""
    if isinstance(value, dict):
        some = ((name, one) for name, one in value.items() if one not in (None, "", {}, [], 0))
        return ", ".join(f"{name} {_plain_value(one)}" for name, one in some)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain_value, value))
    return f"{value:,}" if type(value) is int else str(value)
