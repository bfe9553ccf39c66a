"""The question why: values that are more frequent in a group of letters than in others.

Every value of every argument is a candidate, and so are release, queue, origin, host and retries.
Spark counts the letters with the value, inside and outside of the group. The driver tests the
counts; see `celery_dlq.letters.significance`.
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
from celery_dlq.letters.compared_values import (
    FIELDS,
    GIVEN,
    MAX_VALUE_CHARS,
    WHOLE,
)
from celery_dlq.letters.significance import (
    ALPHA,
    LEAST,
    MIN_OTHERS,
    MOST_TESTED,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    Candidate,
    Significant,
    comparable,
    ranked,
    significant,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COLUMNS = (
    "fingerprint",
    "task_name",
    *FIELDS.values(),
    "args_json",
    "kwargs_json",
)
"""The columns that `why` reads."""

_DDL = (
    "feature STRING, value STRING, against STRING, letters BIGINT, support DOUBLE, "
    "share_of_others DOUBLE, lift DOUBLE, p_value DOUBLE, q_value DOUBLE"
)

# Values are counted before they are parsed, so each different value is parsed once, not once per
# letter. SUMS are the letters inside and outside of each comparison, by the bits of ``sides``.
_COUNTS = """
    SELECT feature, value, SUMS
    FROM (SELECT sides, inline(array(PLAIN)) FROM {letters}
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
# A null value means that the argument was given. The shares of its values are shares of that count,
# which includes rare values; those are not tested themselves.
_SUSPECTS = """
    SELECT concat(feature, part.path) AS feature, part.value AS value, SUMS
    FROM (SELECT *, explode(IF(feature IN (WHOLE),
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
# a of n letters of the group and c of m others have the value, among those with the feature.
# Candidates are ranked by the difference of the two shares, in standard errors.
_CANDIDATES = """
    WITH shares AS (
        SELECT fingerprint, against, comparable, feature, value, a, c,
               CASE WHEN value IS NULL OR feature IN (WHOLE)
                    THEN inside
                    ELSE max(IF(value IS NULL, a, 0)) OVER one_feature END AS n,
               CASE WHEN value IS NULL OR feature IN (WHOLE)
                    THEN outside
                    ELSE max(IF(value IS NULL, c, 0)) OVER one_feature END AS m
        FROM {suspects}
        -- An argument is at least as frequent as its values: no total is lost.
        WHERE a + c >= {least}
        WINDOW one_feature AS (PARTITION BY fingerprint, against, feature)),
    candidates AS (
        SELECT fingerprint, against, feature, coalesce(value, {given}) AS value, a, c, n, m,
               count(*) OVER (PARTITION BY fingerprint, against) AS tests,
               (a / n - c / m) / sqrt((a + c) / (n + m) * (1 - (a + c) / (n + m))
                                      * (1 / n + 1 / m)) AS distance
        -- A candidate that all letters of both sides have explains nothing.
        FROM shares
        WHERE n > 0 AND m > 0 AND a + c < n + m
          AND array_contains(comparable, IF(feature IN (WHOLE), feature, {given})))
    SELECT fingerprint, against, feature, value, a, c, n, m, tests
    FROM (SELECT *, row_number() OVER (PARTITION BY fingerprint, against
                                       ORDER BY distance DESC, feature, value) AS place
          FROM candidates WHERE distance > 0)
    WHERE place <= {most}
"""
_FEATURES = {
    "PLAIN": ", ".join(
        f"named_struct('feature', '{feature}', 'value', CAST({name} AS STRING))"
        for feature, name in FIELDS.items()
    ),
    "WHOLE": ", ".join(f"'{feature}'" for feature in sorted(WHOLE)),
}
_BIT = "shiftright(sides, {bit}) & 1"


def why(
    df: DataFrame,
    cluster: str,
    successes: DataFrame | None = None,
    *,
    alpha: float = ALPHA,
    least: int = LEAST,
) -> DataFrame:
    """Find values that are more frequent in the letters of one cause than in others.

    The letters are compared with the other letters of the same tasks, if there are at
    least 20, else with the other letters of their queues, by host and release only: the rest
    follows from the task. And with messages that succeeded, if given; there the number of
    retries says nothing. An argument's values are compared among the messages that have the
    argument. Spark counts the letters at once, and the driver tests the counts: the 2,000
    values of each comparison that stand out most; the others count as tests without a finding.
    A value is a finding if its two shares differ by a tenth or more, beyond chance.

    A finding is a correlation: a host that got all the bad orders is found as well as the
    orders.
    """
    found = why_each(df, [cluster], successes, alpha=alpha, least=least)
    names = [column.split()[0] for column in _DDL.split(", ")]
    rows = [tuple(row[name] for name in names) for row in found]
    return df.sparkSession.createDataFrame(rows, _DDL).coalesce(1)


def why_each(
    df: DataFrame,
    clusters: Sequence[str],
    successes: DataFrame | None = None,
    *,
    alpha: float = ALPHA,
    least: int = LEAST,
) -> list[dict[str, Any]]:
    """Answer `why` for several causes, 15 at most, in one pass over the letters."""
    if not 0 < alpha < 1 or least < 1:
        raise DLQError(
            f"expected alpha between 0 and 1 and least of 1 or more, got {alpha} and {least}"
        )
    return findings_of(df, comparisons_of(df, clusters, successes), successes, alpha, least)


def findings_of(
    df: DataFrame,
    comparisons: Sequence[Comparison],
    successes: DataFrame | None,
    alpha: float = ALPHA,
    least: int = LEAST,
) -> list[dict[str, Any]]:
    """The findings of some comparisons; `why_each` describes them."""
    by_comparison: dict[tuple[str, str, int], list[Candidate]] = {}
    for row in candidates_of(df, comparisons, successes, least).collect():
        counts = Candidate(*(row[name] for name in Candidate._fields))
        key = row["fingerprint"], row["against"], row["tests"]
        by_comparison.setdefault(key, []).append(counts)
    found: dict[str, list[Significant]] = {one.fingerprint: [] for one in comparisons}
    for (fingerprint, against, tests), rows in by_comparison.items():
        found[fingerprint] += significant(rows, tests, against, alpha)
    return [_row(one, fingerprint) for fingerprint in found for one in ranked(found[fingerprint])]


def _row(found: Significant, fingerprint: str) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "feature": found.counts.feature,
        "value": found.counts.value,
        "against": found.against,
        "letters": found.counts.a,
        "support": found.share_here,
        "share_of_others": found.share_elsewhere,
        "lift": found.lift,
        "p_value": found.p_value,
        "q_value": found.q_value,
    }


def candidates_of(
    df: DataFrame, comparisons: Sequence[Comparison], successes: DataFrame | None, least: int
) -> DataFrame:
    """Count every value inside and outside of each comparison, in one pass over the letters."""
    letters = _with_sides(df, [one.of_letters() for one in comparisons])
    if successes is not None:
        good = _with_sides(successes, [one.of_successes() for one in comparisons])
        letters = letters.unionAll(good)
    spark = df.sparkSession
    common = f"greatest({', '.join(f'a{k} + c{k}' for k in range(len(comparisons)))}, 0) >= {least}"
    counting = _replaced(_COUNTS, {**_FEATURES, "SUMS": _sums(comparisons, _BIT)})
    counts = spark.sql(counting, letters=letters)
    query = _SUSPECTS.replace("SUMS", _sums(comparisons, "{name}")).replace("COMMON", common)
    query = _replaced(query, _FEATURES)
    for name, words in (("OBJECT", _OBJECT), ("LIST", _LIST)):
        query = query.replace(name, _replaced(_PARTS, words))
    suspects = spark.sql(query, counts=counts, longest=MAX_VALUE_CHARS)
    suspects = _by_comparison(suspects, comparisons)
    values: dict[str, Any] = {"given": GIVEN, "least": least, "most": MOST_TESTED}
    return spark.sql(_replaced(_CANDIDATES, _FEATURES), suspects=suspects, **values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The letters of a cause (inside), and those they are compared with (outside).

    ``names`` are those of the tasks or queues of the messages outside.
    """

    fingerprint: str
    against: str
    names: list[str]
    inside: int
    outside: int

    def of_letters(self) -> tuple[Column, Column]:
        """Conditions: a letter is inside, and it is outside."""
        fingerprint = sql().col("fingerprint")
        other = ~fingerprint.eqNullSafe(self.fingerprint)
        if self.against == SUCCESSES:
            other = sql().lit(False)  # noqa: FBT003 - a value
        else:
            name = "task_name" if self.against == SAME_TASKS else "source_queue"
            other &= sql().col(name).isin(self.names)
        return fingerprint == self.fingerprint, other

    def of_successes(self) -> tuple[Column, Column]:
        """The same conditions for a message that succeeded."""
        other = sql().col("task_name").isin(self.names)
        return sql().lit(False), other & sql().lit(self.against == SUCCESSES)  # noqa: FBT003


def comparisons_of(
    df: DataFrame, clusters: Sequence[str], successes: DataFrame | None
) -> list[Comparison]:
    """Find the causes and count both sides: one job for letters, one for successes."""
    fingerprint = sql().col("fingerprint")
    named = reduce(or_, [fingerprint.startswith(one) & sql().lit(bool(one)) for one in clusters])
    label = sql().when(named, fingerprint)
    counted = df.groupBy(label.alias("fingerprint"), "task_name", "source_queue").count().collect()
    good: dict[str, int] = (
        {} if successes is None else dict(successes.groupBy("task_name").count().collect())
    )
    prints = {row[0] for row in counted if row[0] is not None}
    found = []
    for cluster in clusters:
        own = _only(prints, cluster)
        rows = [row for row in counted if row[0] == own]
        others = [row for row in counted if row[0] != own]
        tasks, queues = (sorted({row[at] for row in rows} - {None}) for at in (1, 2))
        inside = sum(row[3] for row in rows)
        same = sum(row[3] for row in others if row[1] in tasks)
        if same >= MIN_OTHERS:
            found.append(Comparison(own, SAME_TASKS, tasks, inside, same))
        else:
            outside = sum(row[3] for row in others if row[2] in queues)
            found.append(Comparison(own, SAME_QUEUES, queues, inside, outside))
        if successes is not None:
            succeeded = sum(good.get(task, 0) for task in tasks)
            found.append(Comparison(own, SUCCESSES, tasks, inside, succeeded))
    return found


def _only(prints: set[str], cluster: str) -> str:
    """The only fingerprint that begins with ``cluster``."""
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
    """The candidates' columns, and ``sides``, which has a bit for each condition."""
    bits = [
        sql().when(condition, 1 << bit).otherwise(0).cast("bigint")
        for bit, condition in enumerate(chain.from_iterable(conditions))
    ]
    columns = [name for name in COLUMNS if name not in {"fingerprint", "task_name"}]
    return df.select(reduce(add, bits).alias("sides"), *columns).where("sides != 0")


def _sums(comparisons: Sequence[Comparison], term: str) -> str:
    """The columns ``a0``, ``c0``, ``a1``, …: letters inside and outside of each comparison."""
    names = [f"{side}{number}" for number in range(len(comparisons)) for side in "ac"]
    sums = [f"sum({term.format(bit=bit, name=name)}) AS {name}" for bit, name in enumerate(names)]
    return ", ".join(sums)


def _by_comparison(suspects: DataFrame, comparisons: Sequence[Comparison]) -> DataFrame:
    """One row per value and comparison."""
    lit = sql().lit
    rows = [
        sql().struct(
            lit(one.fingerprint).alias("fingerprint"),
            lit(one.against).alias("against"),
            # `GIVEN` stands for all arguments.
            sql()
            .array(*(lit(name) for name in (*FIELDS, GIVEN) if comparable(name, one.against)))
            .alias("comparable"),
            lit(one.inside).cast("bigint").alias("inside"),
            lit(one.outside).cast("bigint").alias("outside"),
            sql().col(f"a{number}").alias("a"),
            sql().col(f"c{number}").alias("c"),
        )
        for number, one in enumerate(comparisons)
    ]
    return suspects.select("feature", "value", sql().inline(sql().array(*rows)))


def sql() -> Any:
    """PySpark's SQL functions, imported when used."""
    return import_module("pyspark.sql.functions")


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return text
