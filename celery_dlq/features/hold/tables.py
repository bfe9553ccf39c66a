"""Holds and releases on the operator's terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from celery_dlq.cli.terminal import age, line, say, table, two_lines, utc

if TYPE_CHECKING:
    from celery_dlq.features.hold.operations import HeldMessages
    from celery_dlq.operations.results import RedriveReport
    from celery_dlq.store.instructions import Hold

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
            _about(hold.task, hold.queue, *hold.where, hold=hold),
            f"{one.held:,}",
            f"{age(one.oldest_at)}\n{utc(hold.until) if hold.until else 'released'}",
        )
    console.print(rows)


def summary(found: Sequence[HeldMessages]) -> str:
    """The holds in one sentence; empty if there are none."""
    if not found:
        return ""
    held = sum(one.held for one in found)
    return f"Held by {len(found)} hold{'s' if len(found) > 1 else ''}: {held:,}; see `dlq holds`."


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


def breakers(console: Console, found: Sequence[HeldMessages]) -> None:
    """Circuit breakers that are not closed, a row each."""
    if not found:
        say(console, "All circuit breakers are closed.")
        return
    rows = table(
        "Circuit breakers", "!id\nstate", "task, queue, reason, by", ("held", "right"), "!probes"
    )
    for one in found:
        circuit = one.hold.circuit
        if circuit is not None:
            rows.add_row(
                two_lines(
                    line(one.hold.id, "bold"),
                    line(one.state, "red" if one.state == "open" else "yellow"),
                ),
                _about(circuit.task, circuit.queue, hold=one.hold),
                f"{one.held:,}",
                f"{circuit.successes} of {circuit.probes}\nevery {circuit.probe_every:g} s",
            )
    console.print(rows)


def _about(*names: str, hold: Hold) -> Text:
    shown = [*map(line, names), *filter(None, (line(hold.reason), line(hold.actor, "dim")))]
    return Text("\n").join(shown)
