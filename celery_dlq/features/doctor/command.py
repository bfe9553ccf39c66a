"""``dlq doctor``: what is wrong with an app, and which guarantees it has."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from celery_dlq.cli.context import console_of, dead_letters_of, load_tasks, print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.cli.table import print_facts, print_table, say
from celery_dlq.features.doctor.examination import Examination
from celery_dlq.features.doctor.finding import STORE, Finding, Guarantee
from celery_dlq.letters.printable import some_of

_UNSEEN = "No worker answered remote control, so workers without celery_dlq are not seen."


@click.command(short_help="Show what endangers messages and letters, and what to do.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Show what endangers messages and letters of this app, and what to do.

    Looks at the settings, the tasks, Redis, the broker, the result backend, the
    workers, holds and jobs, for at most ten seconds, and changes nothing. Then
    shows which guarantees the app has. Exits with 1 if it finds something.
    """
    load_tasks(ctx.obj.app)
    examination = Examination(dead_letters_of(ctx).assembly)
    found = examination.findings()
    wrong = any(finding.check == "settings" for finding in found)
    rows = [] if wrong else examination.guarantees(found)
    unseen = [_UNSEEN] if rows and not examination.answered else []
    if as_json:
        print_lines(one.to_json() for one in (*found, *rows))
        print_lines({"warning": text} for text in unseen)
    else:
        _show(console_of(ctx), found, rows)
        for text in unseen:
            say(console_of(ctx), text, "yellow")
    if found:
        ctx.exit(1)


def _show(console: Console, found: Sequence[Finding], rows: Sequence[Guarantee]) -> None:
    for one in found:
        say(console, one.check, "bold")
        shown = (("  you see", one.symptom), ("  because", one.sentence), ("  do", one.mend))
        print_facts(console, shown)
    if not found:
        say(console, "No fault was found.", "green")
    broker = rows[0].broker if rows else ""
    unseen = [one.check for one in found if one.check in (*STORE, "broker")]
    columns = ("acknowledgement", "tasks", "bounded", "lossless", "exact", "redrive")
    cells = (
        (
            row.acknowledgement,
            some_of(sorted(row.tasks)),
            *map(row.cell, ("bounded", "lossless", "exact")),
            row.redrive,
        )
        for row in rows
    )
    title = f"Guarantees of guarded tasks on {broker}"
    print_table(console, f"{title}, by the settings alone" if unseen else title, columns, cells)
