"""How many of a cause's redriven messages died again, from earlier redrives.

A redriven message carries what it died of before: so does the letter, if it dies again, and the
sampled success. Deaths are counted, successes are a sample that stands for all.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from celery_dlq.letters.headers import EARLIER_HEADER, SAMPLE_HEADER
from celery_dlq.spark.triage.trends import run_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEAST_ENDED = 10
"""Of fewer redriven messages nothing is said."""

LEAST_CERTAIN = 0.2
"""Nor where the share of those that died again is not known to a fifth."""

_MOST_CAUSES = 10_000
_CAUSE = f"""
    try_element_at(from_json(get_json_object(headers, '$.{EARLIER_HEADER}'),
                             'array<struct<fingerprint:string>>'), -1).fingerprint
"""
# Deaths are counted while successes were sampled: before, and where the sample is full, the
# successes are missing.
_AGAIN = f"""
    WITH sampled AS (
        SELECT task_name, dead_lettered_at AS at, coalesce(redrives, 0) > 0 AS redriven,
               {_CAUSE} AS cause,
               coalesce(try_divide(1, try_cast(get_json_object(headers, '$.{SAMPLE_HEADER}')
                                               AS DOUBLE)), 1) AS weight
        FROM {{successes}}),
    span AS (
        SELECT task_name, min(at) AS first, max(at) AS last, max(weight) AS weight
        FROM sampled GROUP BY task_name),
    ended AS (
        SELECT cause, 0 AS died, 1 AS samples, weight AS succeeded, weight
        FROM sampled WHERE redriven
        UNION ALL
        SELECT /*+ BROADCAST(span) */ {_CAUSE} AS cause, 1 AS died, 0 AS samples,
               0D AS succeeded, span.weight
        FROM {{letters}} AS letters JOIN span USING (task_name)
        WHERE redrives > 0 AND dead_lettered_at BETWEEN first AND last)
    SELECT cause, sum(died) AS died, sum(samples) AS samples, sum(succeeded) AS succeeded,
           max(weight) AS weight
    FROM ended WHERE cause IS NOT NULL GROUP BY cause
    ORDER BY died + succeeded DESC, cause LIMIT {{most}}
"""  # noqa: S608 - of names of our own


def again_of(df: DataFrame, successes: DataFrame | None) -> dict[str, tuple[int, int]]:
    """Of the redriven messages of causes, those that died again and those that succeeded.

    By fingerprint; causes of which that is not known well are left out.
    """
    if successes is None or not {"headers", "redrives"} <= {*df.columns, *successes.columns}:
        return {}
    rows = run_sql(_AGAIN, df, successes=successes, most=_MOST_CAUSES)
    return {
        row.cause: (row.died, round(row.succeeded))
        for row in rows.collect()
        if is_known(row.died, row.samples, row.weight)
    }


def is_known(died: int, samples: int, weight: float) -> bool:
    """True if the share of those that died again is known well enough to be said.

    A sampled success stands for ``weight`` successes.
    """
    least = most = float(samples)
    if weight > 1:  # two standard deviations of a count; three where it is 0
        least, most = max(0.0, samples - 2 * sqrt(samples)), samples + 2 * sqrt(samples) + 3
    if died + samples < LEAST_ENDED:
        return False
    return _share_of(died, least * weight) - _share_of(died, most * weight) <= LEAST_CERTAIN


def _share_of(died: int, succeeded: float) -> float:
    return died / (died + succeeded) if died else 0.0
