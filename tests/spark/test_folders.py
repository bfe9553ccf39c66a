"""Exported folders as everybody's readers see them, without help of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from builders import a_letter

from celery_dlq.spark import triage as questions

if TYPE_CHECKING:
    from conftest import Export
    from pyspark.sql import SparkSession

NULL = "__HIVE_DEFAULT_PARTITION__"
# Name of the queue, and the value of the partition that a plain reader finds.
NAMES = {
    "007": "007~",
    "100": "100~",
    "1e5": "1e5~",
    "2026-01-31": "2026-01-31~",
    "true": "true~",
    "epoch": "epoch~",
    NULL: f"{NULL}~",
    "": None,
    "a b": "a b",
    "ü/ö": "ü/ö",
    "50%=x:y": "50%=x:y",
    "_hidden": "_hidden",
    ".dotted": ".dotted",
    "a~": "a~",
}


@pytest.fixture
def plain(spark: SparkSession) -> Iterator[SparkSession]:
    """Give the session with Spark's own guesses at the types of partitions."""
    guesses = "spark.sql.sources.partitionColumnTypeInference.enabled"
    before = spark.conf.get(guesses)
    spark.conf.set(guesses, "true")
    yield spark
    spark.conf.set(guesses, str(before))


def test_plain_spark_finds_queues_by_their_names(plain: SparkSession, export: Export) -> None:
    """Numbers, dates, spaces, slashes, Hive's own word and no name at all come back as they were.

    The partition is text whatever the queues are called, the day is a date, and a condition on
    the partition finds its letters.
    """
    folder = export([a_letter(dead_letter_queue=name) for name in NAMES])
    df = plain.read.parquet(str(folder))
    assert dict(df.dtypes)["dlq"] == "string"
    assert dict(df.dtypes)["day"] == "date"
    found = {row[0]: row[1] for row in df.select("dead_letter_queue", "dlq").collect()}
    assert found == NAMES
    for value in ("007~", "ü/ö", "50%=x:y"):
        rows = df.where(df["dlq"] == value).select("dead_letter_queue").collect()
        assert [NAMES[row[0]] for row in rows] == [value]
    ours = questions.letters(plain, folder).select("dead_letter_queue").collect()
    assert sorted(row[0] for row in ours) == sorted(NAMES)


@pytest.mark.parametrize("first", ["older", "later"])
def test_versions_of_the_schema_are_read_together(
    plain: SparkSession, export: Export, first: str
) -> None:
    """A later version adds a nullable column: Spark gets all letters of both, with our
    reader and without; for DuckDB, pandas and polars see the tests of the export.
    """
    folder = export([a_letter(task_id=f"v1-{number}") for number in range(3)])
    add_later_version(folder, before=first == "later")
    ids = {f"v1-{n}" for n in range(3)} | {f"v2-{n}" for n in range(3)}

    ours = questions.letters(plain, folder)
    assert {row[0] for row in ours.select("task_id").collect()} == ids
    assert "severity" not in ours.columns
    assert {r[0] for r in plain.read.parquet(str(folder)).select("task_id").collect()} == ids
    merged = plain.read.option("mergeSchema", "true").parquet(str(folder))
    found = {
        (row[0], row[1], row[2])
        for row in merged.select("task_id", "schema_version", "severity").collect()
    }
    expected = {(i, 2, "high") if i.startswith("v2") else (i, 1, None) for i in ids}
    assert found == expected


def add_later_version(folder: Path, *, before: bool) -> None:
    """A file as a later version would write it, among those of this one."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    (file,) = folder.glob("dlq=*/day=*/*.parquet")
    table = pq.ParquetFile(file).read()
    changes = {
        "schema_version": pa.array([2] * len(table), pa.int64()),
        "task_id": pc.replace_substring(table["task_id"], "v1-", "v2-"),
    }
    for name, values in changes.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    table = table.append_column("severity", pa.array(["high"] * len(table)))
    pq.write_table(table, file.with_name(f"letters-{'0-0' if before else '9-0'}-9-9.parquet"))
