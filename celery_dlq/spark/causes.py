"""Why a group of letters died: what its messages have in common that others lack.

Part of `celery_dlq.spark.triage`. Every value of every argument, and host, release,
queue and hour, is a suspect; Fisher's exact test says how likely chance alone would
make it as frequent, and the procedure of Benjamini and Hochberg corrects for the
number of suspects. All of it is Spark SQL: also the hypergeometric distribution.

Source: Y. Benjamini, Y. Hochberg, "Controlling the False Discovery Rate", J. R.
Statist. Soc. B 57 (1995); R. Bourgon et al., "Independent filtering increases
detection power for high-throughput experiments", PNAS 107 (2010), for why a value's
total frequency may decide whether it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = (
    "fingerprint",
    "task_name",
    "source_queue",
    "dead_lettered_at",
    "worker_hostname",
    "release",
    "args_json",
    "kwargs_json",
)
"""The columns that `why` reads."""

GIVEN = "(given)"
"""The value that stands for: this argument was given at all."""

_FEWEST_OTHERS = 20
_LONGEST_VALUE = 200

_SUSPECTS = """
    SELECT side, inline(array_distinct(concat(
        filter(array(
            named_struct('feature', 'host', 'value', worker_hostname),
            named_struct('feature', 'release', 'value', release),
            named_struct('feature', 'queue', 'value', source_queue),
            named_struct('feature', 'hour', 'value', CAST(pmod(floor(
                unix_micros(dead_lettered_at) / 3600000000), 24) AS STRING))),
            one -> one.value IS NOT NULL),
        transform(arguments, one -> named_struct(
            'feature', one.path, 'value', left(one.value, {longest}))),
        -- that it is there at all: also what the shares of its values are shares of
        transform(arguments, one -> named_struct(
            'feature', one.path, 'value', CAST(NULL AS STRING))))))
    FROM (SELECT *, concat(
              transform(nested, one -> named_struct(
                  'path', one.path,
                  'value', IF(one.inner IS NULL, coalesce(one.value, 'null'), NULL))),
              flatten(transform(nested, one -> coalesce(one.inner, array())))) AS arguments
          FROM (SELECT *, transform(concat(
                    coalesce(transform(map_entries(from_json(kwargs_json, 'map<string,string>')),
                        entry -> named_struct('path', concat('kwargs.', entry.key),
                                              'value', entry.value)), array()),
                    coalesce(transform(from_json(args_json, 'array<string>'),
                        (item, place) -> named_struct('path', concat('args[', place, ']'),
                                                      'value', item)), array())),
                    one -> named_struct('path', one.path, 'value', one.value, 'inner', CASE
                        WHEN one.value LIKE '{{%' THEN transform(
                            map_entries(from_json(one.value, 'map<string,string>')),
                            entry -> named_struct('path', concat(one.path, '.', entry.key),
                                                  'value', coalesce(entry.value, 'null')))
                        WHEN one.value LIKE '[%' THEN transform(
                            from_json(one.value, 'array<string>'),
                            item -> named_struct('path', concat(one.path, '[]'),
                                                 'value', coalesce(item, 'null'))) END)) AS nested
                FROM {letters}))
"""
# a of n letters of the group and c of m others have the value, among those that have the
# feature. The tail of the hypergeometric distribution is summed from its first term by the
# ratio of neighbours; what is left after the last one is bounded by a geometric series.
_TESTS = """
    WITH counts AS (
        SELECT feature, value, count_if(side = 0) AS a, count_if(side = 1) AS c
        FROM {suspects} GROUP BY feature, value),
    shares AS (
        SELECT feature, value, a, c,
               CASE WHEN value IS NULL OR feature IN ('host', 'release', 'queue', 'hour')
                    THEN {inside}
                    ELSE max(IF(value IS NULL, a, 0)) OVER (PARTITION BY feature) END AS n,
               CASE WHEN value IS NULL OR feature IN ('host', 'release', 'queue', 'hour')
                    THEN {outside}
                    ELSE max(IF(value IS NULL, c, 0)) OVER (PARTITION BY feature) END AS m
        FROM counts),
    tested AS (
        SELECT feature, coalesce(value, {given}) AS value, a, c, n, m,
               FACT(a + c) + FACT(n + m - a - c) + FACT(n) + FACT(m) - FACT(n + m)
               - FACT(a) - FACT(c) - FACT(n - a) - FACT(m - c) AS ln_first
        -- A suspect that all or next to none have can tell nothing, whichever side they are on.
        FROM shares
        WHERE a + c >= {least} AND n > 0 AND m > 0 AND a + c < n + m
          AND (value IS NOT NULL OR {presence})),
    summed AS (
        SELECT *, aggregate(
            sequence(1L, greatest(1L, least({terms}, least(n, a + c) - a))),
            named_struct('term', 1D, 'total', 1D, 'ratio', 0D),
            (state, k) -> named_struct(
                'term', state.term * RATIO,
                'total', state.total + state.term * RATIO,
                'ratio', RATIO)) AS tail
        FROM tested),
    p_values AS (
        SELECT *, least(1D, exp(least(0D, ln_first + ln(tail.total + IF(
                   least(n, a + c) - a > {terms} AND tail.ratio < 1, tail.term * tail.ratio / (1 - tail.ratio), 0))))) AS p_value
        FROM summed),
    ranked AS (
        SELECT *, p_value * count(*) OVER () / row_number() OVER (ORDER BY p_value, feature, value)
               AS raised
        FROM p_values),
    corrected AS (
        SELECT *, least(1D, min(raised) OVER (ORDER BY p_value DESC, feature DESC, value DESC))
               AS q_value
        FROM ranked)
    SELECT feature, value, {against} AS against, a AS letters,
           a / n AS support, c / m AS share_of_others,
           (a / n) / ((c + IF(c = 0, 0.5D, 0D)) / m) AS lift, p_value, q_value
    FROM corrected
    WHERE q_value <= {alpha} AND a / n > c / m
"""
# ln(n!): exact for small n, Stirling's series otherwise, good to 10 digits and more.
_FACT = (
    "CASE WHEN {n} <= 15 THEN ln(factorial(CAST(greatest({n}, 0) AS INT))) ELSE "
    "({n} + 0.5D) * ln({n}) - {n} + 0.9189385332046727D + 1D / (12D * {n})"
    " - 1D / (360D * pow({n}, 3)) END"
)
_RATIO = (
    "greatest(0D, CAST(n - (a + k - 1) AS DOUBLE) * (c - (k - 1))"
    " / (CAST(a + k AS DOUBLE) * (m - c + k)))"
)
_MOST_TERMS = 1_000


def why(
    df: DataFrame,
    cluster: str,
    successes: DataFrame | None = None,
    *,
    alpha: float = 0.01,
    least: int = 5,
) -> DataFrame:
    """What the letters of one cause have in common that others lack.

    The letters are compared with the other letters of the same tasks, if there are at
    least 20, else with all other letters; and with messages that succeeded, if given. An
    argument's values are compared among the messages that have the argument. Counting
    runs at once to find the group; the comparison runs when rows are asked for.

    A finding is a correlation: a host that got all the bad orders stands beside the
    orders.

    Args:
        df: Letters, with the columns `COLUMNS` at least.
        cluster: The fingerprint, or its first digits if they are unique.
        successes: Messages that succeeded, with the same columns but ``fingerprint``;
            ``dead_lettered_at`` is when they succeeded.
        alpha: The share of false findings among all that is tolerated.
        least: Values that fewer messages have, both sides together, are not tested.

    Returns:
        ``feature`` string (``kwargs.currency``, ``args[0].id``, ``kwargs.items[]``, ``host``,
        ``release``, ``queue``, ``hour`` in UTC), ``value`` string (``(given)``: that the
        argument was there), ``against`` string (``same tasks``, ``all letters`` or
        ``successes``), ``letters`` bigint (of the cluster), ``support`` double (their share),
        ``share_of_others`` double, ``lift`` double (how many times as frequent; where no
        other has it, as if half of one had), ``p_value`` double, ``q_value`` double (after
        correction for all tests), what explains most first.

    Raises:
        DLQError: No letter, or more than one cause, has such a fingerprint; or ``alpha`` or
            ``least`` is out of range.
    """
    if not 0 < alpha < 1 or least < 1:
        message = f"expected alpha between 0 and 1 and least of 1 or more, got {alpha} and {least}"
        raise DLQError(message)
    census = _Census.of(df, cluster)
    inside = df.where(df["fingerprint"] == census.fingerprint)
    others = df.where(~df["fingerprint"].eqNullSafe(census.fingerprint))
    test = _Test(alpha, least, census.inside)
    if census.same_tasks >= _FEWEST_OTHERS:
        same = others.where(others["task_name"].isin(census.tasks))
        found = test.compared(inside, same, "same tasks", census.same_tasks)
    else:
        found = test.compared(inside, others, "all letters", census.outside)
    if successes is not None:
        good = successes.where(successes["task_name"].isin(census.tasks))
        found = found.unionAll(test.compared(inside, good, "successes", good.count()))
    return found.orderBy((found["support"] * _ln(found["lift"])).desc(), "feature", "value")


@dataclass(frozen=True, slots=True)
class _Census:
    """How many letters stand on which side."""

    fingerprint: str
    tasks: list[str]
    inside: int
    outside: int
    same_tasks: int

    @classmethod
    def of(cls, df: DataFrame, cluster: str) -> _Census:
        """Count the letters of each cause and task, in one job."""
        counted = df.groupBy("fingerprint", "task_name").count().collect()
        prints = {row[0] for row in counted if row[0] is not None}
        fingerprint = _only(prints, cluster)
        tasks = [row[1] for row in counted if row[0] == fingerprint and row[1] is not None]
        inside = sum(row[2] for row in counted if row[0] == fingerprint)
        same = sum(row[2] for row in counted if row[0] != fingerprint and row[1] in tasks)
        return cls(fingerprint, tasks, inside, sum(row[2] for row in counted) - inside, same)


def _only(prints: set[str], cluster: str) -> str:
    """The one fingerprint that begins so."""
    found = sorted(known for known in prints if known.startswith(cluster)) if cluster else []
    if cluster in found:
        return cluster
    if not found:
        message = f"expected cluster to be a fingerprint of these letters, got {cluster!r}"
        raise DLQError(message)
    if len(found) > 1:
        several = ", ".join(found[:5])
        message = f"expected one fingerprint to begin with {cluster!r}, got several: {several}"
        raise DLQError(message)
    return found[0]


@dataclass(frozen=True, slots=True)
class _Test:
    """The comparison of a group with others."""

    alpha: float
    least: int
    inside: int

    def compared(self, inside: DataFrame, others: DataFrame, against: str, size: int) -> DataFrame:
        """What is over-represented in the group."""
        from pyspark.sql.functions import lit  # noqa: PLC0415 - imported when used

        columns = [name for name in COLUMNS if name != "fingerprint"]
        one, other = lit(0).alias("side"), lit(1).alias("side")
        both = inside.select(one, *columns).unionAll(others.select(other, *columns))
        spark = inside.sparkSession
        suspects = spark.sql(_SUSPECTS, letters=both, longest=_LONGEST_VALUE)
        values: dict[str, Any] = {
            "inside": self.inside,
            "outside": size,
            "given": GIVEN,
            "terms": _MOST_TERMS,
            "against": against,
            "alpha": float(self.alpha),
            "least": self.least,
            # Other tasks have other arguments: that is no news.
            "presence": against != "all letters",
        }
        return spark.sql(_expanded(_TESTS), suspects=suspects, **values)


def _expanded(query: str) -> str:
    """The query with its two macros written out."""
    query = query.replace("RATIO", _RATIO)
    while "FACT(" in query:
        head, _, rest = query.partition("FACT(")
        number, _, tail = rest.partition(")")
        query = f"{head}({_FACT.format(n=f'({number})')}){tail}"
    return query


def _ln(column: Any) -> Any:
    from pyspark.sql.functions import ln  # noqa: PLC0415 - imported when used

    return ln(column)
