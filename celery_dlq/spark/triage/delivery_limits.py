"""Advice for ``max_deliveries``, from the deliveries of past messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.letters.headers import SAMPLE_HEADER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A message that died or succeeded with n deliveries has reached 1, 2, …, n.
_LIMITS = """
    WITH ends AS (
        SELECT coalesce(task_name, 'unknown') AS task_name, {deliveries} AS deliveries,
               count(*) AS died, CAST(0 AS DOUBLE) AS succeeded, 0 AS sampled,
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
           min(delivery) FILTER (WHERE lost_at_most <= {lost})
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
    return df.sparkSession.sql(query, letters=df, successes=successes, **values)
