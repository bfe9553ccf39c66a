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

_MOST_GROUPS, _MOST_ROWS = 20, 30


def triage(console: Console, found: Triage) -> None:
    """What is dying, why, when, and after how many deliveries."""
    span = f"{utc(found.first_seen_at)} to {utc(found.last_seen_at)}"
    say(console, f"{letters_text(found.letters)}, {span}", "bold")
    rows = table("Groups: what is dying", ("letters", "right"), "task", "cause", "example")
    for group in found.groups[:_MOST_GROUPS]:
        cause = group.exception_type or ", ".join(group.reasons)
        rows.add_row(
            f"{group.letters:,}",
            line(group.task_name, "bold"),
            line(cause),
            block(shortened(group.example_description or "", 100)),
        )
    console.print(rows)
    _more(console, len(found.groups) - _MOST_GROUPS, "Smaller groups")
    rows = table("Reasons", "reason", ("letters", "right"), ("share", "right"))
    for reason in found.reasons:
        rows.add_row(reason_text(reason.reason), f"{reason.letters:,}", f"{reason.share:.0%}")
    console.print(rows)
    totals: dict[datetime, int] = {}
    for bucket in found.timeline:
        totals[bucket.bucket_start] = totals.get(bucket.bucket_start, 0) + bucket.letters
    console.print(_timeline(found.bucket, sorted(totals.items())[-_MOST_ROWS:]))
    _more(console, len(totals) - _MOST_ROWS, "Earlier times")
    rows = table("Deliveries before death", "task", ("deliveries", "right"), ("letters", "right"))
    for row in found.deliveries[:_MOST_ROWS]:
        rows.add_row(line(row.task_name), f"{row.deliveries}", f"{row.letters:,}")
    console.print(rows)
    _more(console, len(found.deliveries) - _MOST_ROWS, "Rows")
    if found.picture:
        say(console, f"Picture: {found.picture}")


def _more(console: Console, number: int, what: str) -> None:
    if number > 0:
        say(console, f"{what} not shown: {number:,}")


def _timeline(bucket: str, totals: list[tuple[datetime, int]]) -> Table:
    rows = table(f"Over time, by {bucket}", "from (UTC)", ("letters", "right"), "")
    most = max((letters for _start, letters in totals), default=1)
    for start, letters in totals:
        bar = "█" * max(1, round(30 * letters / most))
        rows.add_row(f"{start:%Y-%m-%d %H:%M:%S}", f"{letters:,}", block(bar, "yellow"))
    return rows
