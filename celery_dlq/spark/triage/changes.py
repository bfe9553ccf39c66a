"""Two periods compared: causes that are new, gone, grown or shrunk, beyond chance.

Letters that come independently at one rate fall into the later period with a known probability.
What is said of a cause holds for all rates that its letters do not refute, by Chernoff's bound for
the binomial distribution, of all causes together: chance alone makes a row in one of a hundred
comparisons. Letters that come in bursts are worth fewer independent ones, by their dispersion over
time.

Source: H. Chernoff, "A Measure of Asymptotic Efficiency", Ann. Math. Statist. 23 (1952);
P. McCullagh, J. A. Nelder, "Generalized Linear Models" (1989), for the dispersion.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.record import check_aware, from_micros, iso, to_micros
from celery_dlq.spark.triage.trends import bucket_for, bucket_width, run_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ALPHA = 0.01
"""The tolerated probability that chance makes any row of a comparison."""

LEAST_CHANGE = 1.2
"""A smaller ratio of two rates is not said: traffic differs from week to week."""

LEAST = 5
"""Causes of fewer letters, both periods together, are not compared."""

_MICROSECOND = timedelta(microseconds=1)
_STEPS = 60  # halvings of an interval

# Halves the interval between LOW and HIGH: how far a probability is from the share q of the letters
# that came in the period, in letters, is compared with the bound.
_END = """
    aggregate(sequence(1, STEPS), named_struct('low', LOW, 'high', HIGH), (ends, step) ->
        IF(worth * (IF(q > 0, q * ln(q / MIDDLE), 0)
                    + IF(q < 1, (1 - q) * ln((1 - q) / (1 - MIDDLE)), 0)) SIGN bound,
           named_struct('low', MIDDLE, 'high', ends.high),
           named_struct('low', ends.low, 'high', MIDDLE))).END
""".replace("MIDDLE", "((ends.low + ends.high) / 2)").replace("STEPS", str(_STEPS))
_LOWER = ("CAST(0 AS DOUBLE)", "q", ">", "low")
_UPPER = ("q", "CAST(1 AS DOUBLE)", "<=", "high")
_COUNTED = """
    SELECT coalesce(fingerprint, 'unknown') AS fingerprint, {here} AS here,
           floor((unix_micros(dead_lettered_at) - {since}) / {width}) AS bucket,
           count(*) AS letters, min(dead_lettered_at) AS first, max(dead_lettered_at) AS last
    FROM {letters}
    WHERE unix_micros(dead_lettered_at) >= {since} AND unix_micros(dead_lettered_at) < {until}
    GROUP BY 1, 3
"""
# Spark aggregates numbers in hash tables, but sorts all letters if texts are among them. So the
# newest letters of the few remaining causes are looked up by their time afterwards.
_CHANGES = """
    WITH causes AS (
        SELECT fingerprint, CAST(sum(letters * here) AS BIGINT) AS letters,
               CAST(sum(letters * (1 - here)) AS BIGINT) AS letters_against,
               sum(letters * letters * here) AS squares,
               sum(letters * letters * (1 - here)) AS squares_against,
               min(first) AS first_seen_at, max(last) AS last_seen_at
        FROM {counted} GROUP BY fingerprint
        HAVING sum(letters) >= LEAST),
    dispersed AS (
        SELECT *, CAST({times} AS DOUBLE) AS times, count(*) OVER () AS compared,
               letters / (letters + letters_against) AS q,
               ln(2 * (count(*) OVER ()) / {alpha}) AS bound,
               IF(letters = 0 OR letters_against = 0, 1,
                  greatest(1, (squares * {buckets} / letters - letters
                               + squares_against * {buckets_against} / letters_against
                               - letters_against)
                              / greatest(1, {buckets} + {buckets_against} - 2)))
                   AS dispersion
        FROM causes),
    worths AS (SELECT *, (letters + letters_against) / dispersion AS worth FROM dispersed),
    ends AS (SELECT *, LOWER AS low, UPPER AS high FROM worths),
    ratios AS (
        SELECT *, times * try_divide(letters, letters_against) AS ratio,
               times * low / (1 - low) AS ratio_low,
               IF(letters_against = 0, NULL, times * high / (1 - high)) AS ratio_high
        FROM ends),
    said AS (
        SELECT *, CASE WHEN letters_against = 0 AND ratio_low > 1 THEN 'new'
                       WHEN letters = 0 AND ratio_high < 1 THEN 'gone'
                       WHEN ratio_low > 1 AND ratio >= LEAST_CHANGE THEN 'grown'
                       WHEN ratio_high < 1 AND ratio <= 1 / LEAST_CHANGE THEN 'shrunk' END AS kind
        FROM ratios),
    changed AS (SELECT * FROM said WHERE kind IS NOT NULL),
    newest AS (
        SELECT /*+ BROADCAST(changed) */ changed.fingerprint,
               max_by(struct(coalesce(task_name, 'unknown') AS task_name, exception_type,
                             coalesce(id, '') AS id), coalesce(id, '')) AS letter
        FROM (SELECT fingerprint, dead_lettered_at, task_name, exception_type, id FROM {letters}
              UNION ALL
              SELECT fingerprint, dead_lettered_at, task_name, exception_type, id
              FROM {against}) AS every
        JOIN changed ON coalesce(every.fingerprint, 'unknown') = changed.fingerprint
         AND every.dead_lettered_at = changed.last_seen_at
        GROUP BY changed.fingerprint)
    SELECT fingerprint, kind, letters, letters_against,
           letters - letters_against / times AS more, ratio, ratio_low, ratio_high,
           first_seen_at, last_seen_at, letter.task_name AS task_name,
           letter.exception_type AS exception_type, letter.id AS example_id, compared
    FROM changed JOIN newest USING (fingerprint)
    ORDER BY abs(more) DESC, fingerprint
"""


def _interval_end(low: str, high: str, sign: str, end: str) -> str:
    query = _END.replace("LOW", low).replace("HIGH", high)
    return query.replace("SIGN", sign).replace("END", end)


_QUERY = (
    _CHANGES.replace("LEAST_CHANGE", str(LEAST_CHANGE))
    .replace("LEAST", str(LEAST))
    .replace("LOWER", _interval_end(*_LOWER))
    .replace("UPPER", _interval_end(*_UPPER))
)


class Period(NamedTuple):
    """A time: its begin, and its end, which is not in it; aware."""

    since: datetime
    until: datetime

    @property
    def seconds(self) -> float:
        """The length of the period."""
        return (self.until - self.since).total_seconds()


def changes(
    df: DataFrame,
    against: DataFrame,
    period: tuple[datetime, datetime] | None = None,
    period_against: tuple[datetime, datetime] | None = None,
    *,
    alpha: float = ALPHA,
) -> DataFrame:
    """Find causes that are new, gone, grown or shrunk in a period, against another one.

    Rates are compared, letters by time, so the periods may have different lengths. Compare whole
    days or weeks: at night there are fewer letters, and that is no chance. A cause whose change
    chance explains, or whose rates differ by less than a fifth, has no row.

    Args:
        df: Letters, with the columns `COLUMNS` at least.
        against: Letters of the other period, usually the earlier one; may be the same DataFrame.
        period: Begin and end, aware; letters of other times are left out. By default from the first
            letter to the last.
        period_against: The same of the other period.
        alpha: The tolerated probability that chance makes any row.

    Returns:
        ``fingerprint`` string, ``kind`` string (``new``, ``gone``, ``grown`` or ``shrunk``),
        ``letters`` and ``letters_against`` bigint, ``more`` double (letters more than at the other
        rate; negative: fewer), ``ratio`` double (of the rates; null: new), ``ratio_low`` and
        ``ratio_high`` double (all ratios that chance does not rule out, for all causes together;
        null: there is no highest), ``first_seen_at`` and ``last_seen_at`` timestamp (in both
        periods), ``task_name``, ``exception_type`` and ``example_id`` string (of the newest
        letter), ``compared`` bigint (causes that were compared). The largest change in letters
        comes first.

    Raises:
        DLQError: A period has no length, or is naive, or there are no letters to take it from.
    """
    if not 0 < alpha < 1:
        raise DLQError(f"expected alpha between 0 and 1, got {alpha}")
    here = Period(*period) if period else whole_span(df)
    there = Period(*period_against) if period_against else whole_span(against)
    for name, one in (("period", here), ("period_against", there)):
        for moment in one:
            check_aware(name, moment)
        if one.seconds <= 0:
            raise DLQError(
                f"expected {name} to end after it begins, got {iso(one.since)} to {iso(one.until)}"
            )
    width = bucket_width(bucket_for(min(here.seconds, there.seconds)))
    counted = _counted(df, here, width, here=1).unionAll(_counted(against, there, width, here=0))
    return run_sql(
        _QUERY,
        _within_period(df, here),
        against=_within_period(against, there),
        counted=counted,
        times=there.seconds / here.seconds,
        buckets=ceil(here.seconds / width.total_seconds()),
        buckets_against=ceil(there.seconds / width.total_seconds()),
        alpha=float(alpha),
    )


def _counted(df: DataFrame, period: Period, width: timedelta, *, here: int) -> DataFrame:
    since, until = map(to_micros, period)
    return run_sql(_COUNTED, df, since=since, until=until, width=width // _MICROSECOND, here=here)


def _within_period(df: DataFrame, period: Period) -> DataFrame:
    since, until = map(to_micros, period)
    moment = "unix_micros(dead_lettered_at)"
    return df.where(f"{moment} >= {since} AND {moment} < {until}")


def whole_span(df: DataFrame) -> Period:
    """From the first letter to the last, which is in it."""
    row = df.selectExpr(
        "unix_micros(min(dead_lettered_at))", "unix_micros(max(dead_lettered_at))"
    ).collect()[0]
    if row[0] is None:
        raise DLQError("expected letters with a time to compare, got none")
    return Period(from_micros(row[0]), from_micros(row[1]) + _MICROSECOND)


def period_before(period: Period) -> Period:
    """The period of the same length before: of a few hours directly, else at the same hours.

    Fewer letters come at night, so a period of hours or days is moved by whole days.
    """
    length = period.until - period.since
    if length > _FEW_HOURS:
        length = timedelta(days=ceil(length / timedelta(days=1)))
    return Period(period.since - length, period.until - length)


_FEW_HOURS = timedelta(hours=6)
