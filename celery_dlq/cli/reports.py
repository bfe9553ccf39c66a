"""Tables of what operators did: jobs, audit, dry runs, discards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_dlq.cli.drawing import Text, line
from celery_dlq.cli.render import HELD, Screen, Unreadable, age, letters_text, shortened, table_of
from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import json_codec
from celery_dlq.letters.printable import json_text, one_line
from celery_dlq.record import DeadLetter

if TYPE_CHECKING:
    from celery_dlq.events import Change
    from celery_dlq.operations.dry_run import Check, DryRun
    from celery_dlq.operations.jobs import Job
    from celery_dlq.operations.results import DiscardReport
    from celery_dlq.operations.selection import RawEntry

_DETAIL = 200
_STATE_STYLES = {"running": "green", "failed": "red", "interrupted": "red", "stopped": "yellow"}


def readable(found: RawEntry) -> DeadLetter | Unreadable:
    """A letter, or what is to be said of an entry that is none."""
    try:
        return found.letter()
    except CorruptLetter as exc:
        return Unreadable(position=found.position, error=str(exc))


def row_of(found: RawEntry) -> DeadLetter | Unreadable:
    """As `readable`, without what no table shows: a page of letters may be large."""
    letter = readable(found)
    if isinstance(letter, Unreadable):
        return letter
    return replace(
        letter,
        body=b"",
        headers="{}",
        properties="{}",
        args_json=None,
        kwargs_json=None,
        argsrepr=None,
        kwargsrepr=None,
        traceback=None,
        history=(),
        native_death=None,
        extra={},
    )


def entry_json(found: RawEntry) -> dict[str, Any]:
    """A letter for ``--json``, or an entry that is none."""
    entry = readable(found)
    if isinstance(entry, DeadLetter):
        return entry.to_json()
    fields = {
        name.decode("utf-8", "backslashreplace"): json_codec.safe_repr(value, 1000)
        for name, value in found.fields.items()
    }
    return {
        "corrupt": True,
        "id": None,
        "position": entry.position,
        "error": entry.error,
        "fields": fields,
    }


def corrupt(screen: Screen, queue: str, found: RawEntry) -> None:
    """An entry that is no letter, as far as it can be shown."""
    shown = entry_json(found)
    screen.say(f"Entry {found.position} of {queue} is not a letter: {shown['error']}", style="red")
    for name, value in shown["fields"].items():
        screen.say(f"  {name}  {shortened(value, _DETAIL)}")
    screen.say(f"`dlq discard {queue} {found.position}` removes it.")


def jobs(screen: Screen, found: Sequence[Job]) -> None:
    """Jobs, a row each."""
    if not found:
        screen.say("No jobs yet.")
        return
    table = table_of("Jobs, newest first", "!id", "kind, queue", "!state", "done", "!started")
    for job in found:
        state = line(job.state, _STATE_STYLES.get(job.state, ""))
        what = Text.assemble(line(job.kind), "\n", line(job.queue))
        table.add_row(line(job.id), what, state, _counts(job.counts), age(job.started_at))
    screen.console.print(table)


def job(screen: Screen, found: Job) -> None:
    """One job, everything."""
    shown = found.to_json()
    screen.say(f"{found.kind} of {found.queue}: {found.state}", style="bold")
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
    ):
        if shown[name] not in (None, "", {}):
            value = shown[name]
            text = json_text(value) if isinstance(value, dict) else value
            screen.say(f"  {name:<12}{text}")
    for name, count in found.counts.items():
        screen.say(f"  {name:<12}{count:,}")


def audit(screen: Screen, changes: Sequence[Change]) -> None:
    """Changes, a row each."""
    if not changes:
        screen.say("Nobody has changed anything yet.")
        return
    table = table_of(
        "Changes, newest first", "when, who", "what, where", ("letters", "right"), "how"
    )
    for change in changes:
        table.add_row(
            Text.assemble(age(change.at), "\n", line(change.actor)),
            Text.assemble(change.action.value, "\n", line(change.target)),
            f"{change.letters:,}",
            Text(shortened(_in_words(change.detail), _DETAIL)),
        )
    screen.console.print(table)


def _in_words(detail: Mapping[str, Any]) -> str:
    """Details of a change, narrow enough for a column: names and values, a line each."""
    return "\n".join(
        one_line(f"{name}: {value if isinstance(value, str) else json_text(value)}")
        for name, value in detail.items()
        if value not in (None, "", {}, [])
    )


def dry_run(screen: Screen, queue: str, run: DryRun) -> None:
    """What a redrive would do."""
    what = f"{letters_text(run.letters)} of {queue} ({run.bytes / 1024:,.0f} KiB)"
    screen.say(f"Would redrive {what}; nothing was changed.", style="bold")
    if run.corrupt:
        screen.say(f"  {run.corrupt:,} entries are no letters and would be passed over.")
    for title, checks in (("queue", run.queues), ("task", run.tasks)):
        table = table_of("", title, ("letters", "right"), "!there", "why")
        for check in checks:
            table.add_row(line(check.name), f"{check.letters:,}", _verdict(check), line(check.why))
        screen.console.print(table)


def discarded(screen: Screen, queue: str, verb: str, report: DiscardReport) -> None:
    """What a discard or purge did."""
    screen.say(f"{verb} from {queue}: {letters_text(report.removed)} (job {report.job_id}).")
    if report.export_path:
        screen.say(f"  {report.exported:,} written to {report.export_path} before.")
    if report.kept_until:
        screen.say(f"  `dlq restore ID` brings them back until {report.kept_until}.")
    if report.skipped:
        screen.say(f"  {report.skipped:,} skipped: {HELD}.")
    if report.state != "done":
        screen.say(
            f"  It was {report.state} before its end; `dlq jobs resume {report.job_id}` goes on.",
            style="red",
        )


def _verdict(check: Check) -> Text:
    if check.found is None:
        return Text("unknown", "yellow")
    return Text("yes", "green") if check.found else Text("NO", "red")


def _counts(counts: Mapping[str, int]) -> Text:
    return Text("\n".join(f"{count:,} {name}" for name, count in counts.items() if count))
