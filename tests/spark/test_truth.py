"""What the report says of exports whose truth is known, at 300 letters and at 30,000.

``PLANTED_LETTERS=1000000 python -m pytest tests/spark/test_truth.py`` asks a million as well.
"""

from __future__ import annotations

import html
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import planted
import pytest
from test_charts import a_triage

from celery_dlq.cli.table import Console
from celery_dlq.cli.triage import show_triage
from celery_dlq.spark.page import rendered_page
from celery_dlq.spark.triage import limits, spikes
from celery_dlq.spark.triage.questions import scan
from celery_dlq.spark.triage.rows import MAX_ROWS, Findings, findings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOUND = {
    "canary": ("release", planted.CANARY_RELEASE),
    "bad host": ("host", planted.BAD_HOST),
    "currency": ("kwargs.currency", "XXX"),
}


def sections(found: Findings) -> dict[str, str]:
    """The text of each section of the page, by its heading."""
    text = rendered_page(found, planted.END).partition("<body>")[2]
    parts = re.split(r"<h2>(.*?)</h2>", text)[1:]
    plain = (html.unescape(" ".join(re.sub("<[^>]+>", " ", part).split())) for part in parts)
    return dict(zip(plain, plain, strict=True))


SIZES = [300, 30_000, *map(int, os.environ.get("PLANTED_LETTERS", "").split())]


@pytest.fixture(scope="module", params=SIZES)
def asked(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Findings, DataFrame]:
    """The findings about an export of known truth, and its letters."""
    folder = planted.write(planted.letters(request.param), tmp_path_factory.mktemp("planted"))
    return findings(folder, spark), scan(spark, folder)


def test_what_began_three_days_ago_is_new(asked: tuple[Findings, DataFrame]) -> None:
    """And what came back has returned; nothing else is either."""
    found, _letters = asked
    assert {row.fingerprint: row.kind for row in found.new} == planted.NEW
    assert found.news_from is not None
    assert planted.END - found.news_from <= timedelta(days=7, hours=1)
    said = sections(found)["New and returned"]
    assert f"before {found.news_from:%Y-%m-%d %H:%M:%S} UTC" in said
    assert all(f" {name} 2026-03-2" in said for name in planted.NEW)


def test_a_flood_is_one_row(asked: tuple[Findings, DataFrame]) -> None:
    """Of the causes that were steady, or die every day, none is a flood."""
    found, _letters = asked
    names = [row.fingerprint for row in found.spikes]
    assert len(names) == len(set(names))
    assert set(names) <= {"flood", "sunday", *planted.NEW}
    assert "sunday" in names
    for row in found.spikes:
        if row.fingerprint == "flood":
            day = planted.START + timedelta(days=planted.FLOOD_DAY)
            assert abs(row.bucket_start - day) <= timedelta(days=1)
    assert ("flood" in names) == (found.triage.letters > 1_000)


def test_each_cause_is_explained_by_what_was_planted(asked: tuple[Findings, DataFrame]) -> None:
    """The release is told before its host; time, and what follows from the task, never."""
    found, _letters = asked
    said = {
        name: [(one.feature, one.value) for one in why.findings]
        for name, why in found.causes.items()
    }
    # What is bound to a time has the releases of that time.
    bound = {name: said.pop(name) for name in ("sunday", "flood", *planted.NEW)}
    assert {feature for pairs in bound.values() for feature, _value in pairs} <= {"release"}
    assert {name: pairs[0] for name, pairs in said.items() if pairs} == FOUND


def test_every_cause_has_a_sentence(asked: tuple[Findings, DataFrame]) -> None:
    """And the report says with how many letters it was compared."""
    found, _letters = asked
    assert set(found.causes) == set(planted.CAUSES)
    assert found.unexplained == (0, 0)
    said = sections(found)["What is dying, and why"]
    assert all(html.unescape(why.headline) in said for why in found.causes.values())
    assert "Nothing stands out" in said


def test_a_lonely_cause_has_nothing_to_compare_with(spark: SparkSession, tmp_path: Path) -> None:
    """The report does not say that nothing sets it apart."""
    letters = (row for row in planted.letters(300) if row["fingerprint"] == "steady")
    found = findings(planted.write(letters, tmp_path), spark)
    assert not any(found.causes["steady"].compared.values())
    said = sections(found)
    why = said["What is dying, and why"]
    assert "There is nothing to compare 42 letters with" in why
    assert "Nothing stands out" not in why
    assert "no cause is new" in said["New and returned"]
    assert "The first 6 × 1 day are not compared." in said["Floods"]


def test_letters_of_one_time_are_not_called_new(spark: SparkSession, tmp_path: Path) -> None:
    """Without a before there is neither new nor old."""
    row = next(planted.letters(300))
    found = findings(planted.write(iter([row] * 3), tmp_path), spark)
    assert (found.news_from, found.new) == (None, ())
    assert "nothing is known to be new" in sections(found)["New and returned"]


def of_columns(spark: SparkSession, file: Path, **columns: Any) -> DataFrame:
    """Letters in a file: Spark would draw them again for each part of a question."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), file)
    return spark.read.parquet(str(file))


def test_noise_has_neither_floods_nor_news(spark: SparkSession, tmp_path: Path) -> None:
    """Of ten thousand causes at random times, none is a flood by chance."""
    import numpy as np
    import pyarrow as pa

    dice, count = np.random.default_rng(5), 400_000
    times = 1_700_000_000_000_000 + dice.integers(60 * 3600, size=count) * 1_000_000
    noise = of_columns(
        spark,
        tmp_path / "noise.parquet",
        fingerprint=dice.integers(10_000, size=count).astype(str),
        task_name=["shop.charge"] * count,
        dead_lettered_at=pa.array(times, pa.timestamp("us", "UTC")),
    )
    assert spikes(noise, "1 hour").collect() == []


# Of each delivery this share goes on to the next: 0.04 % need more than five deliveries.
_AGAIN = 0.2
_TASKS = 200


def test_advice_is_right_or_there_is_none(spark: SparkSession, tmp_path: Path) -> None:
    """Of 200 tasks, at most five are told a limit that loses more successes than it says.

    Whether each has 3, 300 or 4,500 samples.
    """
    import numpy as np

    sizes = (3, 300, 4_500)
    samples = np.repeat(sizes, [size * _TASKS for size in sizes])
    tasks = np.concatenate([np.arange(size * _TASKS) % _TASKS for size in sizes])
    good = of_columns(
        spark,
        tmp_path / "good.parquet",
        task_name=np.char.add(np.char.add(samples.astype(str), " "), tasks.astype(str)),
        deliveries=np.random.default_rng(7).geometric(1 - _AGAIN, size=len(tasks)),
    )
    letters = good.limit(0).selectExpr("*", "CAST(NULL AS STRING) AS history")
    found = limits(letters, good).collect()
    for size in sizes:
        rows = [row for row in found if row["task_name"].startswith(f"{size} ")]
        advised = {row["task_name"]: row["advised_max_deliveries"] for row in rows}
        assert len(advised) == _TASKS
        given = [limit for limit in advised.values() if limit is not None]
        assert bool(given) == (size > 3_840)
        assert sum(_AGAIN**limit > 0.001 for limit in given) <= 5
        beyond = {(row["task_name"], row["delivery"]): row["lost_at_most"] for row in rows}
        # The upper ends of 95 % intervals: 1 of 40 is too low.
        too_low = sum(_AGAIN**delivery > bound for (_task, delivery), bound in beyond.items())
        assert too_low <= len(beyond) / 20


def nothing_of(whole: Any, name: str) -> Any:
    """The same without the rows of a table."""
    return replace(whole, **{name: type(getattr(whole, name))()})


EMPTY: Findings = Findings(
    triage=a_triage(groups=60, reasons=3, span=timedelta(days=2)),
    news_from=planted.START,
    new=(),
    new_causes=0,
    spikes=(),
    causes={},
)


@pytest.mark.parametrize("table", ["groups", "reasons", "timeline", "deliveries", "queues"])
def test_every_table_may_be_empty(table: str) -> None:
    """The page and the terminal show the rest; the page has no row of the others."""
    triage = nothing_of(EMPTY.triage, table)
    assert len(sections(replace(EMPTY, triage=triage))) == 7
    console = Console(record=True, width=200)
    show_triage(console, replace(EMPTY, triage=triage))
    said = console.export_text()
    assert ("Smaller causes not shown: 40" in said) == (table != "groups")


def test_rows_that_are_left_out_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    """More than twenty rows of a table are not shown, and their number is."""
    rows = [
        {**row, "fingerprint": f"{number:04}", "dead_lettered_at": time}
        for number, row in zip(range(60), planted.letters(300), strict=False)
        for time in (planted.END, planted.END)
    ]
    rows += [{**rows[0], "fingerprint": "old", "dead_lettered_at": planted.START}] * 3
    found = findings(planted.write(iter(rows), tmp_path), spark)
    assert (len(found.new), found.new_causes) == (MAX_ROWS, 60)
    said = sections(found)
    assert f"and {60 - MAX_ROWS} causes more" in said["New and returned"]
    assert found.unexplained == (0, 0)
