"""Time and memory of the triage over millions of letters, beside DuckDB on the same files.

``python -m benchmarks triage``. It needs Java, PySpark, DuckDB and about 1 GB of
disk. First the HTML report, each in a process of its own, as ``dlq triage --html`` is: how it grows
with letters, with causes, and with causes that all say something else. Then single questions.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import Tree, peak_mib

from celery_dlq.spark.page import write_page
from celery_dlq.spark.session import local_session
from celery_dlq.spark.triage import (
    explain,
    groups,
    letters,
    new_since,
    reasons,
    spikes,
    timeline,
)
from celery_dlq.spark.triage.questions import check_folder
from celery_dlq.spark.triage.rows import findings, session_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MILLION = 1_000_000
CAUSES = 500
PLANTED = r"kwargs\.currency\W+(value=)?\W*XXX"
"""The largest cause has it, or another property of all of its letters that comes with it."""

_ONE_TEXT = "'order ' || id || ' cannot be charged by provider ' || cause"
# Five words of a cause's own behind the six that all share.
_OWN_TEXTS = f"{_ONE_TEXT} || ': ' || " + " || ' ' || ".join(
    f"translate(left(md5((hash(cause, {place}) % 5000)::VARCHAR), 7), '0123456789', 'ghijklmnop')"
    for place in range(5)
)
# A power law of causes, 40 hosts, 12 releases, a month; one planted cause of the largest group.
_LETTER = """
    SELECT 1::BIGINT AS schema_version, uuid()::VARCHAR AS id, uuid()::VARCHAR AS task_id,
           'shop.task_' || cause % 25 AS task_name,
           'queue-' || cause % 8 AS source_queue,
           'queue-' || cause % 8 || '-DLQ' AS dead_letter_queue,
           ['failed', 'max_deliveries_exceeded', 'rejected', 'worker_lost'][1 + cause % 4]
               AS reason,
           {text} AS description,
           TIMESTAMPTZ '2026-01-01 00:00:00+00' + to_seconds(floor(random() * 2592000)::BIGINT)
               AS dead_lettered_at,
           1 + floor(random() * 5)::BIGINT AS deliveries, 0::BIGINT AS retries,
           'shop.errors.Error' || cause AS exception_type,
           md5(cause::VARCHAR)[:16] AS fingerprint,
           'celery@web-' || floor(random() * 40)::INT AS worker_hostname,
           'v' || floor(random() * 12)::INT AS release,
           '[]' AS args_json,
           json_object('order_id', id, 'currency',
               CASE WHEN cause = 0 AND random() < 0.9 THEN 'XXX'
                    ELSE ['EUR', 'USD', 'GBP'][1 + floor(random() * 3)::INT] END,
               'parts', floor(random() * 9)::INT)::VARCHAR AS kwargs_json
    FROM (SELECT range AS id, floor({causes} * pow(random(), 3))::BIGINT AS cause
          FROM range({first}, {last}))
"""
_DUCKDB_GROUPS = """
    SELECT coalesce(fingerprint, 'unknown') AS fingerprint, count(*) AS letters,
           epoch_us(min(dead_lettered_at)), epoch_us(max(dead_lettered_at)),
           arg_max(coalesce(task_name, 'unknown'), (dead_lettered_at, id)),
           list_sort(list_distinct(list(coalesce(reason, 'unknown')))),
           mode(coalesce(reason, 'unknown')),
           arg_max(exception_type, (dead_lettered_at, id)),
           count(DISTINCT worker_hostname),
           list_sort(list(DISTINCT release)),
           arg_max(coalesce(id, ''), (dead_lettered_at, id)) AS example_id,
           arg_max(coalesce(nullif(description, ''), ''),
                   (dead_lettered_at, id))
    FROM read_parquet('{files}') GROUP BY 1 ORDER BY letters DESC, fingerprint
"""


@dataclass(frozen=True)
class Report:
    """A folder of which the report is made."""

    letters: int
    causes: int
    own_texts: bool = False


@dataclass(frozen=True)
class Size:
    """Folders to report on, sizes for ``groups``, and repetitions."""

    reports: tuple[Report, ...]
    letters: tuple[int, ...]
    rounds: int


FULL = Size(
    reports=(
        *(Report(letters, 200) for letters in (100_000, MILLION, 3 * MILLION)),
        *(Report(MILLION, causes) for causes in (10_000, 100_000)),
        Report(MILLION, 100_000, own_texts=True),
    ),
    letters=(MILLION, 3 * MILLION, 10 * MILLION),
    rounds=3,
)
QUICK = Size(reports=(Report(2000, 20, own_texts=True),), letters=(2000,), rounds=1)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Two results: reports, and single questions to both engines."""
    rows = []
    for report in size.reports:
        rows.append(_report_row(report, size.rounds))
        tell(f"triage: {rows[-1]['name']}: {rows[-1]['seconds']:.1f} s")
    yield {"cell": f"the HTML report, medians of {size.rounds}", "table": "report", "rows": rows}
    spark = local_session("triage benchmark")
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for count in size.letters:
                place = written(Path(folder), count)
                rows.append(_row(spark, place, count, size.rounds))
                tell(f"triage: {count:,} letters")
    finally:
        spark.stop()
    yield {"cell": f"seconds, medians of {size.rounds} for `groups` and DuckDB", "rows": rows}


def _report_row(report: Report, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        text = _OWN_TEXTS if report.own_texts else _ONE_TEXT
        place = written(Path(folder), report.letters, report.causes, text)
        command = [sys.executable, "-m", "benchmarks.triage", str(place), f"{folder}/report.html"]
        done = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(rounds)
        ]
    texts = "a text each" if report.own_texts else "one text"
    return {
        "name": f"{report.letters:,} letters, {report.causes:,} causes, {texts}",
        **{name: statistics.median(turn[name] for turn in done) for name in done[0]},
    }


def make_report(place: str, page: str) -> dict[str, float]:
    """Make the report in this process; what it took, from the start of Java on."""
    begun = time.perf_counter()
    with session_for(None, check_folder(place)) as spark:
        found = findings(place, spark)
        write_page(found, page, datetime.now(timezone.utc))
        largest = next(iter(found.causes.values()))
        assert re.search(PLANTED, str(largest)), largest
        return {
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": Tree(os.getpid()).cpu_seconds(),
            "java_peak_mb": java_peak_mb(spark),
            "python_peak_mb": round(peak_mib()),
            "load": os.getloadavg()[0],
        }


def _row(spark: SparkSession, place: Path, count: int, rounds: int) -> dict[str, Any]:
    df = letters(spark, place)
    # In turn, so that what else the machine does falls on both.
    times: dict[str, list[float]] = {"groups": [], "duckdb": []}
    for _ in range(rounds):
        seconds, ours = timed(lambda: [tuple(row) for row in groups(df).collect()])
        times["groups"].append(seconds)
        seconds, theirs = timed(lambda: duckdb_groups(place))
        times["duckdb"].append(seconds)
        assert [(row[0], row[1], row[8], row[10]) for row in ours] == [
            (row[0], row[1], row[8], row[10]) for row in theirs
        ]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "name": f"{count:,}",
        **medians,
        "ratio": medians["groups"] / medians["duckdb"],
        "file_mb": sum(file.stat().st_size for file in place.rglob("*.parquet")) / 1e6,
        **others(df),
        "java_peak_mb": java_peak_mb(spark),
    }


def others(df: DataFrame) -> dict[str, float]:
    """Seconds of the other questions, once each."""
    largest = str(groups(df).first()[0])  # type: ignore[index]
    asked: dict[str, Callable[[], DataFrame]] = {
        "reasons": lambda: reasons(df),
        "timeline": lambda: timeline(df, "6 hours"),
        "new_since": lambda: new_since(df, datetime(2026, 1, 25, tzinfo=timezone.utc)),
        "spikes": lambda: spikes(df, "1 hour"),
        "explain": lambda: explain(df, fingerprints=[largest]),
    }
    found_seconds = {}
    for question, ask in asked.items():
        found_seconds[question], rows = timed(lambda ask=ask: ask().collect())
        if question == "explain":
            assert re.search(PLANTED, str(rows)), rows
    return found_seconds


def written(folder: Path, count: int, causes: int = CAUSES, text: str = _ONE_TEXT) -> Path:
    """A folder of this number of letters, in files of a million at most."""
    import duckdb

    place = folder / str(count)
    place.mkdir()
    options = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 100000"
    with duckdb.connect(config={"threads": 2}) as connection:
        for first in range(0, count, MILLION):
            last = min(first + MILLION, count)
            query = _LETTER.format(first=first, last=last, causes=causes, text=text)
            file = place / f"{first}.parquet"
            connection.execute(f"COPY ({query}) TO '{file}' ({options})")
    return place


def duckdb_groups(place: Path) -> list[tuple[Any, ...]]:
    """The same question, on as many threads and in as much memory."""
    import duckdb

    with duckdb.connect(config={"threads": 2, "memory_limit": "1GB"}) as connection:
        query = _DUCKDB_GROUPS.format(files=f"{place}/**/*.parquet")
        return list(connection.execute(query).fetchall())


def java_peak_mb(spark: SparkSession) -> int:
    """The most memory that Spark's Java has taken so far."""
    process = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    tree = Tree(process).pids()
    return round(max(peak_mib(pid) for pid in tree))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


if __name__ == "__main__":
    print(json.dumps(make_report(sys.argv[1], sys.argv[2])))
