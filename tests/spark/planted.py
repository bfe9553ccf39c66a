"""Exports with known truth: what began when, on what it depends, and what it does not depend on.

Thirty days of letters of an app with four tasks, ten hosts and a release every three days. One
host, the canary, runs a release of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

END = datetime(2026, 3, 29, 12, tzinfo=timezone.utc)
DAYS = 30
START = END - timedelta(days=DAYS)
CANARY, CANARY_RELEASE = "celery@canary", "v5-rc"
BAD_HOST = "celery@web-7"
FLOOD_DAY = 22.0

Days = Callable[[Random], float]
"""Draws the time of a letter, in days from `START`."""


def whole(dice: Random) -> float:
    """Any time."""
    return dice.random() * DAYS


def workdays(dice: Random) -> float:
    """From 8 to 16 o'clock of any day."""
    return dice.randrange(1, DAYS) - 0.5 + (8 + 8 * dice.random()) / 24


def between(*spans: tuple[float, float]) -> Days:
    """Draws from the spans alike."""

    def draw(dice: Random) -> float:
        first, last = dice.choice(spans)
        return first + (last - first) * dice.random()

    return draw


def flooded(dice: Random) -> float:
    """Half of the letters within two hours, the others at any time."""
    return FLOOD_DAY + dice.random() / 12 if dice.random() < 0.5 else whole(dice)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause: its share of all letters, and what its letters have in common."""

    share: int
    task: str = "shop.charge"
    queue: str = "orders"
    days: Days = whole
    host: str | None = None
    kwargs: tuple[tuple[str, Any], ...] = ()


CAUSES = {
    # What `why` has to say.
    "canary": Cause(share=90, host=CANARY),
    "bad host": Cause(share=80, host=BAD_HOST),
    "currency": Cause(share=85, kwargs=(("currency", "XXX"),)),
    # What it must not say: these follow from the task, or from the time alone.
    "only cause of its queue": Cause(share=75, task="shop.pay", queue="payments"),
    "invoices": Cause(share=70, task="mail.a", queue="mails", kwargs=(("kind", "invoice"),)),
    "reminders": Cause(share=65, task="mail.b", queue="mails", kwargs=(("kind", "reminder"),)),
    "sunday": Cause(share=60, days=between((15.9, 16.0))),
    # What changes over time.
    "daily": Cause(share=60, days=workdays),
    "flood": Cause(share=60, days=flooded),
    "recent": Cause(share=30, days=between((27.0, 30.0))),
    "recent too": Cause(share=25, days=between((27.2, 30.0))),
    "returned": Cause(share=25, days=between((0.0, 8.0), (29.0, 30.0))),
    "steady": Cause(share=140),
    "steady too": Cause(share=135),
}
NEW = {"recent": "new", "recent too": "new", "returned": "returned"}


def columns(cause: Cause, number: int, dice: Random) -> dict[str, Any]:
    """A letter of a cause."""
    day = cause.days(dice)
    host = cause.host
    if host is None:
        host = CANARY if dice.random() < 0.02 else f"celery@web-{dice.randrange(10)}"
    kwargs = {
        "currency": dice.choice(["EUR", "USD", "GBP"]),
        "order": dice.randrange(10**6),
        "parts": dice.randrange(9),
    }
    return {
        "id": f"{number:012}",
        "task_id": f"{number:012}",
        "task_name": cause.task,
        "source_queue": cause.queue,
        "dead_letter_queue": f"{cause.queue}-DLQ",
        "reason": "failed",
        "dead_lettered_at": START + timedelta(days=day),
        "deliveries": 1 + dice.randrange(3),
        "retries": dice.randrange(3),
        "origin": f"gen{dice.randrange(4)}@web",
        "worker_hostname": host,
        "release": CANARY_RELEASE if host == CANARY else f"v{int(day // 3)}",
        "args_json": "[]",
        "kwargs_json": json.dumps(kwargs | dict(cause.kwargs)),
    }


def letters(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Letters of all causes, in their shares; the fingerprint is the cause's name."""
    dice = Random(seed)  # noqa: S311 - the same every time
    total = sum(cause.share for cause in CAUSES.values())
    number = 0
    for name, cause in CAUSES.items():
        for _ in range(round(count * cause.share / total)):
            number += 1
            yield {
                "fingerprint": name,
                "exception_type": f"shop.{name.title().replace(' ', '')}",
                "description": f"{name} of something else entirely, {name}",
                **columns(cause, number, dice),
            }


def write(rows: Iterator[dict[str, Any]], folder: Path, per_file: int = 250_000) -> Path:
    """Write rows as an export's Parquet files; columns that they lack are null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    block: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        block.append(row)
        if number % per_file == 0:
            pq.write_table(pa.Table.from_pylist(block), folder / f"{number}.parquet")
            block.clear()
    if block:
        pq.write_table(pa.Table.from_pylist(block), folder / "last.parquet")
    return folder
