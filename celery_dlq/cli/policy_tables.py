"""Policies on the operator's terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from celery_dlq.cli.terminal import Table, line, say
from celery_dlq.operations.policies import PolicyReport, PolicyView

_IN_SECONDS = {"default_delay", "dead_letter_ttl"}


def policies(console: Console, rules: PolicyReport) -> None:
    """Each queue and task with the values that are set and their sources, then what is unset."""
    if not rules.views:
        say(console, "There are no policies: no queue and no task is guarded.")
    for view in rules.views:
        console.print(_title(view))
        console.print(_values(view))
        unset = [name for name, sourced in view.fields.items() if sourced.value is None]
        console.print(Padding(line(f"not set: {', '.join(unset)}", "dim"), (0, 0, 0, 2)))
        console.print()
    for warning in rules.warnings:
        console.print(line(f"! {warning}", "yellow"))


def _title(view: PolicyView) -> Text:
    of = f"queue {view.queue}" if view.task is None else f"task {view.task}"
    source = "" if view.task is None else f" from queue {view.queue}"
    target = line(f" → {view.dead_letter_queue}", "dim")
    return Text.assemble(line(of, "bold"), line(source), target)


def _values(view: PolicyView) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_column(style="dim", overflow="fold")
    for name, sourced in view.fields.items():
        if sourced.value is not None:
            rows.add_row(f"  {name}", line(_shown(name, sourced.value)), line(sourced.source))
    return rows


def _shown(name: str, value: Any) -> str:
    if value is False:
        return "off"
    if name in _IN_SECONDS and isinstance(value, float):
        return _duration(value)
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value))) or "none"
    return str(value)


def _duration(seconds: float) -> str:
    """The largest unit of which it is a whole number."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,g} s"
