"""Holds and releases on the operator's terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from celery_dlq.cli.table import about_hold, age, line, say, table, utc

if TYPE_CHECKING:
    from celery_dlq.operations.instructions import HeldMessages
    from celery_dlq.operations.results import RedriveReport

_MAX_ERRORS = 10
_STATE_STYLES = {"full": "red", "ended": "yellow"}


def holds(console: Console, found: Sequence[HeldMessages]) -> None:
    """Holds, a row each."""
    rows = (
        (
            (line(one.hold.id, "bold"), line(one.state, _STATE_STYLES.get(one.state, ""))),
            about_hold(one.hold, one.hold.task, one.hold.queue, *one.hold.where),
            one.held,
            (age(one.oldest_at), utc(one.hold.until) if one.hold.until else "released"),
        )
        for one in found
    )
    columns = ("!id\nstate", "task, queue, reason, by", ">held", "!oldest\nuntil")
    if not table(console, "Holds", columns, rows):
        say(console, "Nothing is held.")


def released(console: Console, hold_id: str, report: RedriveReport) -> None:
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
        say(
            console,
            f"  It is {report.state}; `dlq jobs resume {report.redrive_id}` goes on.",
            "red",
        )
