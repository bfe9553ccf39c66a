"""The streaming job of the examples: run as its README says, and again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from builders import a_letter, an_app, key_of
from java import interpreted

from celery_dlq import DeadLetters

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples/spark-streaming"


def test_each_letter_is_in_the_lake_once(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    """The second run adds what died since the first, and nothing twice.

    Also if the first file is of a version without a column, and if the new files have old times.
    """
    spec = importlib.util.spec_from_file_location("stream", EXAMPLE / "stream_letters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dlq = DeadLetters(an_app(broker_url=redis_url, dlq_url=redis_url))

    def export(*task_names: str) -> set[Path]:
        before = set(tmp_path.rglob("letters/**/*.parquet"))
        for name in task_names:
            letter = a_letter(task_name=name, release="v7")
            dlq.store.dead_letter(letter, key_of(letter))
        dlq.export(tmp_path / "letters")
        return set(tmp_path.rglob("letters/**/*.parquet")) - before

    (first,) = export(*["shop.charge"] * 3)
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(parquet.ParquetFile(first).read().drop_columns(["release"]), first)
    module.start(spark, str(tmp_path / "letters"), tmp_path / "lake").awaitTermination()
    assert spark.read.parquet(str(tmp_path / "lake/letters")).count() == 3

    for new in export("shop.charge", "shop.mail"):
        os.utime(new, (time.time() - 30 * 86_400,) * 2)
    shutil.copy(EXAMPLE / "stream_letters.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "stream_letters.py", "letters", "lake"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **interpreted(tmp_path)},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "letters in the lake: 5" in done.stdout
    rows = spark.read.parquet(str(tmp_path / "lake/letters")).groupBy("task_name", "release")
    assert {(row.task_name, row.release): row["count"] for row in rows.count().collect()} == {
        ("shop.charge", None): 3,
        ("shop.charge", "v7"): 1,
        ("shop.mail", "v7"): 1,
    }
    dlq.close()
