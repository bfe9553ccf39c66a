"""What operations did, or would do, on the operator's terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from celery_dlq.cli.terminal import age, letters_text, line, say, table, two_lines, utc
from celery_dlq.letters.printable import json_text, one_line, shortened

if TYPE_CHECKING:
    from celery_dlq.events import Change
    from celery_dlq.export.exporter import ExportReport
    from celery_dlq.operations.job import Job
    from celery_dlq.operations.redrive.dry_run import Check, DryRun
    from celery_dlq.operations.results import DiscardReport, RedriveReport

_MAX_DETAIL_CHARS = 200
_MAX_ERRORS = 10
_MAX_FOREIGN_FILES = 5
_STATE_STYLES = {"running": "green", "failed": "red", "interrupted": "red", "stopped": "yellow"}
_HELD = (
    "another operator has them, or died with them less than a minute ago; "
    "run the command again later"
)

_CHORDS = "Parts of chords: {:,}. Such a chord fails; the redrive does not run its body."
_REFUSED = (
    "{:,} would be lost or have no delivery left, and stay in {}; "
    "--force redrives them nevertheless."
)


def dry_run(console: Console, queue: str, plan: DryRun) -> None:
    """What a redrive would do, and whether what it needs is there."""
    what = f"{letters_text(plan.letters)} of {queue} ({plan.bytes / 1024:,.0f} KiB)"
    say(console, f"Would redrive {what}; nothing was changed.", "bold")
    if plan.corrupt:
        say(console, f"  Would skip {_unreadable(plan.corrupt)}.")
    if plan.chords:
        say(console, f"  {_CHORDS.format(plan.chords)}", "yellow")
    for kind, checks in (("queue", plan.queues), ("task", plan.tasks)):
        rows = table("", kind, ("letters", "right"), "!there", "why")
        for check in checks:
            rows.add_row(line(check.name), f"{check.letters:,}", _there(check), line(check.why))
        if checks:
            console.print(rows)
    in_the_way(console, plan)


def in_the_way(console: Console, plan: DryRun) -> None:
    """What the messages would wait for."""
    for what, letters in plan.waits_for.items():
        say(console, f"  {letters_text(letters)} would wait for {what}.", "yellow")


def redriven(console: Console, queue: str, report: RedriveReport) -> None:
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


def discarded(console: Console, queue: str, verb: str, report: DiscardReport) -> None:
    """What a discard or a purge did."""
    say(console, f"{verb} from {queue}: {letters_text(report.removed)} (job {report.job_id}).")
    if report.export_path:
        say(console, f"  {report.exported:,} were first written to {report.export_path}.")
    if report.kept_until:
        until = utc(datetime.fromisoformat(report.kept_until))
        say(console, f"  Until {until} `dlq restore ID` brings each of them back.")
    if report.skipped:
        say(console, f"  {report.skipped:,} skipped: {_HELD}.")
    if report.state != "done":
        say(console, f"  {_unfinished('job', report.state, report.job_id)}", "red")


def exported(console: Console, report: ExportReport) -> None:
    """What an export wrote."""
    if report.letters:
        files = f"{report.files:,} file{'' if report.files == 1 else 's'}"
        size = f"{report.bytes / 1024:,.0f} KiB in {files}"
        what = f"{letters_text(report.letters)} ({size}) to {report.destination}"
        say(console, f"Exported {what}")
    else:
        say(console, f"Nothing new to export; {report.destination} is up to date.")
    if report.trimmed:
        say(console, f"Trimmed {letters_text(report.trimmed)}, after reading the files back.")
    if report.compared:
        names = ", ".join(report.compared)
        say(console, f"Read again, without the letters that the files have: {names}", "yellow")
    if report.waiting:
        names = ", ".join(report.waiting)
        say(console, f"Letters that died after --until were left for a later export: {names}")
    if report.unreadable:
        left_out = f"Not exported: {_unreadable(report.unreadable)}."
        say(console, f"{left_out} `dlq show` and `dlq discard` take a position:", "bold red")
        for place in report.unreadable_at:
            say(console, f"  {place}", "red")
        if more := report.unreadable - len(report.unreadable_at):
            say(console, f"  and {more:,} more", "red")
    if report.foreign:
        names = ", ".join(report.foreign[:_MAX_FOREIGN_FILES])
        say(console, f"No export made these files, and Spark may fail on them: {names}", "yellow")


def jobs(console: Console, found: Sequence[Job]) -> None:
    """Jobs, a row each."""
    if not found:
        say(console, "There are no jobs yet.")
        return
    rows = table("Jobs, newest first", "!id", "kind, queue", "!state", "done", "!started")
    for one in found:
        rows.add_row(
            line(one.id),
            two_lines(line(one.kind), line(one.queue)),
            _state(one),
            "\n".join(f"{count:,} {name}" for name, count in one.counts.items() if count),
            age(one.started_at),
        )
    console.print(rows)


def _state(one: Job) -> Text:
    state = line(one.state, _STATE_STYLES.get(one.state, ""))
    if one.state == "waiting" and one.start_at is not None:
        return two_lines(state, line(f"for {utc(one.start_at)}"))
    return state


def waiting(console: Console, found: Job) -> None:
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


def job(console: Console, found: Job) -> None:
    """Everything about one job."""
    shown = found.to_json()
    say(console, f"{found.kind} of {found.queue}: {found.state}", "bold")
    for name in (
        "id",
        "actor",
        "started_at",
        "updated_at",
        "ended_at",
        "filter",
        "options",
        "total",
        "note",
        "run",
        "expires_at",
        "start_at",
        "canary",
        "failed",
    ):
        value = shown[name]
        if value not in (None, "", {}):
            say(console, f"  {name:<12}{json_text(value) if isinstance(value, dict) else value}")
    for name, count in found.counts.items():
        say(console, f"  {name:<12}{count:,}")


def audit(console: Console, changes: Sequence[Change]) -> None:
    """Changes, a row each."""
    if not changes:
        say(console, "Nothing has been changed yet.")
        return
    rows = table("Changes, newest first", "when, who", "what, where", ("letters", "right"), "how")
    for change in changes:
        rows.add_row(
            two_lines(line(age(change.at)), line(change.actor)),
            two_lines(line(change.action.value), line(change.target)),
            f"{change.letters:,}",
            shortened(_detail(change.detail), _MAX_DETAIL_CHARS),
        )
    console.print(rows)


def _redrive_notes(report: RedriveReport) -> Iterator[tuple[str, str]]:
    if report.canary is not None:
        said = "Canary: {succeeded} of {redriven} succeeded, {died} died again, {open} did not end"
        held = f", held by {', '.join(report.canary['holds'])}" if report.canary["holds"] else ""
        yield f"{said.format(**report.canary)}{held}. Verdict: {report.canary['verdict']}.", ""
    if report.state != "done":
        yield _unfinished("redrive", report.state, report.redrive_id), "red"
    if report.corrupt:
        yield f"Skipped {_unreadable(report.corrupt)}.", ""
    if report.finished:
        yield f"{report.finished:,} of them were published by an interrupted redrive.", ""
    if report.maybe_twice:
        copies = "equal dlq_letter headers show the copies"
        yield f"{report.maybe_twice:,} may have been published before as well; {copies}.", ""
    if report.skipped:
        yield f"{report.skipped:,} skipped: {_HELD}.", ""
    if report.doubtful:
        yield f"The broker may have accepted {report.doubtful:,} of those that failed.", "red"


def _unfinished(what: str, state: str, job_id: str) -> str:
    return f"The {what} was {state} before its end; `dlq jobs resume {job_id}` continues it."


def _unreadable(count: int) -> str:
    return f"{count:,} entr{'y that is not a letter' if count == 1 else 'ies that are not letters'}"


def _there(check: Check) -> Text:
    if check.found is None:
        return line("unknown", "yellow")
    return line("yes", "green") if check.found else line("NO", "red")


def _detail(detail: Mapping[str, Any]) -> str:
    """Names and values, a line each: narrow enough for a column."""
    return "\n".join(
        one_line(f"{name}: {value if isinstance(value, str) else json_text(value)}")
        for name, value in detail.items()
        if value not in (None, "", {}, [])
    )
