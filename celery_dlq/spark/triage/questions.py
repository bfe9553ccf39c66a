"""Questions about exported letters: causes, reasons, times and deliveries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.dialects import columns_of
from celery_dlq.letters.headers import SAMPLE_HEADER
from celery_dlq.letters.record import field_kinds
from celery_dlq.spark.triage.selection import EVERYTHING, Selection, is_remote
from celery_dlq.spark.triage.trends import bucket_width, run_sql
from celery_dlq.spark.triage.unreadable import java_errors, no_letters, readable_errors

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

# Every letter has these two, and hardly another program's files have columns of these names.
_REQUIRED = ("fingerprint", "dead_letter_queue")
_IS_LETTER = "fingerprint IS NOT NULL OR dead_letter_queue IS NOT NULL"
_READ_OPTIONS = {
    # The names of folders repeat columns of the letters.
    "recursiveFileLookup": "true",
    # Ignore other files, such as a README.
    "pathGlobFilter": "*.parquet",
}
_MICROSECOND = timedelta(microseconds=1)

_OVERVIEW = """
    SELECT coalesce(sum(stands_for), 0) AS letters,
           min(first_at) AS first_seen_at,
           max(dead_lettered_at) AS last_seen_at,
           sort_array(collect_set(coalesce(dead_letter_queue, 'unknown'))) AS queues,
           (SELECT count(DISTINCT coalesce(fingerprint, 'unknown')) FROM {letters}) AS causes,
           coalesce(sum(IF(fingerprint IS NULL AND dead_letter_queue IS NULL, stands_for, 0)), 0)
               AS strangers,
           coalesce(sum(IF(reason = 'succeeded', stands_for, 0)), 0) AS successes
    FROM {letters}
"""
# By cause and reason first: Spark 3.5 has no `mode` that decides between equals. For the sets,
# Spark uses its object hash aggregate, which sorts all letters if there are more groups than
# spark.sql.objectHashAggregate.sortBased.fallbackThreshold (128; `local_session` raises it).
_GROUPS = """
    SELECT fingerprint, letters, first_seen_at, last_seen_at, newest.task_name AS task_name,
           reasons, main_reason, newest.exception_type AS exception_type, hosts, releases,
           newest.id AS example_id, newest.description AS example_description
    FROM (SELECT fingerprint,
                 sum(letters) AS letters,
                 min(first_seen_at) AS first_seen_at,
                 max(last_seen_at) AS last_seen_at,
                 sort_array(collect_list(reason)) AS reasons,
                 min_by(reason, struct(-letters, reason)) AS main_reason,
                 size(array_distinct(flatten(collect_list(hosts)))) AS hosts,
                 array_sort(array_distinct(flatten(collect_list(releases)))) AS releases,
                 max_by(newest, struct(newest.at, newest.id)) AS newest
          FROM (SELECT coalesce(fingerprint, 'unknown') AS fingerprint,
                       coalesce(reason, 'unknown') AS reason,
                       sum(stands_for) AS letters,
                       min(first_at) AS first_seen_at,
                       max(dead_lettered_at) AS last_seen_at,
                       collect_set(worker_hostname) AS hosts,
                       collect_set(release) AS releases,
                       max_by(struct(coalesce(task_name, 'unknown') AS task_name,
                                     exception_type,
                                     coalesce(id, '') AS id,
                                     dead_lettered_at AS at,
                                     coalesce(nullif(description, ''), exception_message, '')
                                         AS description),
                              struct(dead_lettered_at, coalesce(id, ''))) AS newest
                FROM {letters}
                GROUP BY coalesce(fingerprint, 'unknown'), coalesce(reason, 'unknown'))
          GROUP BY fingerprint)
    ORDER BY letters DESC, fingerprint
"""
_REASONS = """
    SELECT reason, letters, letters / sum(letters) OVER () AS share
    FROM (SELECT coalesce(reason, 'unknown') AS reason, sum(stands_for) AS letters
          FROM {letters}
          GROUP BY coalesce(reason, 'unknown'))
    ORDER BY letters DESC, reason
"""
_TIMELINE = """
    SELECT timestamp_micros(micros - pmod(micros, {width})) AS bucket_start,
           reason,
           sum(stands_for) AS letters
    FROM (SELECT unix_micros(dead_lettered_at) AS micros, coalesce(reason, 'unknown') AS reason,
                 stands_for
          FROM {letters}
          WHERE dead_lettered_at IS NOT NULL)
    GROUP BY micros - pmod(micros, {width}), reason
    ORDER BY bucket_start, reason
"""
_DELIVERIES = """
    SELECT coalesce(task_name, 'unknown') AS task_name,
           coalesce(deliveries, 0) AS deliveries,
           sum(stands_for) AS letters
    FROM {letters}
    GROUP BY coalesce(task_name, 'unknown'), coalesce(deliveries, 0)
    ORDER BY task_name, deliveries
"""

# A message that died or succeeded with n deliveries has reached 1, 2, …, n.
_LIMITS = """
    WITH ends AS (
        SELECT coalesce(task_name, 'unknown') AS task_name, {deliveries} AS deliveries,
               sum(stands_for) AS died, CAST(0 AS DOUBLE) AS succeeded, 0 AS sampled,
               CAST(0 AS DOUBLE) AS squares
        FROM {letters} GROUP BY 1, 2
        UNION ALL
        SELECT coalesce(task_name, 'unknown'), greatest(1, coalesce(deliveries, 1)),
               0, sum(stands_for), count(*), sum(stands_for * stands_for)
        FROM {successes} GROUP BY 1, 2),
    by_delivery AS (
        SELECT task_name, deliveries AS delivery, sum(died) AS died, sum(succeeded) AS succeeded,
               sum(sampled) AS sampled, sum(squares) AS squares
        FROM ends WHERE deliveries > 0 GROUP BY 1, 2),
    running AS (
        SELECT *,
               sum(died + succeeded)
                   OVER (PARTITION BY task_name ORDER BY delivery DESC) AS reached,
               sum(succeeded) OVER (PARTITION BY task_name ORDER BY delivery) AS so_far,
               sum(succeeded) OVER one_task AS all_succeeded, sum(sampled) OVER one_task AS samples,
               sum(squares) OVER one_task AS all_squares
        FROM by_delivery WINDOW one_task AS (PARTITION BY task_name)),
    -- Samples that stand for different numbers of messages are worth fewer equal ones.
    shares AS (
        SELECT *, try_divide(so_far, all_succeeded) AS cumulative_share,
               greatest(0, 1 - try_divide(so_far, all_succeeded)) AS lost,
               {z2} * try_divide(all_squares, all_succeeded * all_succeeded) AS z2_n
        FROM running),
    bounds AS (
        SELECT *, (lost + z2_n / 2 + sqrt(lost * (1 - lost) * z2_n + z2_n * z2_n / 4)) / (1 + z2_n)
                  AS lost_at_most
        FROM shares)
    SELECT task_name, delivery, reached, succeeded, died,
           try_divide(succeeded, reached) AS share, cumulative_share, samples, lost_at_most,
           min(CASE WHEN lost_at_most <= {lost} THEN delivery END)
               OVER (PARTITION BY task_name) AS advised_max_deliveries
    FROM bounds
    ORDER BY task_name, delivery
"""
_NORMAL_95 = 1.96  # standard deviations
_SHARE = (
    f"coalesce(nullif(try_cast(get_json_object(headers, '$.{SAMPLE_HEADER}') AS DOUBLE), 0), 1)"
)
_FROM_HISTORY = (
    "greatest(coalesce(deliveries, 0), coalesce(array_max(transform("
    "from_json(history, 'array<struct<number:bigint>>'), one -> one.number)), 0))"
)


def letters(
    spark: SparkSession,
    path: Path | str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queue: str | None = None,
    task: str | None = None,
    release: str | None = None,
    fingerprint: str | None = None,
) -> DataFrame:
    """Read the letters that ``dlq export`` wrote to a folder.

    The columns and types are those of the record, whatever the files have: a column that an
    older version did not write is null. Columns that a later version has added follow, as the
    export wrote them down (``_celery_dlq/schema``). The names of queues come from the column
    ``dead_letter_queue``, not from the names of folders, so that ``007`` stays ``007``.

    With ``since``, ``until`` or ``queue`` only the folders of these days and this queue are
    listed, and only their files are read.

    Args:
        spark: The session that reads.
        path: The folder, one of the folders in it, or a URL that Spark reads.
        since: Only letters that died at or after this aware time.
        until: Only letters that died before this aware time.
        queue: Only this dead-letter queue.
        task: Only this task.
        release: Only this version of the code, see ``dlq_release``.
        fingerprint: Only this cause; the first digits are enough.

    Returns:
        One row per letter, columns as in `celery_dlq.letters.record.DeadLetter` without ``extra``:
        text as string, numbers as bigint, times as timestamp, ``body`` as binary, and
        ``headers``, ``properties``, ``history`` and ``native_death`` as JSON strings.

    Raises:
        ExportError: There is no such folder, or it has no such letters or other Parquet files.
        DLQError: ``since`` is after ``until``.
        ValueError: A time is naive.
    """
    selection = Selection(
        since=since, until=until, queue=queue, task=task, release=release, fingerprint=fingerprint
    )
    check_folder(path, selection)
    with readable_errors(path, selected=bool(selection)):
        frame = scan(spark, path, selection, _added_columns(spark, path))
        if frame.where(_IS_LETTER).select("id").isEmpty():
            raise not_letters(spark, path, selection)
    return frame


def successes(spark: SparkSession, path: Path | str) -> DataFrame:
    """Read the sample of successful messages that ``dlq export --successes`` wrote to a folder.

    It has the columns of `letters`: ``dead_lettered_at`` is the time of success, ``deliveries``
    the delivery that succeeded, and ``fingerprint`` is null. For `explain` and `limits`.

    Args:
        spark: The session that reads.
        path: The folder, or a URL that Spark reads.

    Raises:
        ExportError: There is no such folder, or it has other rows.
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


def scan(
    spark: SparkSession,
    path: Path | str,
    selection: Selection = EVERYTHING,
    added: str = "",
) -> DataFrame:
    """`letters` without the checks, for callers that check the rows themselves."""
    reader = spark.read.options(**_READ_OPTIONS).schema(column_ddl(field_kinds()) + added)
    if is_remote(path) and selection.chooses_folders:
        frame = reader.parquet(selection.pattern(str(path)))
    else:
        # A path with [, * or { is not a pattern.
        reader = reader.option("__globPaths__", "false")
        frame = reader.parquet(*_locations(path, selection))
    return selection.select_from(frame)


def files_of(spark: SparkSession, places: Iterable[str]) -> DataFrame:
    """The rows of the files in some folders, each as Spark names it."""
    reader = spark.read.options(**_READ_OPTIONS).schema(column_ddl(field_kinds()))
    return reader.option("__globPaths__", "false").parquet(*places)


def _locations(path: Path | str, selection: Selection) -> list[str]:
    if is_remote(path):
        return [str(path)]
    return [f"file://{place}" for place in selection.places(Path(path).resolve())]


def _added_columns(spark: SparkSession, path: Path | str) -> str:
    """The columns that a later version has added, as Spark SQL; nothing without a schema."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    unread: tuple[type[Exception], ...] = (PySparkException, *java_errors())
    (place,) = _locations(path, EVERYTHING)
    reader = spark.read.option("__globPaths__", "false")
    try:
        schema = reader.parquet(f"{place.rstrip('/')}/_celery_dlq/schema").schema
    except unread:  # files of an older version, a part of the folder, or half a copy
        return ""
    more = [one for one in schema if one.name not in field_kinds()]
    return "".join(f", `{one.name}` {one.dataType.simpleString()}" for one in more)


def not_letters(
    spark: SparkSession, path: Path | str, selection: Selection = EVERYTHING
) -> ExportError:
    """The error for a folder without letters: it is empty, or of another program."""
    if selection:
        return no_letters(path, selected=bool(selection))
    reader = spark.read.options(**_READ_OPTIONS).option("__globPaths__", "false")
    found = reader.parquet(*_locations(path, selection)).columns
    missing = [name for name in _REQUIRED if name not in found]
    if not missing:
        return no_letters(path)
    message = (
        f"expected {path} to hold letters, got Parquet files without the column {missing[0]!r}"
    )
    return ExportError(message)


def check_folder(path: Path | str, selection: Selection = EVERYTHING) -> int:
    """Check that a folder has Parquet files, so that a wrong name fails before Spark starts.

    Returns the size in bytes of those to read; 0 for a URL, which is not checked.
    """
    if is_remote(path):
        return 0
    if not str(path):
        raise ExportError("expected a folder made by dlq export, got an empty name")
    folder = Path(path)
    try:
        if not folder.is_dir():
            got = "a file" if folder.exists() else "no such folder"
            raise ExportError(f"expected {path} to be a folder made by dlq export, got {got}")
        size = sum(file.stat().st_size for file in files_in(folder, selection))
    except OSError as exc:
        raise ExportError(
            f"expected {path} to be a folder that can be read, got: {exc.strerror or exc}"
        ) from exc
    if not size:  # Spark leaves files of no bytes out
        raise no_letters(path, selected=bool(selection))
    return size


def files_in(folder: Path, selection: Selection = EVERYTHING) -> Iterator[Path]:
    """The Parquet files in a folder of this machine, as Spark finds them."""
    for place in selection.places(folder):
        for file in place.rglob("*.parquet") if place.is_dir() else [place]:
            # Spark ignores names that begin with a dot or underscore.
            if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts):
                yield file


def column_ddl(names: Iterable[str]) -> str:
    """The named columns of a letter in Spark SQL, in the order given."""
    kinds = columns_of("spark")
    return ", ".join(f"{name} {kinds[name]}" for name in names)


def overview(df: DataFrame) -> DataFrame:
    """Summarize all letters in one row.

    Args:
        df: Letters, with the columns `COLUMNS` at least.

    Returns:
        ``letters`` bigint, ``first_seen_at`` and ``last_seen_at`` timestamp (null if no
        letter has a time), ``queues`` array of string (dead-letter queues, sorted),
        ``causes`` bigint (different fingerprints),
        ``strangers`` bigint (rows that are not letters: another program's files),
        ``successes`` bigint (rows of ``dlq export --successes``, not letters either).
    """
    return run_sql(_OVERVIEW, df)


def groups(df: DataFrame) -> DataFrame:
    """Group letters by cause: one row per fingerprint, the largest group first.

    Args:
        df: Letters, with the columns `COLUMNS` at least.

    Returns:
        ``fingerprint`` string, ``letters`` bigint, ``first_seen_at`` and ``last_seen_at``
        timestamp (null if no letter has a time), ``task_name`` string, ``reasons``
        array of string (sorted), ``main_reason`` string (the most frequent one),
        ``exception_type`` string (null: no exception), ``hosts`` int (different
        ``worker_hostname``), ``releases`` array of string (sorted), ``example_id`` and
        ``example_description`` string. ``task_name``, ``exception_type`` and the
        example are those of the newest letter. Ordered by ``letters`` descending, then
        ``fingerprint``.
    """
    return run_sql(_GROUPS, df, hosts=True)


def reasons(df: DataFrame) -> DataFrame:
    """Count letters by reason.

    Args:
        df: Letters, with the column ``reason`` at least.

    Returns:
        ``reason`` string, ``letters`` bigint, ``share`` double (of all letters, 0 to 1),
        the most frequent first.
    """
    return run_sql(_REASONS, df)


def timeline(df: DataFrame, bucket: str = "1 hour") -> DataFrame:
    """Count letters by time and reason; a bucket without letters has no row.

    Args:
        df: Letters, with the columns ``dead_lettered_at`` and ``reason`` at least.
        bucket: Width of a bucket, e.g. ``"10 minutes"``: a whole number of seconds,
            minutes, hours or days. See `bucket_for`. Buckets are aligned to 1970 in UTC.

    Returns:
        ``bucket_start`` timestamp, ``reason`` string, ``letters`` bigint, ordered by
        ``bucket_start``, then ``reason``. Letters without a time are left out.

    Raises:
        DLQError: ``bucket`` is not a width.
    """
    return run_sql(_TIMELINE, df, width=bucket_width(bucket) // _MICROSECOND)


def deliveries_before_death(df: DataFrame) -> DataFrame:
    """Count letters by task and number of deliveries.

    Args:
        df: Letters, with the columns ``task_name`` and ``deliveries`` at least.

    Returns:
        ``task_name`` string, ``deliveries`` bigint (0: never started), ``letters``
        bigint, ordered by ``task_name``, then ``deliveries``.
    """
    return run_sql(_DELIVERIES, df, hosts=True)


def limits(
    df: DataFrame,
    successes: DataFrame | None = None,
    *,
    sample: float | None = None,
    lost: float = 0.001,
) -> DataFrame:
    """Count the successes of each delivery of a task, and advise a ``max_deliveries``.

    Letters alone show how often messages were delivered before they died; the advice needs
    messages that succeeded, about 3,840 of a task for the default ``lost``. A limit that is in
    force hides the successes that a higher one would allow.

    Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical
    Inference", J. Amer. Statist. Assoc. 22 (1927).
    """
    if (sample is not None and not 0 < sample <= 1) or not 0 < lost < 1:
        raise DLQError(
            f"expected sample above 0 and at most 1, and lost between 0 and 1, "
            f"got {sample} and {lost}"
        )
    if successes is None:
        successes = df.select("task_name", "deliveries").limit(0)
    share = "1D" if sample is None else f"{float(sample)!r}D"
    if sample is None and "headers" in successes.columns:
        share = _SHARE
    successes = successes.selectExpr("task_name", "deliveries", f"1 / {share} AS stands_for")
    query = _LIMITS.replace("{deliveries}", _FROM_HISTORY)
    values: dict[str, Any] = {"lost": float(lost), "z2": _NORMAL_95**2}
    return run_sql(query, df, hosts=True, successes=successes, **values)
