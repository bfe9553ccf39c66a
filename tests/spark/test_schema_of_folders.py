"""The columns that a folder's schema has, in Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from builders import NOW, a_letter

from celery_dlq import DeadLetter
from celery_dlq.letters.dialects import statement
from celery_dlq.letters.record import field_kinds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("pyspark")

Export = Callable[[Iterable[DeadLetter]], Path]


def test_letters_have_the_columns_of_a_later_version(spark: SparkSession, export: Export) -> None:
    """An older reader of a folder to which a newer release exports shows what is there."""
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    from celery_dlq.spark.triage import letters

    folder = export([a_letter(release="v6")])
    place = folder / "_celery_dlq/schema"
    later = pq.read_schema(place).append(pa.field("verdict", pa.string()))
    pq.write_table(later.empty_table(), place)
    (file,) = folder.glob("dlq=*/day=*/*.parquet")
    rows = pq.ParquetFile(file).read().append_column("verdict", pa.array(["guilty"]))
    pq.write_table(rows, file.with_name("letters-9-9-10-10.parquet"))

    found = letters(spark, folder)
    assert found.columns == [*field_kinds(), "verdict"]
    rows = found.select("release", "verdict").collect()
    assert sorted(map(tuple, rows), key=str) == [("v6", "guilty"), ("v6", None)]
    half = place.read_bytes()[:100]
    place.unlink()
    assert letters(spark, folder).columns == [*field_kinds()]
    place.write_bytes(half)  # of a copy that broke off
    assert letters(spark, folder).count() == 2


def test_spark_runs_the_statement_that_is_printed_for_it(
    spark: SparkSession, export: Export
) -> None:
    """The table has all columns and days, and the names of queues as they are."""
    folder = export([a_letter(dead_letter_queue=name, release="v7") for name in ("a:b", "007")])
    for one in statement("spark", f"file://{folder}", "dead_letters_w").split(";\n"):
        if one.strip():
            spark.sql(one)
    try:
        table = spark.table("dead_letters_w")
        assert table.columns == [*field_kinds(), "dlq", "day"]
        found = table.selectExpr("dead_letter_queue", "dlq", "CAST(day AS STRING)", "release")
        assert sorted(map(tuple, found.collect())) == [
            ("007", "007~", f"{NOW:%Y-%m-%d}", "v7"),
            ("a:b", "a:b", f"{NOW:%Y-%m-%d}", "v7"),
        ]
    finally:
        spark.sql("DROP TABLE dead_letters_w")
