"""The triage of an exported folder as plain Python values, with a picture if one is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import ExportError
from celery_dlq.record import from_micros, iso
from celery_dlq.spark.picture import EARLIEST, LATEST, draw
from celery_dlq.spark.session import is_running, local_session
from celery_dlq.spark.triage import (
    COLUMNS,
    bucket_for,
    check_folder,
    deliveries_before_death,
    groups,
    not_letters,
    overview,
    readable_errors,
    reasons,
    scan,
    timeline,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_LITTLE = 128 * 1024 * 1024  # bytes of files; a million small letters are half of it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The letters of one fingerprint; see `celery_dlq.spark.triage.groups`."""

    fingerprint: str
    letters: int
    first_seen_at: datetime | None
    last_seen_at: datetime | None
    task_name: str
    reasons: tuple[str, ...]
    main_reason: str
    exception_type: str | None
    hosts: int
    releases: tuple[str, ...]
    example_id: str
    example_description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonRow:
    """The letters of one reason; see `celery_dlq.spark.triage.reasons`."""

    reason: str
    letters: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """The letters of one reason in one time bucket; see `celery_dlq.spark.triage.timeline`."""

    bucket_start: datetime
    reason: str
    letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesRow:
    """Letters of a task by deliveries; see `celery_dlq.spark.triage.deliveries_before_death`."""

    task_name: str
    deliveries: int
    letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What a folder of letters says.

    Attributes:
        path: The folder.
        letters: Letters in it.
        queues: Names of their dead-letter queues, sorted.
        first_seen_at: When the first of them was dead-lettered, aware UTC.
        last_seen_at: When the last one was.
        bucket: Width of the buckets of ``timeline``, e.g. ``"10 minutes"``.
        groups: By cause, the largest first.
        reasons: By reason, the most frequent first.
        timeline: By time and reason, the oldest first.
        deliveries: By task and number of deliveries.
        picture: The PNG that was drawn, if one was asked for.
    """

    path: str
    letters: int
    queues: tuple[str, ...]
    first_seen_at: datetime | None
    last_seen_at: datetime | None
    bucket: str
    groups: tuple[GroupRow, ...]
    reasons: tuple[ReasonRow, ...]
    timeline: tuple[TimelineRow, ...]
    deliveries: tuple[DeliveriesRow, ...]
    picture: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names; times as ISO 8601 in UTC."""
        return {name: _json(value) for name, value in asdict(self).items()}


def triage(
    path: Path | str, picture: Path | str | None = None, spark: SparkSession | None = None
) -> Triage:
    """Read an exported folder with Spark and say what its letters have in common.

    A session that this function made is stopped at the end; one that was given, or
    that ran before, is left as it was.

    Args:
        path: The folder that ``dlq export`` wrote, or a URL that Spark reads.
        picture: Where to draw the dashboard, as PNG; ``None``: nowhere.
        spark: The session to use; ``None``: this process's, or a new one on this machine.

    Returns:
        The rows of all questions.

    Raises:
        ExportError: The folder is missing, holds no letters or cannot be read, or the
            picture cannot be written.
        MissingExtra: PySpark, Java or, for the picture, matplotlib is not installed.
        DLQError: Spark did not start.
    """
    size = check_folder(path)
    with session_for(spark, size) as session, readable_errors(path):
        found = ask(session, path, scan(session, path).select(*COLUMNS))
    if picture is None:
        return found
    # Drawn without Spark: by now its memory is free again.
    return replace(found, picture=draw(found, picture))


@contextmanager
def session_for(given: SparkSession | None, size: int) -> Iterator[SparkSession]:
    """A session for one triage: the given one, this process's, or a new one that is stopped.

    ``size`` is the bytes of the files; see `check_folder`.
    """
    if given is not None:
        yield given
        return
    ran_before = is_running()
    session = local_session(quick=0 < size < _LITTLE)
    try:
        yield session
    finally:
        if not ran_before:
            session.stop()


def ask(spark: SparkSession, path: Path | str, df: DataFrame) -> Triage:
    """Collect the answers to all plain questions.

    Args:
        spark: The session.
        path: The folder, for messages.
        df: Its letters, with the columns `COLUMNS` at least.

    Raises:
        ExportError: There are no letters, or other rows than letters.
    """
    total = next(rows_of(overview(df)))
    strangers = total.pop("strangers")
    if strangers == total["letters"]:
        raise not_letters(spark, path)
    if total.pop("successes"):
        raise ExportError(
            f"expected {path} to hold letters, got messages that succeeded; give this folder "
            f"with --successes, beside one of letters"
        )
    if strangers:
        raise ExportError(f"expected {path} to hold letters only, got other rows beside them")
    bucket = bucket_for(_span_seconds(total["first_seen_at"], total["last_seen_at"]))
    return Triage(
        path=str(path),
        bucket=bucket,
        groups=tuple(GroupRow(**row) for row in rows_of(groups(df))),
        reasons=tuple(ReasonRow(**row) for row in rows_of(reasons(df))),
        timeline=tuple(TimelineRow(**row) for row in rows_of(timeline(df, bucket))),
        deliveries=tuple(DeliveriesRow(**row) for row in rows_of(deliveries_before_death(df))),
        **total,
    )


def rows_of(df: DataFrame) -> Iterator[dict[str, Any]]:
    """Collect rows; times travel as microseconds, for PySpark would make them naive local ones."""
    names = df.columns
    times = {name for name, kind in df.dtypes if kind == "timestamp"}
    columns = [f"unix_micros({name}) AS {name}" if name in times else name for name in names]
    rows = df.selectExpr(*columns).collect()
    rows.reverse()
    while rows:  # there may be a hundred thousand: each goes as soon as it is read
        row = rows.pop()
        yield {name: _plain(row[name], is_time=name in times) for name in names}


def _plain(value: Any, *, is_time: bool) -> Any:
    if is_time:
        return None if value is None else _moment(value)
    return tuple(value) if isinstance(value, list) else value


def _moment(micros: int) -> datetime:
    """A time; the bucket of a letter of the year 1 begins before the calendar does."""
    try:
        return from_micros(micros)
    except OverflowError:
        return EARLIEST if micros < 0 else LATEST


def _span_seconds(first: datetime | None, last: datetime | None) -> float:
    return 0.0 if first is None or last is None else (last - first).total_seconds()


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return value
