"""What reaches the driver does not grow with letters, values or causes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from celery_dlq.spark.triage.rows import MAX_GROUPS, findings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CUSTOMERS = 100_000
"""Each of ten causes has five times as many as letters of a cause are looked at."""

# Each letter has a customer of its own; the bad ones have a currency of their own.
LETTERS = """
    SELECT CAST(id AS STRING) AS id, concat('cause ', pmod(id, {causes})) AS fingerprint,
           concat('shop.task_', pmod(id, {causes}) % 5) AS task_name,
           'orders' AS source_queue, 'orders-DLQ' AS dead_letter_queue, 'failed' AS reason,
           timestamp_seconds(1767225600 + pmod(id * 7919, 2592000)) AS dead_lettered_at,
           1L AS deliveries, 0L AS retries, 'celery@web-1' AS worker_hostname, 'v1' AS release,
           '[]' AS args_json,
           concat('{{"customer": ', id, ', "currency": "', IF(pmod(id, {causes}) = 1, 'XXX', 'EUR'),
                  '"}}') AS kwargs_json
    FROM range({letters})
"""


def written(spark: SparkSession, folder: Path, letters: int, causes: int) -> Path:
    """Letters with a customer each."""
    query = LETTERS.format(letters=letters, causes=causes)
    spark.sql(query).write.parquet(str(folder))
    return folder


def collected(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Any]:
    """The rows that a report collects, and its findings."""
    from pyspark.sql.classic.dataframe import DataFrame

    rows = [0]
    collect = DataFrame.collect

    def counting(self: DataFrame) -> Any:
        found = collect(self)
        rows[0] += len(found)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(DataFrame, "collect", counting)
        found = findings(folder, spark)
    return rows[0], found


def test_many_customers_bring_no_more_rows_than_few(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any value of theirs reach the driver, and the bad currency is found."""
    few, _ = collected(spark, written(spark, tmp_path / "few", 1_000, 10), monkeypatch)
    folder = written(spark, tmp_path / "many", CUSTOMERS, 10)
    many, found = collected(spark, folder, monkeypatch)
    assert found.triage.letters == CUSTOMERS
    assert many <= 2 * few
    assert "kwargs.currency = XXX" in found.causes["cause 1"].headline


def test_of_many_causes_the_largest_reach_the_driver(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are counted, the largest 500 have rows, and those with more than 20 letters reasons."""
    folder = written(spark, tmp_path / "causes", 6_000, 4_000)
    rows, found = collected(spark, folder, monkeypatch)
    assert (found.triage.causes, len(found.triage.groups)) == (4_000, MAX_GROUPS)
    assert found.causes == {}
    assert rows < 10 * MAX_GROUPS
