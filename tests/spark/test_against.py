"""``dlq triage --against``: what changed since last week, and since a release, of known truth."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.planted.folders import Expected, write
from benchmarks.planted.truths import Began, Ended, Returned
from celery import Celery
from click.testing import CliRunner

from celery_dlq.cli.commands import dlq
from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.record import iso
from celery_dlq.spark.page import rendered_page
from celery_dlq.spark.triage.against import ComparedPeriod, RateChanges
from celery_dlq.spark.triage.changes import Period
from celery_dlq.spark.triage.rows import changes_of, findings, read_letters
from celery_dlq.spark.triage.selection import EVERYTHING, Selection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FLOOD, BACK = "flood of some hours", "came back"
DEPLOY = "a deploy mended one and began another"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Expected]]:
    """A shop with a flood, a cause that came back, and a deploy that mended one."""
    place = tmp_path_factory.mktemp("shop")
    expected = write(place, 6_000, 2)
    return a_file_a_day(place / "letters"), expected


def a_file_a_day(folder: Path) -> Path:
    """Put the letters of all queues together, day by day: a question opens every file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    days: dict[str, list[Path]] = defaultdict(list)
    for file in folder.glob("dlq=*/day=*/*.parquet"):
        days[file.parent.name].append(file)
    for first, *others in days.values():
        tables = [pq.ParquetFile(file).read() for file in (first, *others)]
        pq.write_table(pa.concat_tables(tables), first)
        for file in others:
            file.unlink()
    return folder


def compared(
    spark: SparkSession, folder: Path, against: ComparedPeriod, selection: Selection = EVERYTHING
) -> RateChanges:
    """What changed; without the explanations, which take longer."""
    selected = against.selected(selection, partial(read_letters, spark, folder))
    return changes_of(spark, folder, selected, against)


def kinds(changes: RateChanges) -> dict[str, str]:
    return {row.fingerprint: row.kind for row in changes.rows}


def truth(expected: dict[str, Expected], kind: type[Any]) -> tuple[str, Any]:
    """The fingerprint of which something is true, and what."""
    return next(
        (name, one)
        for name, cause in expected.items()
        for one in cause.truths
        if isinstance(one, kind) and getattr(one, "release", "") is not None
    )


def test_this_week_and_last(spark: SparkSession, shop: tuple[Path, dict[str, Expected]]) -> None:
    """What came back is new this week, the flood of last week is gone; of steady causes nothing."""
    folder, expected = shop
    back, returned = truth(expected, Returned)
    since = datetime.fromtimestamp(returned.at, timezone.utc) - timedelta(hours=1)
    found = compared(spark, folder, ComparedPeriod(), Selection(since=since))
    assert found.here.since == since
    moved = found.here.since - found.there.since
    assert moved == found.here.until - found.there.until
    assert moved % timedelta(days=1) == timedelta()
    said = kinds(found)
    assert said[back] == "new"
    flood = next(name for name, one in expected.items() if one.kind == FLOOD)
    began = expected[flood].truths[0]
    assert isinstance(began, Began)
    if found.there.since.timestamp() <= began.at < found.there.until.timestamp():
        assert said[flood] == "gone"
    steady = {name for name, one in expected.items() if not one.truths}
    assert not steady & said.keys()


def test_before_and_after_a_release(
    spark: SparkSession, shop: tuple[Path, dict[str, Expected]]
) -> None:
    """The deploy began one and mended another; nothing is said of causes that know no release."""
    folder, expected = shop
    mended, ended = truth(expected, Ended)
    begun = next(
        name
        for name, one in expected.items()
        if one.kind == DEPLOY and isinstance(one.truths[0], Began)
    )
    found = compared(spark, folder, ComparedPeriod(release=ended.release))
    said = kinds(found)
    assert said[begun] == "new"
    assert said[mended] in {"gone", "shrunk"}
    steady = {name for name, one in expected.items() if not one.truths}
    assert not steady & said.keys()
    assert abs(found.here.since.timestamp() - ended.at) < 86_400
    # The folder begins less long before the release than it ends after it.
    assert found.there.seconds < found.here.seconds


def test_a_period_that_is_named(
    spark: SparkSession, shop: tuple[Path, dict[str, Expected]]
) -> None:
    """The letters after it are compared with it, as the terminal, the page and JSON say."""
    folder, expected = shop
    begun = next(one for one in expected.values() if one.kind == "release")
    began = begun.truths[0]
    assert isinstance(began, Began)
    until = datetime.fromtimestamp(began.at, timezone.utc)
    named = Period(until - timedelta(days=7), until)
    found = findings(folder, spark, against=ComparedPeriod(period=named), brief=True)
    assert found.changes is not None
    assert (found.changes.there, found.changes.here.since) == (named, until)
    assert found.triage.first_seen_at is not None
    assert found.triage.first_seen_at >= until
    assert kinds(found.changes)[begun.fingerprint] == "new"
    row = next(row for row in found.changes.rows if row.fingerprint == begun.fingerprint)
    assert (row.letters, row.letters_against, row.ratio) == (begun.letters, 0, None)
    assert found.changes.rate_text(row).startswith("at least × ")
    text = rendered_page(found, until)
    assert "What changed" in text
    assert found.changes.heading in text
    assert text.index("What changed") < text.index(found.changes.rate_text(row))
    shown = json.loads(json.dumps(found.to_json()))["changes"]
    assert shown["against"] == [iso(moment) for moment in named]
    assert {row["fingerprint"] for row in shown["rows"]} == kinds(found.changes).keys()


def test_another_folder(
    spark: SparkSession, shop: tuple[Path, dict[str, Expected]], tmp_path: Path
) -> None:
    """Two shops have no cause in common: all are new, and all of the other are gone."""
    folder, expected = shop
    others = write(tmp_path, 500, 3)
    against = ComparedPeriod(folder=str(a_file_a_day(tmp_path / "letters")))
    found = compared(spark, folder, against)
    assert found.changed > len(found.rows) == 20
    assert f"{found.changed - 20:,} more changed. " in found.note_text
    assert str(tmp_path) in found.heading
    assert {*kinds(found).values()} <= {"new", "gone"}
    assert kinds(found).keys() <= expected.keys() | others.keys()


def test_what_cannot_be_compared_is_said(
    spark: SparkSession, shop: tuple[Path, dict[str, Expected]]
) -> None:
    """A release without letters, a time without letters, no time at all."""
    folder, _expected = shop
    with pytest.raises(ExportError, match="expected letters of the release v99, got none"):
        compared(spark, folder, ComparedPeriod(release="v99"))
    long_ago = datetime(2001, 1, 1, tzinfo=timezone.utc)
    period = Period(long_ago, long_ago + timedelta(days=1))
    with pytest.raises(DLQError, match="expected letters of 2001-01-01 00:00 to 2001-01-02 00:00"):
        compared(spark, folder, ComparedPeriod(period=period))
    with pytest.raises(DLQError, match="expected since"):
        compared(spark, folder, ComparedPeriod())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--against", "before"), "--against before needs --since"),
        (("--against", "release=v8", "--since", "7d"), "leave out --since"),
        (("--against", "14d..soon"), "expected a time such as"),
        (("--against", "7d..14d"), "expected the period to end after it begins"),
        (("--against", "no-such-folder"), "no such folder"),
    ],
)
def test_a_wrong_word_is_one_line(
    shop: tuple[Path, dict[str, Expected]], arguments: tuple[str, ...], said: str
) -> None:
    """A usage error before Spark starts, or an error of one line."""
    obj = SimpleNamespace(app=Celery("x"), no_color=True)
    done: Any = CliRunner().invoke(dlq, ["triage", str(shop[0]), *arguments], obj=obj)
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output
