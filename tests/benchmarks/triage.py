"""Time and memory of the triage over millions of letters, beside DuckDB on the same files.

Not a test: run it on an otherwise idle machine.

    PYTHONPATH=tests python -m benchmarks.triage --millions 1 3 10

It needs PySpark, DuckDB and about 0.2 GB of disk for each million of letters, and
prints one JSON object a line. The method and the last figures are in
``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.spark.session import local_session
from celery_dlq.spark.triage import (
    groups,
    letters,
    new_since,
    reasons,
    spikes,
    timeline,
    why,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MILLION = 1_000_000
CAUSES = 500

# A power law of causes, 40 hosts, 12 releases, a month; one planted cause of the largest group.
_LETTER = f"""
    SELECT 1::BIGINT AS schema_version, uuid()::VARCHAR AS id, uuid()::VARCHAR AS task_id,
           'shop.task_' || cause % 25 AS task_name,
           'queue-' || cause % 8 AS source_queue,
           'queue-' || cause % 8 || '-DLQ' AS dead_letter_queue,
           ['failed', 'max_deliveries_exceeded', 'rejected', 'worker_lost'][1 + cause % 4]
               AS reason,
           'order ' || id || ' cannot be charged by provider ' || cause AS description,
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
    FROM (SELECT range AS id, floor({CAUSES} * pow(random(), 3))::BIGINT AS cause
          FROM range({{first}}, {{first}} + {MILLION}))
"""  # noqa: S608 - numbers of our own
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


def main(arguments: Sequence[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many counts")
    parser.add_argument("--folder", type=Path, help="keep the letters here, and use them again")
    chosen = parser.parse_args(arguments)
    if chosen.millions == [3]:
        chosen.millions = [3, 10]
        chosen.rounds = 2
    with tempfile.TemporaryDirectory() as temporary:
        run(chosen.folder or Path(temporary), sorted(chosen.millions), chosen.rounds)


def run(folder: Path, millions: Sequence[int], rounds: int) -> None:
    """Write the letters, then ask both engines."""
    spark = local_session("triage benchmark")
    for number in range(max(millions)):
        if not (file := folder / "parts" / f"{number}.parquet").exists():
            write(file, number)
    for count in millions:
        place = linked(folder, count)
        df = letters(spark, place)
        # In turn, so that what else the machine does falls on both.
        times: dict[str, list[float]] = {"spark": [], "duckdb": []}
        for _ in range(rounds):
            seconds, ours = timed(lambda df=df: [tuple(row) for row in groups(df).collect()])
            times["spark"].append(seconds)
            seconds, theirs = timed(lambda place=place: duckdb_groups(place))
            times["duckdb"].append(seconds)
            assert [(row[0], row[1], row[8], row[10]) for row in ours] == [
                (row[0], row[1], row[8], row[10]) for row in theirs
            ]
        medians = {name: statistics.median(values) for name, values in times.items()}
        report(
            question="groups",
            millions=count,
            spark_seconds=medians["spark"],
            duckdb_seconds=medians["duckdb"],
            ratio=medians["spark"] / medians["duckdb"],
            java_peak_mb=java_peak_mb(spark),
            file_mb=sum(file.stat().st_size for file in place.rglob("*.parquet")) / 1e6,
        )
        others(df, count)
        report(question="memory after all", millions=count, java_peak_mb=java_peak_mb(spark))
    spark.stop()


def others(df: DataFrame, count: int) -> None:
    """The other questions, once each."""
    largest = str(groups(df).first()[0])  # type: ignore[index]
    asked: dict[str, Callable[[], DataFrame]] = {
        "reasons": lambda: reasons(df),
        "timeline": lambda: timeline(df, "6 hours"),
        "new_since": lambda: new_since(df, datetime(2026, 1, 25, tzinfo=timezone.utc)),
        "spikes": lambda: spikes(df, "1 hour"),
        "why": lambda: why(df, largest),
    }
    for question, ask in asked.items():
        seconds, rows = timed(lambda ask=ask: ask().collect())
        report(question=question, millions=count, spark_seconds=seconds, rows=len(rows))
        if question == "why":
            found = {(row["feature"], row["value"]) for row in rows}
            assert ("kwargs.currency", "XXX") in found, found


def write(file: Path, number: int) -> None:
    """A million letters; columns that are not written are null, as in files of older versions."""
    import duckdb

    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    with duckdb.connect(config={"threads": 2}) as connection:
        query = _LETTER.format(first=number * MILLION)
        options = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 100000"
        connection.execute(f"COPY ({query}) TO '{temporary}' ({options})")
    temporary.rename(file)


def linked(folder: Path, count: int) -> Path:
    """The first so many millions as one folder."""
    place = folder / f"{count}M"
    place.mkdir(exist_ok=True)
    for number in range(count):
        if not (link := place / f"{number}.parquet").exists():
            link.hardlink_to(folder / "parts" / link.name)
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
    tree = [process, *children(process)]
    return max(peak_mb(pid) for pid in tree)


def children(process: int) -> list[int]:
    """Processes that a process started, and theirs."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def peak_mb(process: int) -> int:
    """The peak of one process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def report(**values: Any) -> None:
    """One line."""
    rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
