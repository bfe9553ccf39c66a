"""Holds and releases on the operator's terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from celery_dlq.cli.terminal import about_hold, age, line, say, table, two_lines, utc

if TYPE_CHECKING:
    from celery_dlq.operations.instructions import HeldMessages
    from celery_dlq.operations.results import RedriveReport

_MAX_ERRORS = 10
_STATE_STYLES = {"full": "red", "ended": "yellow"}


def holds(console: Console, found: Sequence[HeldMessages]) -> None:
    """Holds, a row each."""
    if not found:
        say(console, "Nothing is held.")
        return
    rows = table(
        "Holds", "!id\nstate", "task, queue, reason, by", ("held", "right"), "!oldest\nuntil"
    )
    for one in found:
        hold = one.hold
        rows.add_row(
            two_lines(line(hold.id, "bold"), line(one.state, _STATE_STYLES.get(one.state, ""))),
            about_hold(hold, hold.task, hold.queue, *hold.where),
            f"{one.held:,}",
            f"{age(one.oldest_at)}\n{utc(hold.until) if hold.until else 'released'}",
        )
    console.print(rows)


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
