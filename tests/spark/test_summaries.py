"""Summaries of days: made once, right after any change of the files, and read in their place."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from celery_dlq.export.partition import partition_folder as folder_of
from celery_dlq.spark.triage.rows import Findings, findings, triage
from celery_dlq.spark.triage.selection import Selection
from celery_dlq.spark.triage.summaries import summarized

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("pyspark")

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
DAYS, OF_A_DAY = 8, 30  # as few days as have summaries
QUEUES = ("orders:ü+x DLQ", "007")
TENANT = "only-the-bad-one"


def letters_of(queue: str, day: int, letters: int = OF_A_DAY) -> list[dict[str, Any]]:
    """Letters of a day: one cause is that of a tenant, and one began in the middle."""
    found = []
    for number in range(letters):
        bad = number % 3 == 0
        late = number % 3 == 1 and day >= DAYS // 2
        died = BEGIN + timedelta(days=day, seconds=86_399 * number / letters, microseconds=number)
        found.append(
            {
                "id": f"{queue} {day} {number}",
                "task_name": "shop.charge",
                "fingerprint": "bad" if bad else "late" if late else "other",
                "dead_letter_queue": queue,
                "source_queue": queue.removesuffix("-DLQ"),
                "reason": ("failed", "rejected")[number % 7 == 0],
                "description": f"order {number}",
                "exception_type": "ValueError",
                "deliveries": 1 + number % 2,
                "worker_hostname": f"celery@web-{number % 5}",
                "release": "v2" if day >= DAYS // 2 else "v1",
                "dead_lettered_at": died,
                "kwargs_json": json.dumps({"tenant": TENANT if bad else f"t{number % 9}"}),
                "args_json": "[]",
            }
        )
    return found


def write(folder: Path, queue: str, day: int, number: int = 0, letters: int = OF_A_DAY) -> Path:
    """A file of a day."""
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    from celery_dlq.export.table import schema

    date = (BEGIN + timedelta(days=day)).date().isoformat()
    file = folder / folder_of(queue, date) / f"letters-0-0-{number + 1}-0.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    found = letters_of(queue, day, letters)
    columns = {name: [one.get(name) for one in found] for name in schema().names}
    pq.write_table(pa.table(columns, schema=schema()), file)
    return file


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give days of two queues."""
    folder = tmp_path_factory.mktemp("summaries") / "letters"
    for queue in QUEUES:
        for day in range(DAYS):
            write(folder, queue, day)
    return folder


@pytest.fixture(scope="module")
def summarized_months(
    spark: SparkSession, months: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Give a copy of it with the summaries of a triage; its name is no pattern."""
    folder = tmp_path_factory.mktemp("summarized") / "let[t]er{s}? *"
    shutil.copytree(months, folder)
    assert triage(folder, spark, summaries=True).letters == len(QUEUES) * DAYS * OF_A_DAY
    assert len(summaries(folder)) == len(QUEUES) * (DAYS - 1)
    return folder


@pytest.fixture
def folder(summarized_months: Path, tmp_path: Path) -> Path:
    """Give a copy of this one, whose files have the same times."""
    return Path(shutil.copytree(summarized_months, tmp_path / summarized_months.name))


def told(found: Findings) -> dict[str, Any]:
    """All that a triage says; the start of what counts as new is to the hour with summaries."""
    return {
        "triage": replace(found.triage, path="").to_json(),
        "causes": {name: one.sentences for name, one in found.causes.items()},
        "over time": found.over_time,
        "spikes": [vars(one) for one in found.spikes],
    }


@pytest.fixture(scope="module")
def expected(spark: SparkSession, months: Path) -> dict[str, Any]:
    """Ask without summaries."""
    return told(findings(months, spark, summaries=False))


def unreadable(folder: Path, *but: Path) -> Iterator[Path]:
    """Make files fail that are opened, with the names, sizes and times that they had."""
    for file in folder.glob("dlq=*/day=*/*.parquet"):
        if file not in but:
            before = file.stat()
            file.write_bytes(b"x" * before.st_size)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            yield file


def summaries(folder: Path) -> dict[str, int]:
    """The files of summaries, and when they were written."""
    found = folder.glob("_celery_dlq/summaries/place=*/*.orc")
    return {file.parent.name: file.stat().st_mtime_ns for file in found}


def kept_summaries(spark: SparkSession, folder: Path) -> DataFrame:
    """Their rows."""
    reader = spark.read.option("__globPaths__", "false")
    return reader.orc(f"file://{folder}/_celery_dlq/summaries")


def test_the_second_triage_opens_summaries_and_the_new_day(
    spark: SparkSession, folder: Path, expected: dict[str, Any]
) -> None:
    """It says what a triage of the files says; all of them but the last day's would fail."""
    assert TENANT in str(expected["causes"])
    kept = summaries(folder)
    last = [write(folder, queue, DAYS - 1, 0) for queue in QUEUES]
    assert len(list(unreadable(folder, *last))) == len(QUEUES) * (DAYS - 1)
    assert told(findings(folder, spark, summaries=True)) == expected
    assert summaries(folder) == kept
    new = triage(folder, spark, selection=Selection(queue="007"), summaries=True)
    assert new.letters == DAYS * OF_A_DAY
    assert new.queues == ("007",)


def test_new_changed_and_removed_files_are_seen(spark: SparkSession, folder: Path) -> None:
    """The summaries of their days are made anew, and those of no others; what is gone is gone."""
    before = summaries(folder)
    # Written later, with the same size and whatever is in it.
    os.utime(folder / folder_of(QUEUES[0], "2026-01-03") / "letters-0-0-1-0.parquet")
    write(folder, QUEUES[0], 3, number=7, letters=5)  # new
    write(folder, QUEUES[0], 4, letters=11)  # changed
    next((folder / folder_of("007", "2026-01-06")).glob("*.parquet")).unlink()  # removed
    shutil.rmtree(folder / folder_of("007", "2026-01-07"))
    write(folder, "007", DAYS)  # a new day: the last one is summarized now
    found, plain = (
        findings(folder, spark, summaries=summaries, brief=True) for summaries in (True, False)
    )
    assert told(found) == told(plain)
    after = summaries(folder)
    changed = [name[-10:] for name in after if after[name] != before.get(name)]
    assert sorted(changed) == [f"2026-01-0{day}" for day in range(3, 9)]
    gone = kept_summaries(spark, folder).where("place LIKE '%007%/day=2026-01-07'").collect()
    assert [(row["stamp"], row["id"], row["kwargs_json"]) for row in gone] == [("gone", None, None)]


def test_a_folder_that_cannot_be_written_is_read_without(
    spark: SparkSession,
    months: Path,
    tmp_path: Path,
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so in one line, and tells the same."""
    folder = Path(shutil.copytree(months, tmp_path / "letters"))
    (folder / "_celery_dlq").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="celery_dlq.spark"):
        assert told(findings(folder, spark, summaries=True)) == expected
    lines = [one.getMessage() for one in caplog.records if "without summaries" in one.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]


def test_a_small_folder_has_none_nor_one_with_files_elsewhere(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A triage of some days reads them; one of files of unknown days, too. A URL is a folder."""
    folder = tmp_path / "letters"
    for day in range(7):
        write(folder, "007", day)
    assert summarized(spark, folder, always=True).count() == 7 * OF_A_DAY
    (folder / "others").mkdir()
    shutil.move(write(folder, "x", 0), folder / "others/a.parquet")
    write(folder, "007", 7)
    for place in (folder, f"file://{folder}", folder / folder_of("007", "")[: -len("/day=")]):
        assert summarized(spark, place, always=True).count() in {9 * OF_A_DAY, 8 * OF_A_DAY}
        assert not (folder / "_celery_dlq").exists()
    shutil.rmtree(folder / "others")
    assert triage(folder, spark).letters == 8 * OF_A_DAY  # files of less than 1 GB
    assert not (folder / "_celery_dlq").exists()
    assert triage(f"file://{folder}", spark, summaries=True).letters == 8 * OF_A_DAY
    assert len(summaries(folder)) == 7
    list(unreadable(folder, *folder.glob("dlq=*/day=2026-01-08/*")))
    assert triage(f"file://{folder}", spark, summaries=True).letters == 8 * OF_A_DAY


def test_what_is_gone_leaves_a_folder_that_has_become_small(
    spark: SparkSession, folder: Path
) -> None:
    """Also what a triage had begun to write when it was killed."""
    killed = folder / "_celery_dlq/summaries/.spark-staging-1/place=x/part.orc"
    killed.parent.mkdir(parents=True)
    killed.touch()
    os.utime(killed.parents[1], (0, 0))
    for queue in QUEUES:
        for day in range(1, 6):
            shutil.rmtree(folder / folder_of(queue, f"2026-01-0{day}"))
    assert triage(folder, spark, summaries=True).letters == 2 * 3 * OF_A_DAY
    kept = kept_summaries(spark, folder).where("kwargs_json IS NOT NULL")
    assert kept.select("place").distinct().count() == 2 * 2
    assert not killed.parents[1].exists()


def test_a_summary_that_another_triage_replaces_is_no_error(
    spark: SparkSession,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The files are read, which the log says in one line."""
    from celery_dlq.spark.triage import rows

    kept, away = folder / "_celery_dlq/summaries", tmp_path / "away"

    def replaced(*args: Any, **options: Any) -> DataFrame:
        found = summarized(*args, **options)
        kept.rename(away)
        return found

    monkeypatch.setattr(rows, "summarized", replaced)
    letters = len(QUEUES) * DAYS * OF_A_DAY
    with caplog.at_level(logging.WARNING, logger="celery_dlq.spark"):
        assert findings(folder, spark, summaries=True, brief=True).triage.letters == letters
        away.rename(kept)
        assert triage(folder, spark, summaries=True).letters == letters
    assert len(caplog.records) == 2
    assert "\n" not in caplog.records[0].getMessage()
