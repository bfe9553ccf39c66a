"""The question why: values that are more frequent in a group of letters than in others.

Every value of every argument is a candidate, and so are release, queue, origin, host and retries.
Tasks of Spark parse letters and count their values, inside and outside of each comparison;
Spark adds the counts up, and the driver tests those of `celery_dlq.letters.comparison`, which says
what a letter is compared by. ``dlq differences`` counts and tests by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from itertools import chain
from operator import add, or_
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.letters.comparison import (
    ALPHA,
    FIELDS,
    LEAST,
    MIN_OTHERS,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    Pair,
    Significant,
    candidates,
    pairs_of,
    ranked,
    significant,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_COMPARED = (*FIELDS.values(), "args_json", "kwargs_json")
COLUMNS = ("fingerprint", "task_name", *_COMPARED)
"""The columns that `why` reads."""

_DDL = (
    "fingerprint STRING, feature STRING, value STRING, against STRING, letters BIGINT, "
    "support DOUBLE, share_of_others DOUBLE, lift DOUBLE, p_value DOUBLE, q_value DOUBLE"
)
_MOST_COUNTED = 100_000  # values that a task holds, at most 50 MB
# Letters inside and outside of each comparison, by the bits of ``sides``.
_SUMS = """
    SELECT feature, value, SUMS FROM {counted}
    GROUP BY feature, value HAVING sum(letters) >= {least}
"""


def why(
    df: DataFrame,
    fingerprint: str,
    successes: DataFrame | None = None,
    *,
    alpha: float = ALPHA,
) -> DataFrame:
    """Find values that are more frequent in the letters of one cause than in others.

    The letters are compared with the other letters of the same tasks, if there are at
    least 20, else with the other letters of their queues, by host and release only: all else
    follows from the task. And with messages that succeeded, if given; there the number of
    retries says nothing. An argument's values are compared among the messages that have the
    argument. Spark counts the letters at once, by this package on the executors, and the driver
    tests the counts: the 2,000 values of each comparison that stand out most; the others count
    as tests without a finding. A value is a finding if its two shares differ by a tenth or more,
    beyond chance.

    A finding is a correlation: a host that got all the bad orders is found as well as the
    orders.
    """
    rows = [tuple(row.values()) for row in why_each(df, [fingerprint], successes, alpha)]
    return df.sparkSession.createDataFrame(rows, _DDL).drop("fingerprint").coalesce(1)


def why_each(
    df: DataFrame,
    fingerprints: Sequence[str],
    successes: DataFrame | None = None,
    alpha: float = ALPHA,
) -> list[dict[str, Any]]:
    """Answer `why` for several causes, 15 at most, in one pass over the letters."""
    if not 0 < alpha < 1:
        raise DLQError(f"expected alpha between 0 and 1, got {alpha}")
    return findings_of(df, comparisons_of(df, fingerprints, successes), successes, alpha)


def findings_of(
    df: DataFrame,
    comparisons: Sequence[Comparison],
    successes: DataFrame | None,
    alpha: float = ALPHA,
) -> list[dict[str, Any]]:
    """The findings of some comparisons; `why_each` describes them."""
    rows = sums_of(df, comparisons, successes).collect()
    found: dict[str, list[Significant]] = {one.fingerprint: [] for one in comparisons}
    for number, one in enumerate(comparisons):
        here, there = (
            Counter[Pair]({(row[0], row[1]): row[at] for row in rows if row[at]})
            for at in (2 + 2 * number, 3 + 2 * number)
        )
        tested, tests = candidates(here, there, one.inside, one.outside, one.against)
        found[one.fingerprint] += significant(tested, tests, one.against, alpha)
    return [_row(one, fingerprint) for fingerprint in found for one in ranked(found[fingerprint])]


def _row(found: Significant, fingerprint: str) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "feature": found.feature,
        "value": found.value,
        "against": found.against,
        "letters": found.letters,
        "support": found.share_here,
        "share_of_others": found.share_elsewhere,
        "lift": found.lift,
        "p_value": found.p_value,
        "q_value": found.q_value,
    }


def sums_of(
    df: DataFrame, comparisons: Sequence[Comparison], successes: DataFrame | None
) -> DataFrame:
    """The letters with each value, inside and outside of each comparison, in one pass."""
    letters = _with_sides(df, [one.of_letters() for one in comparisons])
    if successes is not None:
        good = _with_sides(successes, [one.of_successes() for one in comparisons])
        letters = letters.unionAll(good)
    counted = letters.mapInArrow(
        counts_of, "sides BIGINT, feature STRING, value STRING, letters BIGINT"
    )
    sums = ", ".join(
        f"sum(letters * (shiftright(sides, {bit}) & 1))" for bit in range(2 * len(comparisons))
    )
    query = _SUMS.replace("SUMS", sums)
    return df.sparkSession.sql(query, counted=counted, least=LEAST)


def counts_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Count the values of a task's letters, record batch by record batch."""
    import pyarrow as pa  # noqa: PLC0415 - where tasks run

    found: Counter[tuple[int, Pair]] = Counter()

    def counted() -> Any:
        sides, pairs = zip(*found, strict=True)
        features, values = zip(*pairs, strict=True)
        columns = [sides, features, values, found.values()]
        kinds = [pa.int64(), pa.string(), pa.string(), pa.int64()]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        return pa.record_batch(arrays, names=["sides", "feature", "value", "letters"])

    for batch in batches:
        for letter in batch.to_pylist():
            pairs = pairs_of(letter.get)  # without its task: both sides have the same tasks
            found.update((letter["sides"], pair) for pair in pairs)
            if len(found) >= _MOST_COUNTED:
                yield counted()
                found.clear()
    if found:
        yield counted()


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
    df: DataFrame, begins: Sequence[str], successes: DataFrame | None
) -> list[Comparison]:
    """Find the causes and count both sides: one job for letters, one for successes."""
    fingerprint = sql().col("fingerprint")
    named = reduce(or_, [fingerprint.startswith(one) & sql().lit(bool(one)) for one in begins])
    label = sql().when(named, fingerprint)
    counted = df.groupBy(label.alias("fingerprint"), "task_name", "source_queue").count().collect()
    good: dict[str, int] = (
        {} if successes is None else dict(successes.groupBy("task_name").count().collect())
    )
    prints = {row[0] for row in counted if row[0] is not None}
    found = []
    for each in begins:
        own = _only(prints, each)
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


def _only(prints: set[str], begins: str) -> str:
    """The only fingerprint that begins so."""
    found = sorted(known for known in prints if known.startswith(begins)) if begins else []
    if begins in found:
        return begins
    if not found:
        raise DLQError(f"expected a fingerprint of these letters, got {begins!r}")
    if len(found) > 1:
        several = ", ".join(found[:5])
        raise DLQError(f"expected one fingerprint to begin with {begins!r}, got several: {several}")
    return found[0]


def _with_sides(df: DataFrame, conditions: Iterable[tuple[Column, Column]]) -> DataFrame:
    """What letters are compared by, as text, and ``sides``, which has a bit for each condition."""
    bits = [
        sql().when(condition, 1 << bit).otherwise(0).cast("bigint")
        for bit, condition in enumerate(chain.from_iterable(conditions))
    ]
    columns = [sql().col(name).cast("string") for name in _COMPARED]
    return df.select(reduce(add, bits).alias("sides"), *columns).where("sides != 0")


def sql() -> Any:
    """PySpark's SQL functions, imported when used."""
    return import_module("pyspark.sql.functions")
