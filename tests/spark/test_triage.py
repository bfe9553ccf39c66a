"""Questions of Spark to exported letters."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import a_letter

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.record import DeadLetter, Reason, field_kinds, from_micros
from celery_dlq.spark import triage as questions
from celery_dlq.spark.triage.rows import (
    Row,
    Triage,
    triage,
)

if TYPE_CHECKING:
    from conftest import Export
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)
CHARGE, MAIL = "c" * 16, "m" * 16


def some_letters() -> list[DeadLetter]:
    """Three charges that fail alike on two hosts, and one mail that killed its workers."""
    charges = [
        a_letter(
            fingerprint=CHARGE,
            dead_lettered_at=NOON + timedelta(minutes=number),
            deliveries=number,
            description=f"no order {number}",
            worker_hostname=f"celery@web-{number % 2}",
            release=f"v{number}",
            reason=Reason.MAX_RETRIES_EXCEEDED if number == 1 else Reason.FAILED,
        )
        for number in (1, 2, 3)
    ]
    mail = a_letter(
        fingerprint=MAIL,
        task_name="mail.send",
        dead_letter_queue="mail-DLQ",
        reason=Reason.MAX_DELIVERIES_EXCEEDED,
        dead_lettered_at=NOON + timedelta(minutes=2),
        deliveries=5,
        exception_type=None,
        exception_message=None,
        description="",
    )
    return [*charges, mail]


def rows(df: DataFrame) -> list[dict[str, Any]]:
    """Rows as mappings."""
    return [row.asDict() for row in df.collect()]


def micros(df: DataFrame, column: str) -> list[datetime]:
    """A time column without PySpark's conversion to local time."""
    return [from_micros(row[0]) for row in df.selectExpr(f"unix_micros({column})").collect()]


def test_letters_have_the_columns_of_the_record(spark: SparkSession, export: Export) -> None:
    """A reader finds every field of a letter under its name."""
    letter = a_letter(eta=NOON, body=b"\x80\xff")
    df = questions.letters(spark, export([letter]))
    assert df.columns == list(field_kinds())
    (found,) = rows(df)
    assert (found["id"], found["body"], found["retries"]) == (letter.id, b"\x80\xff", 0)
    assert micros(df, "eta") == [NOON]


@pytest.mark.parametrize("name", ["007", "100", "Ünïcode queue", "a/b c", "_hidden", "50%=x:y"])
def test_queue_keeps_its_name(spark: SparkSession, export: Export, name: str) -> None:
    """Names that look like numbers, paths or escapes come back as they were."""
    folder = export([a_letter(dead_letter_queue=name)])
    found = questions.letters(spark, folder).select("dead_letter_queue").collect()
    assert [row[0] for row in found] == [name]


def test_folder_name_is_taken_literally(spark: SparkSession, export: Export) -> None:
    """A folder whose name reads like a pattern is still that folder."""
    folder = export([a_letter()])
    odd = folder.rename(folder.with_name("odd [1] {x} a:b ü*?"))
    assert questions.letters(spark, odd).count() == 1


def test_part_of_a_folder_can_be_read(spark: SparkSession, export: Export) -> None:
    """One queue's folder holds that queue's letters."""
    folder = export(some_letters())
    assert questions.letters(spark, folder / "dlq=mail-DLQ").count() == 1


def test_stray_file_is_passed_over(spark: SparkSession, export: Export) -> None:
    """A README and a half-written file in the folder do not stop the triage."""
    folder = export([a_letter()])
    (folder / "README.md").write_text("letters of the shop", "utf-8")
    (folder / ".letters-1-2.parquet.abc.tmp").write_bytes(b"PAR1")
    assert questions.letters(spark, folder).count() == 1


def test_groups_describe_each_cause(spark: SparkSession, export: Export) -> None:
    """A group has the number of its letters, since when, where, and shows its newest letter."""
    letters = some_letters()
    df = questions.groups(questions.letters(spark, export(letters)))
    charge, mail = rows(df)
    assert micros(df, "first_seen_at")[0] == NOON + timedelta(minutes=1)
    assert micros(df, "last_seen_at")[0] == NOON + timedelta(minutes=3)
    assert charge["fingerprint"] == CHARGE
    assert charge["letters"] == 3
    assert charge["task_name"] == "shop.charge"
    assert charge["reasons"] == ["failed", "max_retries_exceeded"]
    assert charge["main_reason"] == "failed"
    assert charge["exception_type"] == "ValueError"
    assert charge["hosts"] == 2
    assert charge["releases"] == ["v1", "v2", "v3"]
    assert charge["example_id"] == letters[2].id
    assert charge["example_description"] == "no order 3"
    assert mail["exception_type"] is None
    assert (mail["hosts"], mail["releases"], mail["example_description"]) == (0, [], "")


def test_groups_of_one_size_are_ordered_by_fingerprint(spark: SparkSession, export: Export) -> None:
    """The order of groups does not change from run to run."""
    letters = [a_letter(fingerprint=f"{number:016x}") for number in (3, 1, 2)]
    found = rows(questions.groups(questions.letters(spark, export(letters))))
    assert [row["fingerprint"] for row in found] == [f"{n:016x}" for n in (1, 2, 3)]


def test_shares_of_reasons_sum_to_one(spark: SparkSession, export: Export) -> None:
    """Every letter has one reason, so the shares make a whole."""
    letters = [a_letter(reason=reason) for reason in Reason for _ in range(reason.value.count("e"))]
    found = rows(questions.reasons(questions.letters(spark, export(letters))))
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert sum(row["letters"] for row in found) == len(letters)
    assert [row["letters"] for row in found] == sorted(
        (row["letters"] for row in found), reverse=True
    )


def test_timeline_buckets_are_in_utc(spark: SparkSession, export: Export) -> None:
    """A session in another time zone gets the same buckets, also over a change of clocks."""
    times = [NOON - timedelta(hours=12, seconds=1), NOON - timedelta(hours=12), NOON]
    df = questions.letters(spark, export([a_letter(dead_lettered_at=time) for time in times]))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        found = questions.timeline(df, "1 day")
        midnight = NOON.replace(hour=0)
        assert micros(found, "bucket_start") == [midnight - timedelta(days=1), midnight]
        assert [row["letters"] for row in rows(found)] == [1, 2]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_timeline_refuses_an_unknown_width(spark: SparkSession, export: Export) -> None:
    """The error names a width that is not valid, not in a parser's traceback."""
    df = questions.letters(spark, export([a_letter()]))
    for width in ("0 seconds", "1 fortnight", "hour", "1 hour; DROP TABLE letters"):
        with pytest.raises(DLQError, match="expected bucket to be a width such as"):
            questions.timeline(df, width)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0, "1 second"),
        (60, "1 second"),
        (61, "10 seconds"),
        (3_600, "1 minute"),
        (86_400, "1 hour"),
        (30 * 86_400, "1 day"),
        (100 * 365 * 86_400, "30 days"),
    ],
)
def test_bucket_suits_the_span(seconds: float, bucket: str) -> None:
    """A span is shown in as many steps as the eye can take."""
    assert questions.bucket_for(seconds) == bucket


def test_deliveries_are_counted_by_task(spark: SparkSession, export: Export) -> None:
    """Each task shows how often its messages were delivered before they died."""
    letters = [a_letter(deliveries=count) for count in (3, 3, 1)]
    letters.append(a_letter(task_name="mail.send", deliveries=0))
    found = rows(questions.deliveries_before_death(questions.letters(spark, export(letters))))
    assert [tuple(row.values()) for row in found] == [
        ("mail.send", 0, 1),
        ("shop.charge", 1, 1),
        ("shop.charge", 3, 2),
    ]


def test_triage_holds_all_answers(spark: SparkSession, export: Export) -> None:
    """The report has every question's rows as plain values, and times in UTC."""
    letters = some_letters()
    folder = export(letters)
    found = triage(folder, spark=spark)
    assert found == Triage(
        path=str(folder),
        letters=4,
        queues=("mail-DLQ", "orders-DLQ"),
        first_seen_at=NOON + timedelta(minutes=1),
        last_seen_at=NOON + timedelta(minutes=3),
        bucket="10 seconds",
        causes=2,
        groups=found.groups,
        reasons=(
            Row(reason="failed", letters=2, share=0.5),
            Row(reason="max_deliveries_exceeded", letters=1, share=0.25),
            Row(reason="max_retries_exceeded", letters=1, share=0.25),
        ),
        timeline=tuple(
            Row(bucket_start=NOON + timedelta(minutes=minute), reason=reason, letters=1)
            for minute, reason in [
                (1, "max_retries_exceeded"),
                (2, "failed"),
                (2, "max_deliveries_exceeded"),
                (3, "failed"),
            ]
        ),
        deliveries=(
            Row(task_name="mail.send", deliveries=5, letters=1),
            *(Row(task_name="shop.charge", deliveries=n, letters=1) for n in (1, 2, 3)),
        ),
    )
    assert found.groups[1] == Row(
        fingerprint=MAIL,
        letters=1,
        first_seen_at=NOON + timedelta(minutes=2),
        last_seen_at=NOON + timedelta(minutes=2),
        task_name="mail.send",
        reasons=("max_deliveries_exceeded",),
        main_reason="max_deliveries_exceeded",
        exception_type=None,
        hosts=0,
        releases=(),
        example_id=letters[3].id,
        example_description="",
    )


def test_triage_is_ready_for_json(spark: SparkSession, export: Export) -> None:
    """It can be written as JSON."""
    found = json.loads(json.dumps(triage(export(some_letters()), spark).to_json()))
    assert found["first_seen_at"] == "2026-03-29T12:01:00.000000+00:00"
    assert found["groups"][0]["letters"] == 3


def test_triage_leaves_a_running_session_alone(spark: SparkSession, export: Export) -> None:
    """A notebook's Spark goes on running after a triage that was not given a session."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "7")
    try:
        assert triage(export([a_letter()])).letters == 1
        assert spark.range(3).count() == 3
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", str(before))


def test_letters_of_an_unreadable_shape_count_as_unknown(
    spark: SparkSession, export: Export
) -> None:
    """An entry of a foreign writer that lacks most fields is shown, not hidden and not fatal."""
    import pyarrow.parquet as pq

    from celery_dlq.export import table

    folder = export([a_letter()])
    pq.write_table(table.table([{b"dead_letter_queue": b"orders-DLQ"}]), folder / "odd.parquet")
    found = triage(folder, spark)
    assert found.letters == 2
    assert {row.reason for row in found.reasons} == {"failed", "unknown"}
    assert {row.task_name for row in found.groups} == {"shop.charge", "unknown"}


def one_line(spark: SparkSession, folder: Path) -> str:
    """The error of a folder, which is the same from `letters` and `triage`."""
    messages = []
    for ask in (lambda: questions.letters(spark, folder), lambda: triage(folder, spark=spark)):
        with pytest.raises(ExportError) as caught:
            ask()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


def test_missing_folder_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """The error names a mistyped folder."""
    assert one_line(spark, tmp_path / "nope").endswith("got no such folder")


def test_file_is_no_folder(spark: SparkSession, tmp_path: Path) -> None:
    """The error names a file in place of the folder."""
    (tmp_path / "file").touch()
    assert one_line(spark, tmp_path / "file").endswith("got a file")


def test_empty_folder_holds_no_letters(spark: SparkSession, tmp_path: Path) -> None:
    """A folder without files says how letters would get there."""
    assert one_line(spark, tmp_path).endswith("got none; write some with: dlq export")


def test_files_without_rows_hold_no_letters(spark: SparkSession, tmp_path: Path) -> None:
    """A file that has our columns and no rows is as good as none."""
    import pyarrow.parquet as pq

    from celery_dlq.export import table

    pq.write_table(table.table([]), tmp_path / "empty.parquet")
    assert one_line(spark, tmp_path).endswith("got none; write some with: dlq export")


def test_foreign_parquet_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Another program's Parquet files are known by the column that they lack."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    assert one_line(spark, tmp_path).endswith("without the column 'fingerprint'")


def test_foreign_parquet_among_letters_is_refused(spark: SparkSession, export: Export) -> None:
    """Rows that are no letters are not counted as if they were."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = export([a_letter()])
    pq.write_table(pa.table({"a": [1]}), folder / "other.parquet")
    with pytest.raises(ExportError, match="hold letters only, got other rows"):
        triage(folder, spark=spark)


def test_broken_file_is_named(spark: SparkSession, export: Export) -> None:
    """A truncated file stops the triage with its name: counting without it would be wrong."""
    folder = export([a_letter()])
    (folder / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ExportError, match=r"broken\.parquet") as caught:
        triage(folder, spark=spark)
    assert "\n" not in str(caught.value)


def test_import_needs_neither_spark_nor_celery() -> None:
    """Importing the triage is quick and works on machines without Celery or Redis."""
    code = (
        "import sys, celery_dlq.spark.session\n"
        "import celery_dlq.spark.triage.rows, celery_dlq.spark.page\n"
        "others = 'pyspark celery kombu redis matplotlib pyarrow scipy numpy jinja2'.split()\n"
        "print([n for n in others if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
