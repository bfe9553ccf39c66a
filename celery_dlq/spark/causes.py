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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from itertools import chain
from operator import add, or_
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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

_SAME_TASKS, _ALL_LETTERS, _SUCCESSES = "same tasks", "all letters", "successes"
_FEWEST_OTHERS = 20
_LONGEST_VALUE = 200

# What letters have is counted before it is taken apart: once for each different value, not for each
# letter. SUMS are the letters inside and outside of each comparison, which ``sides`` tells in bits.
_COUNTS = """
    SELECT feature, value, SUMS
    FROM (SELECT sides, inline(array(
              named_struct('feature', 'host', 'value', worker_hostname),
              named_struct('feature', 'release', 'value', release),
              named_struct('feature', 'queue', 'value', source_queue),
              named_struct('feature', 'hour', 'value', CAST(pmod(floor(
                  unix_micros(dead_lettered_at) / 3600000000), 24) AS STRING))))
          FROM {letters}
          UNION ALL
          SELECT sides, concat('kwargs.', key), coalesce(value, 'null')
          FROM (SELECT sides, explode(from_json(kwargs_json, 'map<string,string>')) AS (key, value)
                FROM {letters} WHERE kwargs_json != '{{}}')
          UNION ALL
          SELECT sides, concat('args[', place, ']'), coalesce(value, 'null')
          FROM (SELECT sides, posexplode(from_json(args_json, 'array<string>')) AS (place, value)
                FROM {letters} WHERE args_json != '[]'))
    WHERE value IS NOT NULL
    GROUP BY feature, value
"""
# No value: the argument was given at all. The shares of its values are shares of that, so rare
# values count there, too; they are not tested.
_SUSPECTS = """
    SELECT concat(feature, part.path) AS feature, part.value AS value, SUMS
    FROM (SELECT *, explode(IF(feature IN ('host', 'release', 'queue', 'hour'),
              array(named_struct('path', '', 'value', value)),
              concat(array(named_struct('path', '', 'value', CAST(NULL AS STRING))), coalesce(
                  CASE WHEN value LIKE '{{%' THEN OBJECT WHEN value LIKE '[%' THEN LIST END,
                  IF(COMMON, array(named_struct('path', '', 'value', left(value, {longest}))),
                     array()))))) AS part
          FROM {counts})
    GROUP BY concat(feature, part.path), part.value
    HAVING COMMON
"""
_PARTS = (
    "array_distinct(flatten(transform(EACH, one -> array("
    "named_struct('path', PATH, 'value', CAST(NULL AS STRING)), "
    "named_struct('path', PATH, 'value', left(coalesce(VALUE, 'null'), {longest}))))))"
)
_OBJECT = {
    "EACH": "map_entries(from_json(value, 'map<string,string>'))",
    "PATH": "concat('.', one.key)",
    "VALUE": "one.value",
}
_LIST = {"EACH": "from_json(value, 'array<string>')", "PATH": "'[]'", "VALUE": "one"}
# a of n letters of the group and c of m others have the value, among those that have the
# feature. The tail of the hypergeometric distribution is summed from its first term by the
# ratio of neighbours; what is left after the last one is bounded by a geometric series.
_TESTS = """
    WITH shares AS (
        SELECT fingerprint, against, heartbeat, feature, value, a, c,
               CASE WHEN value IS NULL OR feature IN ('host', 'release', 'queue', 'hour')
                    THEN inside
                    ELSE max(IF(value IS NULL, a, 0)) OVER one_feature END AS n,
               CASE WHEN value IS NULL OR feature IN ('host', 'release', 'queue', 'hour')
                    THEN outside
                    ELSE max(IF(value IS NULL, c, 0)) OVER one_feature END AS m
        FROM {suspects}
        -- An argument is never rarer than its values: none loses what its shares are of.
        WHERE a + c >= {least}
        WINDOW one_feature AS (PARTITION BY fingerprint, against, feature)),
    tested AS (
        SELECT fingerprint, against, feature, coalesce(value, {given}) AS value, a, c, n, m,
               FACT(a + c) + FACT(n + m - a - c) + FACT(n) + FACT(m) - FACT(n + m)
               - FACT(a) - FACT(c) - FACT(n - a) - FACT(m - c) AS ln_first
        -- A suspect that all or next to none have can tell nothing, whichever side they are on.
        FROM shares
        WHERE n > 0 AND m > 0 AND a + c < n + m
          AND (value IS NOT NULL OR heartbeat)),
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
                   least(n, a + c) - a > {terms} AND tail.ratio < 1,
                   tail.term * tail.ratio / (1 - tail.ratio), 0))))) AS p_value
        FROM summed),
    ranked AS (
        SELECT *, p_value * count(*) OVER (PARTITION BY fingerprint, against)
               / row_number() OVER (PARTITION BY fingerprint, against
                                    ORDER BY p_value, feature, value) AS raised
        FROM p_values),
    corrected AS (
        SELECT *, least(1D, min(raised) OVER (PARTITION BY fingerprint, against
                            ORDER BY p_value DESC, feature DESC, value DESC)) AS q_value
        FROM ranked)
    SELECT fingerprint, feature, value, against, a AS letters,
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
_BIT = "shiftright(sides, {bit}) & 1"


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
    return why_each(df, [cluster], successes, alpha=alpha, least=least).drop("fingerprint")


def why_each(
    df: DataFrame,
    clusters: Sequence[str],
    successes: DataFrame | None = None,
    *,
    alpha: float = 0.01,
    least: int = 5,
) -> DataFrame:
    """`why` for several causes in one pass over the letters, 15 at most.

    Returns:
        The columns of `why` behind ``fingerprint``, ordered as there.

    Raises:
        DLQError: As `why`.
    """
    if not 0 < alpha < 1 or least < 1:
        raise DLQError(
            f"expected alpha between 0 and 1 and least of 1 or more, got {alpha} and {least}"
        )
    comparisons = _comparisons(df, clusters, successes)
    letters = _with_sides(df, [one.of_letters() for one in comparisons])
    if successes is not None:
        good = _with_sides(successes, [one.of_successes() for one in comparisons])
        letters = letters.unionAll(good)
    spark = df.sparkSession
    common = f"greatest({', '.join(f'a{k} + c{k}' for k in range(len(comparisons)))}, 0) >= {least}"
    counts = spark.sql(_COUNTS.replace("SUMS", _sums(comparisons, _BIT)), letters=letters)
    query = _SUSPECTS.replace("SUMS", _sums(comparisons, "{name}")).replace("COMMON", common)
    for name, words in (("OBJECT", _OBJECT), ("LIST", _LIST)):
        query = query.replace(name, _replaced(_PARTS, words))
    suspects = spark.sql(query, counts=counts, longest=_LONGEST_VALUE)
    values: dict[str, Any] = {
        "given": GIVEN,
        "terms": _MOST_TERMS,
        "alpha": float(alpha),
        "least": least,
    }
    suspects = _by_comparison(suspects, comparisons)
    found = spark.sql(_expanded(_TESTS), suspects=suspects, **values)
    # The difference of the shares: what most of the group has and hardly any other.
    order = (found["support"] - found["share_of_others"]).desc()
    return found.orderBy(order, "feature", "value")


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The letters of a cause and what they are compared with, and how many are on each side."""

    fingerprint: str
    against: str
    tasks: list[str]
    inside: int
    outside: int

    def of_letters(self) -> tuple[Column, Column]:
        """Whether a letter is inside, and whether it is outside."""
        fingerprint = sql().col("fingerprint")
        other = ~fingerprint.eqNullSafe(self.fingerprint)
        if self.against == _SUCCESSES:
            other = sql().lit(False)  # noqa: FBT003 - a value
        elif self.against == _SAME_TASKS:
            other &= sql().col("task_name").isin(self.tasks)
        return fingerprint == self.fingerprint, other

    def of_successes(self) -> tuple[Column, Column]:
        """The same of a message that succeeded."""
        other = sql().col("task_name").isin(self.tasks)
        return sql().lit(False), other & sql().lit(self.against == _SUCCESSES)  # noqa: FBT003


def _comparisons(
    df: DataFrame, clusters: Sequence[str], successes: DataFrame | None
) -> list[_Comparison]:
    """Find the causes and count both sides, in one job for the letters and one for successes."""
    fingerprint = sql().col("fingerprint")
    named = reduce(or_, [fingerprint.startswith(one) & sql().lit(bool(one)) for one in clusters])
    label = sql().when(named, fingerprint)
    counted = df.groupBy(label.alias("fingerprint"), "task_name").count().collect()
    good: dict[str, int] = (
        {} if successes is None else dict(successes.groupBy("task_name").count().collect())
    )
    prints = {row[0] for row in counted if row[0] is not None}
    found = []
    for cluster in clusters:
        own = _only(prints, cluster)
        tasks = [row[1] for row in counted if row[0] == own and row[1] is not None]
        inside = sum(row[2] for row in counted if row[0] == own)
        outside = sum(row[2] for row in counted if row[0] != own)
        same = sum(row[2] for row in counted if row[0] != own and row[1] in tasks)
        if same >= _FEWEST_OTHERS:
            found.append(_Comparison(own, _SAME_TASKS, tasks, inside, same))
        else:
            found.append(_Comparison(own, _ALL_LETTERS, tasks, inside, outside))
        if successes is not None:
            succeeded = sum(good.get(task, 0) for task in tasks)
            found.append(_Comparison(own, _SUCCESSES, tasks, inside, succeeded))
    return found


def _only(prints: set[str], cluster: str) -> str:
    """The one fingerprint that begins so."""
    found = sorted(known for known in prints if known.startswith(cluster)) if cluster else []
    if cluster in found:
        return cluster
    if not found:
        raise DLQError(f"expected cluster to be a fingerprint of these letters, got {cluster!r}")
    if len(found) > 1:
        several = ", ".join(found[:5])
        raise DLQError(
            f"expected one fingerprint to begin with {cluster!r}, got several: {several}"
        )
    return found[0]


def _with_sides(df: DataFrame, conditions: Iterable[tuple[Column, Column]]) -> DataFrame:
    """The columns that are looked at, and in ``sides`` a bit for each condition."""
    bits = [
        sql().when(condition, 1 << bit).otherwise(0).cast("bigint")
        for bit, condition in enumerate(chain.from_iterable(conditions))
    ]
    columns = [name for name in COLUMNS if name not in {"fingerprint", "task_name"}]
    return df.select(reduce(add, bits).alias("sides"), *columns).where("sides != 0")


def _sums(comparisons: Sequence[_Comparison], term: str) -> str:
    """The columns ``a0``, ``c0``, ``a1``, …: letters inside and outside of each comparison."""
    names = [f"{side}{number}" for number in range(len(comparisons)) for side in "ac"]
    sums = [f"sum({term.format(bit=bit, name=name)}) AS {name}" for bit, name in enumerate(names)]
    return ", ".join(sums)


def _by_comparison(suspects: DataFrame, comparisons: Sequence[_Comparison]) -> DataFrame:
    """A row for each suspect and comparison."""
    lit = sql().lit
    rows = [
        sql().struct(
            lit(one.fingerprint).alias("fingerprint"),
            lit(one.against).alias("against"),
            # Other tasks have other arguments: that is no news.
            lit(one.against != _ALL_LETTERS).alias("heartbeat"),
            lit(one.inside).cast("bigint").alias("inside"),
            lit(one.outside).cast("bigint").alias("outside"),
            sql().col(f"a{number}").alias("a"),
            sql().col(f"c{number}").alias("c"),
        )
        for number, one in enumerate(comparisons)
    ]
    return suspects.select("feature", "value", sql().inline(sql().array(*rows)))


def sql() -> Any:
    """PySpark's functions, imported when used."""
    return import_module("pyspark.sql.functions")


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return text


def _expanded(query: str) -> str:
    """The query with its two macros written out."""
    query = query.replace("RATIO", _RATIO)
    while "FACT(" in query:
        head, _, rest = query.partition("FACT(")
        number, _, tail = rest.partition(")")
        query = f"{head}({_FACT.format(n=f'({number})')}){tail}"
    return query
