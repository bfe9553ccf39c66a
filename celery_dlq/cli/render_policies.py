"""How policies look to people."""

from __future__ import annotations

from typing import Any

from celery_dlq.cli.drawing import Console, Padding, Table, Text, line
from celery_dlq.operations.policies import PolicyReport, PolicyView
from celery_dlq.policies.exchange import DeadLetterExchange

_SECONDS = {"default_delay", "dead_letter_ttl"}


def show_policies(console: Console, report: PolicyReport) -> None:
    """Every queue and task: the values that are set and their sources, then what is not set."""
    if not report.views:
        console.print("No policy: no queue and no task is guarded.")
    for view in report.views:
        console.print(_title(view))
        console.print(_values(view))
        unset = [name for name, sourced in view.fields.items() if sourced.value is None]
        console.print(Padding(Text(f"not set: {', '.join(unset)}", "dim"), (0, 0, 0, 2)))
        console.print()
    for warning in report.warnings:
        console.print(line(f"! {warning}", "yellow"))


def _title(view: PolicyView) -> Text:
    of = f"queue {view.queue}" if view.task is None else f"task {view.task}"
    source = "" if view.task is None else f" from queue {view.queue}"
    target = line(f" → {view.dead_letter_queue}", "dim")
    return Text.assemble(line(of, "bold"), line(source), target)


def _values(view: PolicyView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for name, sourced in view.fields.items():
        if sourced.value is not None:
            table.add_row(f"  {name}", line(shown(name, sourced.value)), line(sourced.source))
    return table


def duration(seconds: float) -> str:
    """Seconds in the largest unit that says them whole."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,g} s"


def shown(name: str, value: Any) -> str:
    """A policy value as people write it."""
    if name in _SECONDS:
        return duration(value)
    if isinstance(value, DeadLetterExchange):
        return f"{value.name or 'default exchange'} ({value.type})"
    if isinstance(value, (frozenset, tuple)):
        return ", ".join(sorted(str(item) for item in value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
