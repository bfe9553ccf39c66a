"""Changes over time: causes that are new or came back, sudden floods; widths of time buckets."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq.errors import DLQError
from celery_dlq.letters.record import to_micros

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BUCKETS = (
    "1 second",
    "10 seconds",
    "1 minute",
    "10 minutes",
    "1 hour",
    "6 hours",
    "1 day",
    "7 days",
    "30 days",
)
_MOST_BUCKETS = 60

_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_WIDTH = re.compile(r"([1-9]\d{0,4}) (second|minute|hour|day)s?")
_MICROSECOND = timedelta(microseconds=1)

# Spark aggregates numbers in hash tables, but sorts all letters if texts are among them. So the
# newest letters of the few remaining causes are looked up by their time afterwards.
_NEW = """
    WITH changed AS (
        SELECT *
        FROM (SELECT coalesce(fingerprint, 'unknown') AS fingerprint,
                     sum(IF(unix_micros(dead_lettered_at) >= {since}, stands_for, 0)) AS letters,
                     min(first_at) FILTER (WHERE unix_micros(dead_lettered_at) >= {since})
                         AS first_seen_at,
                     max(dead_lettered_at) AS last_seen_at,
                     max(dead_lettered_at) FILTER (WHERE unix_micros(dead_lettered_at) < {since})
                         AS gone_since
              FROM {letters}
              WHERE dead_lettered_at IS NOT NULL
              GROUP BY coalesce(fingerprint, 'unknown'))
        WHERE letters > 0
          AND (gone_since IS NULL
               OR unix_micros(first_seen_at) - unix_micros(gone_since) >= {quiet})),
    chosen AS (CHOSEN),
    newest AS (
        SELECT /*+ BROADCAST(chosen) */ chosen.fingerprint,
               max_by(struct(coalesce(task_name, 'unknown') AS task_name, exception_type,
                             coalesce(id, '') AS id), coalesce(id, '')) AS letter
        FROM {letters} AS letters JOIN chosen
          ON coalesce(letters.fingerprint, 'unknown') = chosen.fingerprint
         AND letters.dead_lettered_at = chosen.last_seen_at
        GROUP BY chosen.fingerprint)
    SELECT fingerprint, IF(gone_since IS NULL, 'new', 'returned') AS kind,
           letters, first_seen_at, last_seen_at, gone_since,
           letter.task_name AS task_name, letter.exception_type AS exception_type,
           letter.id AS example_id, among
    FROM chosen JOIN newest USING (fingerprint)
    ORDER BY letters DESC, fingerprint
"""
_ALL = "SELECT *, CAST(NULL AS BIGINT) AS among FROM changed"
# There may be as many new causes as letters.
_LARGEST = """
    SELECT *, count(*) OVER () AS among FROM changed
    ORDER BY letters DESC, fingerprint LIMIT {most}
"""
# A RANGE over bucket numbers treats buckets without letters, which have no row, as zeros.
# If letters come at a constant rate, the share of n letters, of these and the earlier ones, is
# 1 / (before + 1). By Chernoff's bound, chance makes it as large with probability
# exp(-score^2 / 2) at most, which is to be below 1 % for all buckets together. Counted are causes
# by a hash, since Spark is faster with numbers; the few that are found get their names afterwards.
_SPIKES = """
    WITH counted AS (
        SELECT CAUSE AS cause, BUCKET AS bucket, sum(stands_for) AS letters
        FROM {letters}
        WHERE dead_lettered_at IS NOT NULL
        GROUP BY 1, 2),
    compared AS (
        SELECT cause, bucket, letters, total, least(24, bucket - first_bucket) AS before,
               coalesce(max(letters) OVER earlier, 0) AS most,
               coalesce(sum(letters) OVER earlier, 0) AS earlier
        FROM counted CROSS JOIN (
            SELECT floor(unix_micros(min(dead_lettered_at)) / {width}) AS first_bucket,
                   sum(stands_for) AS total
            FROM {letters})
        WINDOW earlier AS (PARTITION BY cause ORDER BY bucket
                           RANGE BETWEEN 24 PRECEDING AND 1 PRECEDING)),
    scored AS (
        SELECT *, earlier / before AS expected,
               sqrt(2 * (letters * ln(letters / (letters + earlier) * (before + 1))
                         + IF(earlier = 0, 0, earlier * ln(
                             earlier / (letters + earlier) * (before + 1) / before)))) AS score
        FROM compared
        WHERE before >= 6 AND letters * before > earlier
          AND letters >= greatest(5, 2 * most)),
    found AS (SELECT * FROM scored WHERE score >= greatest(4, sqrt(2 * ln(100 * total))))
    SELECT /*+ BROADCAST(found) */ coalesce(fingerprint, 'unknown') AS fingerprint,
           min(coalesce(task_name, 'unknown')) AS task_name,
           timestamp_micros(found.bucket * {width}) AS bucket_start,
           found.letters, expected, score
    FROM {letters} AS letters JOIN found ON CAUSE = found.cause AND BUCKET = found.bucket
    GROUP BY 1, 3, 4, 5, 6
    ORDER BY score DESC, bucket_start, fingerprint
""".replace("CAUSE", "xxhash64(coalesce(fingerprint, 'unknown'))").replace(
    "BUCKET", "floor(unix_micros(dead_lettered_at) / {width})"
)


def bucket_for(seconds: float) -> str:
    """The smallest width that divides a time span into at most 60 buckets."""
    for bucket in _BUCKETS:
        if seconds <= bucket_width(bucket).total_seconds() * _MOST_BUCKETS:
            return bucket
    return _BUCKETS[-1]


def bucket_width(bucket: str) -> timedelta:
    """Parse a width such as ``"10 minutes"``."""
    found = _WIDTH.fullmatch(bucket)
    if found is None:
        raise DLQError(f"expected bucket to be a width such as '10 minutes', got {bucket!r}")
    return timedelta(seconds=int(found[1]) * _UNIT_SECONDS[found[2]])


def new_since(df: DataFrame, since: datetime, quiet: str = "7 days") -> DataFrame:
    """Find causes that appeared at or after a time, or came back after a pause."""
    if since.tzinfo is None:
        raise DLQError(f"expected since to be an aware datetime, got the naive {since.isoformat()}")
    return _new_causes(_ALL, df, since, quiet).drop("among")


def largest_new_since(df: DataFrame, since: datetime, most: int) -> DataFrame:
    """The largest causes that `new_since` finds, with ``among``, the number of all."""
    return _new_causes(_LARGEST, df, since, "7 days", most=most)


def _new_causes(
    chosen: str, df: DataFrame, since: datetime, quiet: str, **values: Any
) -> DataFrame:
    gone = bucket_width(quiet) // _MICROSECOND
    query = _NEW.replace("CHOSEN", chosen)
    return run_sql(query, df, since=to_micros(since), quiet=gone, **values)


def spikes(df: DataFrame, bucket: str = "10 minutes") -> DataFrame:
    """Find times at which a cause had far more letters than before.

    A bucket is compared with the 24 buckets before it, those without letters included, and needs
    five letters, and twice as many as any of them.
    The score is the number of standard deviations of letters that arrive independently, at the
    least: four or more. The more letters there are, the higher is the least score, so that chance
    alone makes a spike in one of a hundred folders. The first six buckets of all letters have too
    little before them and are never spikes.
    """
    return run_sql(_SPIKES, df, width=bucket_width(bucket) // _MICROSECOND)


def counted(df: DataFrame, query: str = "stands_for first_at", *, hosts: bool = False) -> DataFrame:
    """The rows that stand for letters; each letter for itself, or see `summaries`.

    With ``hosts`` those that know hosts and deliveries, but no times within a day.
    """
    known = df.columns
    if "kept" in known:
        df = df.where(f"stands_for > 0 AND kept <> '{'hour' if hosts else 'day'}'")
    more = {"stands_for": "1L", "first_at": "dead_lettered_at"}
    asked = [
        f"{value} AS {name}" for name, value in more.items() if name in query and name not in known
    ]
    return df.selectExpr("*", *asked) if asked else df


def drawn(df: DataFrame) -> DataFrame:
    """The rows that are messages to look at."""
    if "kept" not in df.columns:
        return df
    return df.where("kept = 'letter'").drop("stands_for", "first_at", "kept")


def run_sql(query: str, df: DataFrame, *, hosts: bool = False, **values: Any) -> DataFrame:
    """Run a query over ``{letters}``, the letters in ``df``, and over other values by name."""
    session = df.sparkSession
    values = {"letters": counted(df, query, hosts=hosts), **values}
    if "kwargs" in signature(session.sql).parameters:
        return session.sql(query, **values)
    # Spark Connect has it since 4.0. The view stays: the query is planned when it runs.
    for name, value in values.items():
        if hasattr(value, "createOrReplaceTempView"):
            values[name] = f"celery_dlq_{uuid4().hex}"
            value.createOrReplaceTempView(values[name])
    return session.sql(query.format(**values))
