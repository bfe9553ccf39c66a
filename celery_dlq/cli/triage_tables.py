"""What PySpark found, on the operator's terminal."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console

from celery_dlq.cli.letter_tables import reason as reason_text
from celery_dlq.cli.terminal import Table, block, letters_text, line, say, table, utc
from celery_dlq.letters.printable import shortened

if TYPE_CHECKING:
    from celery_dlq.spark.triage.rows import Triage


def triage(console: Console, found: Triage) -> None:
    """What is dying, why, when, and after how many deliveries."""
    span = f"{utc(found.first_seen_at)} to {utc(found.last_seen_at)}"
    say(console, f"{letters_text(found.letters)}, {span}", "bold")
    rows = table("Groups: what is dying", ("letters", "right"), "task", "cause", "example")
    for group in found.groups[:20]:
        cause = group.exception_type or ", ".join(group.reasons)
        rows.add_row(
            f"{group.letters:,}",
            line(group.task_name, "bold"),
            line(cause),
            block(shortened(group.example_description or "", 100)),
        )
    console.print(rows)
    rows = table("Reasons", "reason", ("letters", "right"), ("share", "right"))
    for reason in found.reasons:
        rows.add_row(reason_text(reason.reason), f"{reason.letters:,}", f"{reason.share:.0%}")
    console.print(rows)
    console.print(_timeline(found))
    rows = table("Deliveries before death", "task", ("deliveries", "right"), ("letters", "right"))
    for row in found.deliveries[:30]:
        rows.add_row(line(row.task_name), f"{row.deliveries}", f"{row.letters:,}")
    console.print(rows)
    if found.picture:
        say(console, f"Picture: {found.picture}")


def _timeline(found: Triage) -> Table:
    totals: dict[datetime, int] = {}
    for row in found.timeline:
        totals[row.bucket_start] = totals.get(row.bucket_start, 0) + row.letters
    rows = table(f"Over time, by {found.bucket}", "from (UTC)", ("letters", "right"), "")
    most = max(totals.values(), default=1)
    for start, letters in sorted(totals.items())[-30:]:
        bar = "█" * max(1, round(30 * letters / most))
        rows.add_row(f"{start:%Y-%m-%d %H:%M:%S}", f"{letters:,}", block(bar, "yellow"))
    return rows
