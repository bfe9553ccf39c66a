"""Two periods of known truth: what changed is said with its uncertainty, chance is not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from celery_dlq.errors import DLQError
from celery_dlq.spark.triage import changes
from celery_dlq.spark.triage.changes import Period, period_before

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MONDAY = datetime(2026, 3, 9, tzinfo=timezone.utc)
WEEK = timedelta(days=7)
THIS = Period(MONDAY, MONDAY + WEEK)
LAST = period_before(THIS)
# Letters this week and last week: the rates are known, what is drawn is not.
TRUTH = {
    "new": (40, 0),
    "gone": (0, 60),
    "grown": (400, 100),
    "shrunk": (100, 300),
}


_START = int(LAST.since.timestamp() * 1000)
_BURSTS = """
    SELECT concat('bursts ', cause) AS fingerprint, 'shop.charge' AS task_name,
           'shop.Boom' AS exception_type, concat(cause, burst, number) AS id,
           timestamp_millis({start} + CAST(
               1209600000 * (pmod(xxhash64(cause, burst), 100000) / 100000) AS BIGINT))
               AS dead_lettered_at
    FROM (SELECT id AS cause FROM range(100))
    LATERAL VIEW explode(sequence(1, 30)) AS burst
    LATERAL VIEW explode(sequence(1, 1 + CAST(pmod(xxhash64(burst, cause), 40) AS INT))) AS number
"""


@dataclass(frozen=True)
class Drawn:
    """Letters that come independently at known rates, this week and last week."""

    spark: SparkSession
    folder: Path

    def __call__(self, rates: dict[str, tuple[float, float]], seed: int = 1) -> DataFrame:
        """Draw them into a file: Spark is slower at drawing, and draws again for each question."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        dice = np.random.default_rng(seed)
        counts = dice.poisson([*chain.from_iterable(rates.values())])  # now, then, now, then ...
        weeks = np.repeat(np.arange(len(counts)), counts)
        moments = _START + (1 - weeks % 2 + dice.random(len(weeks))) * WEEK.total_seconds() * 1000
        names = pa.array([*rates]).take(pa.array(weeks // 2))
        columns = {
            "fingerprint": names,
            "task_name": pa.repeat("shop.charge", len(weeks)),
            "exception_type": pa.repeat("shop.Boom", len(weeks)),
            "id": [f"{name}{number}" for number, name in enumerate(names.to_pylist())],
            "dead_lettered_at": pa.array(moments.astype("int64"), pa.timestamp("ms", "UTC")),
        }
        file = self.folder / f"{uuid4()}.parquet"
        pq.write_table(pa.table(columns), file)
        return self.spark.read.parquet(str(file))


@pytest.fixture
def drawn(spark: SparkSession, tmp_path: Path) -> Drawn:
    """Give a function that draws letters."""
    return Drawn(spark, tmp_path)


def rows_of(found: DataFrame) -> dict[str, dict[str, Any]]:
    return {row["fingerprint"]: row.asDict() for row in found.collect()}


def test_what_changed_is_said_with_its_uncertainty(drawn: Drawn) -> None:
    """Beside thirty causes at a steady rate, of which nothing is said."""
    steady = {f"steady {number}": (100, 100) for number in range(30)}
    df = drawn(TRUTH | steady).cache()
    found = rows_of(changes(df, df, THIS, LAST))
    assert {name: row["kind"] for name, row in found.items()} == {name: name for name in TRUTH}
    assert found["grown"]["ratio_low"] < 4 < found["grown"]["ratio_high"]
    assert found["shrunk"]["ratio_low"] < 1 / 3 < found["shrunk"]["ratio_high"]
    assert found["new"]["ratio"] is None
    assert found["new"]["ratio_high"] is None
    assert found["new"]["ratio_low"] > 1
    assert (found["gone"]["ratio"], found["gone"]["ratio_low"]) == (0, 0)
    assert 0 < found["gone"]["ratio_high"] < 1
    for name, row in found.items():
        mine = df.where(df.fingerprint == name)
        assert row["letters"] + row["letters_against"] == mine.count()
        assert row["example_id"].startswith(name)
        assert row["task_name"] == "shop.charge"
    assert next(iter(found)) == "grown"  # the largest change comes first
    df.unpersist()


@pytest.mark.parametrize("seed", [1, 11])
def test_chance_makes_no_row(drawn: Drawn, seed: int) -> None:
    """Of a thousand causes at steady rates, from a letter to thousands a week."""
    # Most have few letters, as in a shop.
    rates = {str(n): (2.0 ** (n % (12 if n < 240 else 7)),) * 2 for n in range(1000)}
    df = drawn(rates, seed)
    assert rows_of(changes(df, df, THIS, LAST)) == {}


def test_bursts_are_chance_as_well(spark: SparkSession) -> None:
    """A cause that comes in bursts has twice as many letters one week, and that says nothing."""
    df = spark.sql(_BURSTS, start=_START)
    assert rows_of(changes(df, df, THIS, LAST)) == {}


def test_rates_are_compared(drawn: Drawn) -> None:
    """A day has a seventh of a week's letters, and that is no change."""
    df = drawn({"steady": (700, 700), "grown": (2100, 700)}).cache()
    day = Period(THIS.since, THIS.since + timedelta(days=1))
    found = rows_of(changes(df, df, day, LAST))
    assert found.keys() == {"grown"}
    assert found["grown"]["letters"] < found["grown"]["letters_against"]
    assert found["grown"]["ratio_low"] < 3 < found["grown"]["ratio_high"]
    df.unpersist()


def test_a_folder_is_compared_from_its_first_letter_to_its_last(drawn: Drawn) -> None:
    """Two exports need no periods."""
    df = drawn({"steady": (500, 500), "new": (100, 0)})
    now = df.where(f"unix_micros(dead_lettered_at) >= {THIS.since.timestamp() * 1e6:.0f}")
    then = df.where(f"unix_micros(dead_lettered_at) < {THIS.since.timestamp() * 1e6:.0f}")
    assert rows_of(changes(now, then)).keys() == {"new"}


def test_what_cannot_be_compared_is_one_line(drawn: Drawn) -> None:
    """A period that ends before it begins, and letters without a time."""
    df = drawn({"steady": (5, 5)})
    with pytest.raises(DLQError, match="expected period to end after it begins"):
        changes(df, df, (THIS.until, THIS.since), LAST)
    with pytest.raises(DLQError, match="expected letters with a time to compare, got none"):
        changes(df.limit(0), df)
    with pytest.raises(DLQError, match="expected alpha between 0 and 1, got 5"):
        changes(df, df, THIS, LAST, alpha=5)


def test_the_same_hours_are_compared() -> None:
    """Of the days before; an hour with the hour before."""
    assert period_before(THIS) == (MONDAY - WEEK, MONDAY)
    night = Period(MONDAY, MONDAY + timedelta(hours=8))
    assert period_before(night) == (MONDAY - timedelta(days=1), MONDAY - timedelta(hours=16))
    hour = Period(MONDAY, MONDAY + timedelta(hours=1))
    assert period_before(hour) == (MONDAY - timedelta(hours=1), MONDAY)
    some = Period(MONDAY, MONDAY + timedelta(days=2, hours=5))
    assert period_before(some).until == some.until - timedelta(days=3)
