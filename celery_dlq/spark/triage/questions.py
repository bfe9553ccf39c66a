"""Letters in exported folders: how many there are, of what they died, when, how often tried."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.record import Kind, field_kinds
from celery_dlq.spark.triage.lookalikes import COMPARED, DDL, MOST_COMPARED, alike
from celery_dlq.spark.triage.trends import bucket_width

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = (
    "id",
    "task_name",
    "dead_letter_queue",
    "reason",
    "description",
    "dead_lettered_at",
    "deliveries",
    "exception_type",
    "exception_message",
    "fingerprint",
    "worker_hostname",
    "release",
)
"""The columns that the functions of this module read: select them before caching letters."""

_TYPES = {
    Kind.TEXT: "STRING",
    Kind.INTEGER: "BIGINT",
    Kind.TIME: "TIMESTAMP",
    Kind.BYTES: "BINARY",
    Kind.JSON: "STRING",
    Kind.HISTORY: "STRING",
}
# Every writer of letters sets these two, and hardly a stranger has columns of these names.
_REQUIRED = ("fingerprint", "dead_letter_queue")
_IS_LETTER = "fingerprint IS NOT NULL OR dead_letter_queue IS NOT NULL"
_READ_OPTIONS = {
    # The columns of a letter say all that the names of its folders say.
    "recursiveFileLookup": "true",
    # A stray README in the folder is no letter.
    "pathGlobFilter": "*.parquet",
    # A folder named with [, * or { is meant literally, not as a pattern.
    "__globPaths__": "false",
}
_MICROSECOND = timedelta(microseconds=1)
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_OVERVIEW = """
    SELECT count(*) AS letters,
           min(dead_lettered_at) AS first_seen_at,
           max(dead_lettered_at) AS last_seen_at,
           sort_array(collect_set(coalesce(dead_letter_queue, 'unknown'))) AS queues,
           count_if(fingerprint IS NULL AND dead_letter_queue IS NULL) AS strangers,
           count_if(reason = 'succeeded') AS successes
    FROM {letters}
"""
# One pass. With sets among them, Spark aggregates any value in hash tables, but sorts all
# letters as soon as there are more groups than
# spark.sql.objectHashAggregate.sortBased.fallbackThreshold (128; `local_session` raises it).
_GROUPS = """
    SELECT fingerprint, letters, first_seen_at, last_seen_at, newest.task_name AS task_name,
           reasons, main_reason, newest.exception_type AS exception_type, hosts, releases,
           newest.id AS example_id, newest.description AS example_description
    FROM (SELECT coalesce(fingerprint, 'unknown') AS fingerprint,
                 count(*) AS letters,
                 min(dead_lettered_at) AS first_seen_at,
                 max(dead_lettered_at) AS last_seen_at,
                 sort_array(collect_set(coalesce(reason, 'unknown'))) AS reasons,
                 mode(coalesce(reason, 'unknown'), true) AS main_reason,
                 size(collect_set(worker_hostname)) AS hosts,
                 sort_array(collect_set(release)) AS releases,
                 max_by(struct(coalesce(task_name, 'unknown') AS task_name,
                               exception_type,
                               coalesce(id, '') AS id,
                               coalesce(nullif(description, ''), exception_message, '')
                                   AS description),
                        struct(dead_lettered_at, coalesce(id, ''))) AS newest
          FROM {letters}
          GROUP BY coalesce(fingerprint, 'unknown'))
    ORDER BY letters DESC, fingerprint
"""
_REASONS = """
    SELECT reason, letters, letters / sum(letters) OVER () AS share
    FROM (SELECT coalesce(reason, 'unknown') AS reason, count(*) AS letters
          FROM {letters}
          GROUP BY coalesce(reason, 'unknown'))
    ORDER BY letters DESC, reason
"""
_TIMELINE = """
    SELECT timestamp_micros(micros - pmod(micros, {width})) AS bucket_start,
           reason,
           count(*) AS letters
    FROM (SELECT unix_micros(dead_lettered_at) AS micros, coalesce(reason, 'unknown') AS reason
          FROM {letters}
          WHERE dead_lettered_at IS NOT NULL)
    GROUP BY micros - pmod(micros, {width}), reason
    ORDER BY bucket_start, reason
"""
_DELIVERIES = """
    SELECT coalesce(task_name, 'unknown') AS task_name,
           coalesce(deliveries, 0) AS deliveries,
           count(*) AS letters
    FROM {letters}
    GROUP BY coalesce(task_name, 'unknown'), coalesce(deliveries, 0)
    ORDER BY task_name, deliveries
"""


def letters(spark: SparkSession, path: Path | str) -> DataFrame:
    """The letters that ``dlq export`` wrote to a folder.

    The columns are those of the record, with fixed types, whatever the files at hand
    hold: a column that an older version did not write is null. The names of queues
    come from the column ``dead_letter_queue``, not from the names of folders, so that
    ``007`` stays ``007``.

    Args:
        spark: The session that reads.
        path: The folder, or one of the folders in it; also a URL that Spark reads.

    Returns:
        One row a letter, columns as in `celery_dlq.record.DeadLetter` without ``extra``:
        text as string, numbers as bigint, times as timestamp, ``body`` as binary, and
        ``headers``, ``properties``, ``history`` and ``native_death`` as JSON strings.

    Raises:
        ExportError: There is no such folder, it holds no letters, or other Parquet files.
    """
    check_folder(path)
    with readable_errors(path):
        frame = scan(spark, path)
        if frame.where(_IS_LETTER).select("id").isEmpty():
            raise not_letters(spark, path)
    return frame


def successes(spark: SparkSession, path: Path | str) -> DataFrame:
    """The sample of successful messages that ``dlq export --successes`` wrote to a folder.

    It has the columns of `letters`; ``dead_lettered_at`` is when a message succeeded,
    ``deliveries`` with which delivery, and there is no fingerprint. For `why` and `limits`.

    Args:
        spark: The session that reads.
        path: The folder; also a URL that Spark reads.

    Raises:
        ExportError: There is no such folder, or it holds something else.
    """
    check_folder(path)
    with readable_errors(path):
        frame = scan(spark, path)
        if not frame.where("reason IS DISTINCT FROM 'succeeded'").select("id").isEmpty():
            raise ExportError(
                f"expected {path} to hold messages that succeeded, got other rows; "
                f"write some to a new folder with: dlq export --successes"
            )
    return frame


def scan(spark: SparkSession, path: Path | str) -> DataFrame:
    """`letters` without a look at them: for callers that see for themselves what is there."""
    reader = spark.read.options(**_READ_OPTIONS).schema(schema_ddl())
    return reader.parquet(_location(path))


def not_letters(spark: SparkSession, path: Path | str) -> ExportError:
    """The error of a folder in which no letter was found: it is empty, or another program's."""
    found = spark.read.options(**_READ_OPTIONS).parquet(_location(path)).columns
    missing = [name for name in _REQUIRED if name not in found]
    if not missing:
        return _no_letters(path)
    message = (
        f"expected {path} to hold letters, got Parquet files without the column {missing[0]!r}"
    )
    return ExportError(message)


def check_folder(path: Path | str) -> int:
    """Look for letters without Spark, so that a wrong name is told at once, not in seconds.

    Args:
        path: The folder; of a URL nothing is checked.

    Returns:
        The bytes of its files; 0 for a URL.

    Raises:
        ExportError: There is no such folder, or no Parquet file in it.
    """
    if _REMOTE.match(str(path)):
        return 0
    if not str(path):
        raise ExportError("expected a folder made by dlq export, got an empty name")
    folder = Path(path)
    try:
        if not folder.is_dir():
            got = "a file" if folder.exists() else "no such folder"
            raise ExportError(f"expected {path} to be a folder made by dlq export, got {got}")
        files = [f for f in folder.rglob("*.parquet") if _visible(f.relative_to(folder))]
        if not files:
            raise _no_letters(path)
        return sum(file.stat().st_size for file in files)
    except OSError as exc:
        raise ExportError(
            f"expected {path} to be a folder that can be read, got: {exc.strerror or exc}"
        ) from exc


def schema_ddl() -> str:
    """The columns of a letter as Spark SQL writes them: ``id STRING, deliveries BIGINT, …``."""
    return column_ddl(field_kinds())


def column_ddl(names: Iterable[str]) -> str:
    """Some columns of a letter as Spark SQL writes them, in the order given."""
    kinds = field_kinds()
    return ", ".join(f"{name} {_TYPES[kinds[name]]}" for name in names)


def overview(df: DataFrame) -> DataFrame:
    """All letters in one row.

    Args:
        df: Letters, with the columns `COLUMNS` at least.

    Returns:
        ``letters`` bigint, ``first_seen_at`` and ``last_seen_at`` timestamp (null if no
        letter has a time), ``queues`` array of string (dead-letter queues, sorted),
        ``strangers`` bigint (rows that are no letters at all: another program's files),
        ``successes`` bigint (rows of ``dlq export --successes``, which are no letters either).
    """
    return _sql(_OVERVIEW, df)


def groups(df: DataFrame) -> DataFrame:
    """The letters by cause: one row a fingerprint, the largest group first.

    Args:
        df: Letters, with the columns `COLUMNS` at least.

    Returns:
        ``fingerprint`` string, ``letters`` bigint, ``first_seen_at`` and ``last_seen_at``
        timestamp (null if no letter has a time), ``task_name`` string, ``reasons``
        array of string (sorted), ``main_reason`` string (the most frequent one),
        ``exception_type`` string (null: no exception), ``hosts`` int (different
        ``worker_hostname``), ``releases`` array of string (sorted), ``example_id`` and
        ``example_description`` string. ``task_name``, ``exception_type`` and the
        example are those of the newest letter. Ordered by ``letters`` from the top,
        then ``fingerprint``.
    """
    return _sql(_GROUPS, df)


def similar(df: DataFrame, threshold: float = 0.6, *, most: int = MOST_COMPARED) -> DataFrame:
    """Pairs of causes whose messages are nearly the same: perhaps one bug in two places.

    Of every fingerprint one message is looked at, its newest; letters are never compared
    with each other. Numbers, ids and addresses in messages count as equal. Of many causes with
    the same words, each is paired with the largest of them. The letters are grouped at once,
    and the messages compared on the driver.

    Args:
        df: Letters, with the columns `COLUMNS` at least.
        threshold: Least similarity, 0 to 1: words in common among all words of both.
        most: Only so many fingerprints are compared, those with the most letters.

    Returns:
        ``fingerprint``, ``other_fingerprint`` string (the smaller one first), ``similarity``
        double, ``letters``, ``other_letters`` bigint, ``task_name``, ``other_task_name``,
        ``message``, ``other_message`` string; the most similar first.

    Raises:
        DLQError: ``threshold`` or ``most`` is out of range.
    """
    if not 0 < threshold <= 1 or most < 1:
        raise DLQError(
            f"expected threshold between 0 and 1 and most of 1 or more, got {threshold} and {most}"
        )
    rows = groups(df).select(*COMPARED).limit(most).collect()
    found = [tuple(pair.values()) for pair in alike([row.asDict() for row in rows], threshold)]
    return df.sparkSession.createDataFrame(found, DDL).coalesce(1)


def reasons(df: DataFrame) -> DataFrame:
    """How many letters died of what.

    Args:
        df: Letters, with the column ``reason`` at least.

    Returns:
        ``reason`` string, ``letters`` bigint, ``share`` double (of all letters, 0 to 1),
        the most frequent first.
    """
    return _sql(_REASONS, df)


def timeline(df: DataFrame, bucket: str = "1 hour") -> DataFrame:
    """Letters over time and reason; a bucket without letters has no row.

    Args:
        df: Letters, with the columns ``dead_lettered_at`` and ``reason`` at least.
        bucket: Width of a bucket, e.g. ``"10 minutes"``: a whole number of seconds,
            minutes, hours or days. See `bucket_for`. Buckets are aligned to 1970 in UTC.

    Returns:
        ``bucket_start`` timestamp, ``reason`` string, ``letters`` bigint, ordered by
        ``bucket_start``, then ``reason``. Letters without a time are left out.

    Raises:
        DLQError: ``bucket`` is not such a width.
    """
    return _sql(_TIMELINE, df, width=bucket_width(bucket) // _MICROSECOND)


def deliveries_before_death(df: DataFrame) -> DataFrame:
    """How often the messages of each task were delivered before they died.

    Args:
        df: Letters, with the columns ``task_name`` and ``deliveries`` at least.

    Returns:
        ``task_name`` string, ``deliveries`` bigint (0: it was never started), ``letters``
        bigint, ordered by ``task_name``, then ``deliveries``.
    """
    return _sql(_DELIVERIES, df)


@contextmanager
def readable_errors(path: Path | str) -> Iterator[None]:
    """ExportLease what Spark says of files it cannot read into one line.

    Raises:
        ExportError: Spark failed inside of the block.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    java_errors: type[Exception] = import_module("py4j.protocol").Py4JError
    try:
        yield
    except (PySparkException, java_errors) as exc:
        raise ExportError(
            f"expected {path} to hold letters that Spark can read, got: {_one_line(exc)}"
        ) from exc


def _sql(query: str, df: DataFrame, **values: Any) -> DataFrame:
    return df.sparkSession.sql(query, letters=df, **values)


def _location(path: Path | str) -> str:
    return str(path) if _REMOTE.match(str(path)) else f"file://{Path(path).resolve()}"


def _visible(file: Path) -> bool:
    """Whether Spark reads it: not what is hidden, nor the exporter's own notes."""
    return not any(part.startswith((".", "_")) for part in file.parts)


def _no_letters(path: Path | str) -> ExportError:
    message = f"expected {path} to hold letters, got none; write some with: dlq export"
    return ExportError(message)


def _one_line(exc: Exception) -> str:
    lines = [line.strip(" :\t") for line in str(exc).splitlines()]
    told = [line for line in lines if line and not line.startswith("An error occurred while")]
    return told[0] if told else type(exc).__name__
