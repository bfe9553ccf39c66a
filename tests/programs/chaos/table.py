"""The table of the chaos test: every broker, pool and limit, and plain Celery beside it.

``python -m chaos.table --tasks 2000`` publishes so many messages a broker, a share of them in each
run, and as many to plain Celery with the same seeds and misfortunes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BROKERS = ("redis", "classic", "quorum", "sqs")
POOLS = ("prefork", "threads", "gevent", "solo")
LIMITS = (1, 3)
SAME = ("again: its worker ended", "again: it was published more than once")
MOST_SECONDS = 900.0  # a run takes one or two minutes


@dataclass(frozen=True, slots=True)
class One:
    """One run."""

    broker: str
    pool: str
    limit: int
    plain: bool
    seed: int

    @property
    def name(self) -> str:
        """For files and people."""
        how = "plain" if self.plain else f"limit-{self.limit}"
        return f"{self.broker}-{self.pool}-{how}-seed-{self.seed}"


def run(one: One, tasks: int, folder: Path) -> dict[str, Any]:
    """The report of a run; the little that is known where it made none."""
    report = folder / f"{one.name}.json"
    command = [
        *(sys.executable, "-m", "chaos.run", "--visibility", "5", "--gap", "2"),
        *("--broker", one.broker, "--pool", one.pool, "--limit", str(one.limit)),
        *("--seed", str(one.seed), "--deploys", "10", "--tasks", str(tasks), "--duration", "240"),
        *("--report", str(report), *(["--plain"] if one.plain else [])),
    ]
    with (folder / f"{one.name}.log").open("wb") as log:
        try:
            subprocess.run(command, stdout=log, stderr=log, timeout=MOST_SECONDS, check=False)
            found: dict[str, Any] = json.loads(report.read_text("utf-8"))
        except (subprocess.TimeoutExpired, OSError) as exc:
            found = {"counts": {}, "faults": {"made no report": [repr(exc)]}, "explained": {}}
    return found


def balance(broker: str, reports: dict[One, dict[str, Any]]) -> dict[str, Any]:
    """The line of a broker: sums, and what does not balance."""
    line: dict[str, Any] = {"broker": broker}
    for plain in (False, True):
        mine = [r for one, r in reports.items() if one.broker == broker and one.plain == plain]
        counts, kinds = Counter[str](), {"explained": Counter[str](), "faults": Counter[str]()}
        for report in mine:
            counts.update(report["counts"])
            for kind, found in kinds.items():
                found.update({name: len(lines) for name, lines in report[kind].items() if lines})
        line["plain" if plain else "guarded"] = {"counts": counts, **kinds}
    ours, other = (_again(line[how]) for how in ("guarded", "plain"))
    if line["plain"]["counts"] and ours > other + 2 * math.sqrt(ours + other):
        line["guarded"]["faults"]["more started again than by plain Celery"] = ours - other
    return line


def _again(found: dict[str, Counter[str]]) -> int:
    """Other starts, without those by which plain Celery differs only in how many workers died."""
    return sum(
        count
        for name, count in found["explained"].items()
        if name.startswith("again: ") and name not in SAME
    )


def rows(lines: list[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    """What is shown: counts, then classes, for each broker guarded and plain."""
    columns = [line[how] for line in lines for how in ("guarded", "plain")]
    for kind in ("counts", "explained", "faults"):
        for name in dict.fromkeys(name for column in columns for name in column[kind]):
            prefix = {"counts": "", "explained": "explained: ", "faults": "FAULT: "}[kind]
            yield (prefix + name, *(str(column[kind].get(name, "-")) for column in columns))


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 when all books balance."""
    parser = argparse.ArgumentParser(prog="chaos.table", description=__doc__)
    parser.add_argument("--seed", type=int, default=2500, help="of the first run; others follow")
    parser.add_argument("--tasks", type=int, default=2000, help="messages a broker")
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=BROKERS)
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=POOLS)
    parser.add_argument("--limits", nargs="+", type=int, choices=LIMITS, default=LIMITS)
    parser.add_argument("--without-plain", action="store_true", help="do not run plain Celery")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--report", type=Path, help="write the table to this JSON file")
    parser.add_argument("--folder", type=Path, help="for the report and output of each run")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-table-"))
    folder.mkdir(exist_ok=True)
    ways = [*product(options.brokers, options.pools, options.limits)]
    share = options.tasks // (len(options.pools) * len(options.limits))
    runs = [
        One(*way, plain, options.seed + number)
        for number, way in enumerate(ways)
        for plain in ((False,) if options.without_plain else (False, True))
    ]
    console = Console()
    reports: dict[One, dict[str, Any]] = {}

    def do(one: One) -> None:
        reports[one] = found = run(one, share, folder)
        faults = {name: len(lines) for name, lines in found["faults"].items() if lines}
        console.log(one.name, found.get("seconds"), "s", faults or "balances", highlight=False)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(do, runs))
    lines = [balance(broker, reports) for broker in options.brokers]
    head = ("", *(f"{line['broker']}{how}" for line in lines for how in ("", ", plain")))
    table = Table(*head)
    for row in rows(lines):
        table.add_row(*row)
    console.print(table)
    shown = [head, ("---",) * len(head), *rows(lines)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in shown)
    (folder / "table.md").write_text(f"{text}\n", "utf-8")
    for one, report in reports.items():
        for name, found in report["faults"].items():
            for text in found:
                console.print(f"{one.name}: {name}: {text}", markup=False, soft_wrap=True)
    if options.report:
        options.report.write_text(json.dumps(lines, indent=2), "utf-8")
    console.print(f"Reports and output of each run, and the table for a page: {folder}")
    return int(
        any(any(line[how]["faults"].values()) for line in lines for how in ("guarded", "plain"))
    )


if __name__ == "__main__":
    sys.exit(main())
