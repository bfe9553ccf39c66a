"""A triage of a part of a folder reads this part: files and bytes are counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import a_letter
from click.testing import Result

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.export.destination import Destination
from celery_dlq.export.partition import partition_folder as folder_of
from celery_dlq.spark.triage import letters
from celery_dlq.spark.triage.rows import findings, triage
from celery_dlq.spark.triage.selection import Selection

if TYPE_CHECKING:
    from conftest import Export
    from pyspark.sql import SparkSession

UTC = timezone.utc
DAYS = 90
QUEUES = ("orders-DLQ", "007")
DAY = datetime(2026, 3, 29, tzinfo=UTC)
NEXT = DAY + timedelta(days=1)


def row(queue: str, day: date, number: int) -> dict[str, Any]:
    """A letter of a day."""
    died = datetime(day.year, day.month, day.day, number % 24, tzinfo=UTC)
    return {
        "id": f"{queue} {day} {number}",
        "task_name": ["shop.charge", "shop.ship"][number % 2],
        "fingerprint": ["ab12", "cd34"][number % 2],
        "dead_letter_queue": queue,
        "source_queue": queue,
        "reason": "failed",
        "release": ["v1", "v2"][number % 2],
        "dead_lettered_at": died,
        "kwargs_json": json.dumps({"order": number}),
    }


@pytest.fixture(scope="module")
def quarter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a quarter of two queues; of the files only those of one day can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("quarter")
    for queue in QUEUES:
        for number in range(DAYS):
            day = date(2026, 1, 1) + timedelta(days=number)
            folder = root / folder_of(queue, day.isoformat())
            folder.mkdir(parents=True)
            file = folder / "letters-0-0-1-0.parquet"
            if day == DAY.date():
                pq.write_table(pa.Table.from_pylist([row(queue, day, n) for n in range(48)]), file)
            else:
                file.write_bytes(b"no Parquet")
    return root


def size_of(folder: Path) -> int:
    """Bytes of the files of the day."""
    return sum(file.stat().st_size for file in folder.glob(f"dlq=*/day={DAY.date()}/*.parquet"))


@contextmanager
def bytes_read(spark: SparkSession) -> Iterator[list[int]]:
    """Count what Spark reads of files, by Hadoop's own count."""
    system = spark._jvm.org.apache.hadoop.fs.FileSystem  # type: ignore[union-attr]

    def total() -> int:
        return sum(one.getBytesRead() for one in system.getAllStatistics())

    before, found = total(), [0]
    yield found
    found[0] = total() - before


@pytest.mark.parametrize("kind", ["folder", "URL"])
def test_a_day_of_a_quarter_costs_a_day(spark: SparkSession, quarter: Path, kind: str) -> None:
    """The files of other days, which Spark would fail on, are not opened; nor is another queue."""
    place = quarter if kind == "folder" else f"file://{quarter}"
    with bytes_read(spark) as of_both:
        found = letters(spark, place, since=DAY, until=NEXT)
        assert found.count() == 96
        assert len(found.inputFiles()) == 2
    with bytes_read(spark) as of_one:
        found = letters(spark, place, since=DAY, until=NEXT, queue="007")
        assert found.count() == 48
        assert len(found.inputFiles()) == 1
    # The check for letters reads as well, of one file.
    assert 0 < of_one[0] < of_both[0] < 3 * size_of(quarter)


def test_filters_select_letters(spark: SparkSession, quarter: Path) -> None:
    """By part of a day, task, release and the first digits of the fingerprint."""
    day = {"since": DAY, "until": NEXT}
    for number, (more, count) in enumerate(
        [
            ({"since": DAY + timedelta(hours=12)}, 48),
            ({"until": DAY + timedelta(hours=1)}, 4),
            ({"task": "shop.ship"}, 48),
            ({"release": "v1"}, 48),
            ({"fingerprint": "ab"}, 48),
            ({"fingerprint": "ab12", "queue": "orders-DLQ"}, 24),
        ]
    ):
        place = (quarter, f"file://{quarter}/")[number % 2]  # which chooses folders, not letters
        assert letters(spark, place, **{**day, **more}).count() == count, more


def test_what_has_no_letters_is_one_line(spark: SparkSession, quarter: Path) -> None:
    """No such day, queue or task: the error says that the filters leave nothing."""
    past = datetime(2020, 1, 1, tzinfo=UTC)
    places = (quarter, f"file://{quarter}")
    for number, only in enumerate(
        (
            {"until": past},
            {"queue": "nobody"},
            {"since": DAY, "until": NEXT, "task": "nobody"},
        )
    ):
        # Each way to ask of each kind of place, and each filter as well.
        one, other = places[number % 2], places[1 - number % 2]
        for ask in (
            lambda place=one, only=only: letters(spark, place, **only),
            lambda place=other, only=only: triage(place, spark, selection=Selection(**only)),
        ):
            with pytest.raises(ExportError, match="with these filters, got none") as caught:
                ask()
            assert "\n" not in str(caught.value)
    for place in places:
        with pytest.raises(ValueError, match="expected since to be an aware datetime"):
            letters(spark, place, since=datetime(2026, 1, 1))  # noqa: DTZ001 - it is refused
        with pytest.raises(DLQError, match="expected since to be before until"):
            letters(spark, place, since=NEXT, until=DAY)


NAMES = [
    "007",
    "1e5",
    "a b",
    "ü/ö",
    "50%=x:y",
    "{a,b}",
    "[x]*?",
    "a}b,c",
    "^!$(|)+.",
    "",
    "_x",
    "~",
]


@pytest.mark.parametrize("kind", ["folder", "URL"])
def test_a_queue_of_any_name_is_found(spark: SparkSession, export: Export, kind: str) -> None:
    """Names that look like numbers, patterns or escapes select their letters and no others."""
    folder = export([a_letter(dead_letter_queue=name, dead_lettered_at=DAY) for name in NAMES])
    place = folder if kind == "folder" else f"file://{folder}"
    for number, name in enumerate(NAMES):
        # Each name with a day and without, one of a folder and one of a URL.
        only = {"since": DAY, "until": NEXT} if (number + (kind == "folder")) % 2 else {}
        found = letters(spark, place, queue=name, **only).select("dead_letter_queue").collect()
        assert [one[0] for one in found] == [name]


@pytest.mark.parametrize("part", ["dlq=007~", "dlq=007~/day=2026-03-29"])
@pytest.mark.parametrize("kind", ["folder", "URL"])
def test_a_folder_within_an_export_can_be_asked(
    spark: SparkSession, quarter: Path, kind: str, part: str
) -> None:
    """Its days are chosen as well."""
    place = quarter / part if kind == "folder" else f"file://{quarter}/{part}"
    assert letters(spark, place, since=DAY, until=NEXT).count() == 48


@pytest.mark.parametrize(
    ("since", "until"),
    [
        ("2026-01-31", "2026-03-02"),
        ("1999-12-31", "2000-01-02"),
        ("2024-02-28", None),
        (None, "2026-12-31"),
        ("0001-01-01", "9999-12-31"),
    ],
)
def test_a_pattern_has_the_days_and_no_others(since: str | None, until: str | None) -> None:
    """Whatever the first and the last day are, both or one of them."""
    from fnmatch import fnmatchcase

    def moment(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)

    chosen = Selection(since=moment(since), until=moment(until))
    days = chosen.pattern("s3://x/y").rpartition("day=")[2].strip("{}").split(",")
    assert len(days) < 150
    for number in (*range(0, 3_652_000, 997), *range(729_700, 740_000)):
        day = (date(1, 1, 1) + timedelta(days=number)).isoformat()
        inside = (since or "") <= day < (until or "A")
        assert (
            any(fnmatchcase(day, one) for one in days) == inside == chosen.may_have(f"day={day}")
        ), day


@pytest.mark.parametrize(
    ("since", "until", "days"),
    [
        (None, "0001-01-01T00:00+00:00", "none"),
        ("0001-01-01T00:00+05:00", None, "all"),
        (None, "9999-12-31T23:59-05:00", "all"),
        ("9999-12-31T23:59-05:00", None, "last"),
    ],
)
def test_times_at_the_ends_of_the_calendar_select(
    since: str | None, until: str | None, days: str
) -> None:
    """No time that a filter of letters takes is an error here."""

    def moment(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text)

    chosen = Selection(since=moment(since), until=moment(until))
    assert chosen.may_have("day=2026-03-29") is (days == "all")
    assert chosen.may_have("day=9999-12-31") is (days != "none")
    assert chosen.pattern("s3://x/y")


def test_other_files_and_folders_are_read_as_before(spark: SparkSession, quarter: Path) -> None:
    """Files that lie beside the folders of queues may have letters of any day."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    beside = quarter / "more"
    beside.mkdir()
    pq.write_table(pa.Table.from_pylist([row("007", DAY.date(), 0)]), beside / "some.parquet")
    assert letters(spark, quarter, since=DAY, until=NEXT).count() == 97
    (beside / "some.parquet").unlink()
    beside.rmdir()


def test_only_chosen_folders_of_a_bucket_are_copied(quarter: Path, tmp_path: Path) -> None:
    """What Spark cannot read itself is copied, the days and the queue that are asked for."""
    chosen = Selection(since=DAY, until=NEXT, queue="007")
    assert Destination(quarter).copy_letters(tmp_path, chosen.may_have) == 1
    (copied,) = tmp_path.rglob("*.parquet")
    assert copied.relative_to(tmp_path).parent == Path(folder_of("007", "2026-03-29"))


def test_spark_reads_a_bucket_with_its_own_file_system(spark: SparkSession, quarter: Path) -> None:
    """Where there is one for s3://, nothing is copied, and what is not asked for is not opened."""
    view = "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme"
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
    for name, value in {
        "fs.s3.impl": view,
        "fs.viewfs.overload.scheme.target.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        "fs.viewfs.mounttable.letters-of-the-shop.link./quarter": f"file://{quarter}",
    }.items():
        configuration.set(name, value)
    chosen = Selection(since=DAY, until=NEXT)
    found = triage("s3://letters-of-the-shop/quarter", spark, selection=chosen)
    assert (found.letters, found.path) == (96, "s3://letters-of-the-shop/quarter")


def test_a_cause_is_compared_with_those_that_are_not_selected(
    spark: SparkSession, quarter: Path
) -> None:
    """A fingerprint selects what is shown, not what its letters are compared with."""
    chosen = Selection(since=DAY, until=NEXT, fingerprint="ab")
    found = findings(quarter, spark, selection=chosen, brief=True)
    assert [group.fingerprint for group in found.triage.groups] == ["ab12"]
    assert list(found.causes) == ["ab12"]
    assert sum(found.causes["ab12"].compared.values()) > 0


def test_the_command_has_the_filters(triage_command: Callable[..., Result], quarter: Path) -> None:
    """A person asks about a day, a queue, a task."""
    only = ["--since", "2026-03-29", "--until", "2026-03-30", "--queue", "007"]
    done = triage_command(str(quarter), *only, "--task", "shop.ship", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["letters"], found["queues"], found["causes"]) == (24, ["007"], 1)
    none = triage_command(str(quarter), "--queue", "nobody")
    assert none.exit_code == 1
    assert none.stderr.strip().endswith("to hold letters with these filters, got none")
