"""The question why: what the letters of a cause share, and what is more frequent than in others.

Every value of every argument is a candidate, and so are release, queue, origin, host and retries.
Tasks of Spark parse letters and count their values, in the cause and on each side that it is
compared with. Spark adds the counts up, and on the driver `celery_dlq.letters.explanation` makes
the answer of them, as it does for ``dlq differences``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import add, or_
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.comparison import (
    ALPHA,
    FIELDS,
    LEAST,
    MIN_OTHERS,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    UNREAD,
    Pair,
    pairs_of,
)
from celery_dlq.letters.explanation import Explanation, Side, explain

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_COMPARED = (*FIELDS.values(), "args_json", "kwargs_json")
COLUMNS = ("fingerprint", "task_name", *_COMPARED)
"""The columns that `why` reads."""

_DDL = (
    "fingerprint STRING, feature STRING, value STRING, against STRING, letters BIGINT, "
    "support DOUBLE, share_of_others DOUBLE, lift DOUBLE, p_value DOUBLE, q_value DOUBLE, "
    "text STRING"
)
_MOST_COUNTED = 100_000  # values that a task holds, at most 50 MB
# Letters of each cause and side, by the bits of ``sides``.
_SUMS = """
    SELECT feature, value, SUMS FROM {counted}
    GROUP BY feature, value HAVING sum(letters) >= {least} OR feature = {unread}
"""


def why(
    df: DataFrame,
    fingerprint: str,
    successes: DataFrame | None = None,
    *,
    alpha: float = ALPHA,
) -> DataFrame:
    """Explain the letters of one cause: what all share, and what others have less often.

    The letters are compared with the other letters of the same tasks and, if these are fewer than
    20, with the other letters of their queues, by host and release only: all else follows from the
    task. And with messages that succeeded, if given; there the number of retries says nothing. An
    argument's values are compared among the messages that have the argument. Spark counts the
    letters at once, by this package on the executors, and the driver tests the counts: the 2,000
    values of each comparison that stand out most; the others count as tests without a finding. A
    value is a finding if its two shares differ by a tenth or more, beyond chance.

    A finding is a correlation: a host that got all the bad orders is found as well as the
    orders.

    Returns:
        A row for each value that all letters have, then one for each finding, which has the side
        in ``against``, then a row for each sentence that has only ``letters`` and ``text``: with
        what they were compared, and what that leaves open. Only where everything was compared is
        it said that nothing stands out.
    """
    found = why_each(df, [fingerprint], successes, alpha)
    rows = [tuple(row.values()) for row in found]
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
    causes = causes_of(df, fingerprints, successes)
    found = explanations_of(df, causes, successes, alpha)
    return [row for fingerprint, one in found.items() for row in _rows(fingerprint, one)]


def explanations_of(
    df: DataFrame, causes: Sequence[Cause], successes: DataFrame | None, alpha: float = ALPHA
) -> dict[str, Explanation]:
    """The explanation of each cause, by its fingerprint; `why_each` describes them."""
    rows = sums_of(df, causes, successes).collect()
    columns = iter(range(2, 2 + sum(1 + len(one.sides) for one in causes)))

    def counts() -> Counter[Pair]:
        at = next(columns)
        return Counter({(row[0], row[1]): row[at] for row in rows if row[at]})

    return {
        one.fingerprint: explain(
            counts(),
            one.letters,
            [Side(side.against, side.messages, counts()) for side in one.sides],
            alpha=alpha,
        )
        for one in causes
    }


def _rows(fingerprint: str, found: Explanation) -> Iterator[dict[str, Any]]:
    """The rows of `why`: shared values, findings, sentences."""

    def row(text: str, **values: Any) -> dict[str, Any]:
        names = (part.split()[0] for part in _DDL.split(", "))
        known = {"fingerprint": fingerprint, "letters": found.letters, "text": text, **values}
        return {name: known.get(name) for name in names}

    for shared in found.shared:
        share = shared.others / shared.of_others if shared.of_others else None
        yield row(
            f"All {found.letters:,} letters have {shared.text}.",
            feature=shared.feature,
            value=shared.value,
            support=1.0,
            share_of_others=share,
        )
    for one in found.findings:
        yield row(
            found.text(one),
            feature=one.feature,
            value=one.value,
            against=one.against,
            letters=one.letters,
            support=one.share_here,
            share_of_others=one.share_elsewhere,
            lift=one.lift,
            p_value=one.p_value,
            q_value=one.q_value,
        )
    for text in found.sentences[bool(found.shared) :]:
        yield row(text)


def sums_of(df: DataFrame, causes: Sequence[Cause], successes: DataFrame | None) -> DataFrame:
    """The messages with each value, of each cause and each of its sides, in one pass."""
    letters = _with_sides(df, [each for one in causes for each in one.of_letters()])
    if successes is not None:
        good = _with_sides(successes, [each for one in causes for each in one.of_successes()])
        letters = letters.unionAll(good)
    counted = letters.mapInArrow(
        counts_of, "sides BIGINT, feature STRING, value STRING, letters BIGINT"
    )
    sums = ", ".join(
        f"sum(letters * (shiftright(sides, {bit}) & 1))"
        for bit in range(sum(1 + len(one.sides) for one in causes))
    )
    # What all letters of a small cause share has few messages.
    least = min([LEAST, *(one.letters for one in causes)])
    query = _SUMS.replace("SUMS", sums)
    return df.sparkSession.sql(query, counted=counted, least=least, unread=UNREAD[0])


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


class Others(NamedTuple):
    """A side that a cause is compared with, and how many messages it has.

    ``names`` are those of their tasks or queues.
    """

    against: str
    names: list[str]
    messages: int


@dataclass(frozen=True, slots=True)
class Cause:
    """The letters of a fingerprint, and the sides that they are compared with."""

    fingerprint: str
    letters: int
    sides: tuple[Others, ...]

    def of_letters(self) -> Iterator[Column]:
        """Conditions: a letter is of the cause; it is of each side."""
        own = sql().col("fingerprint").eqNullSafe(self.fingerprint)
        yield own
        for side in self.sides:
            if side.against == SUCCESSES:
                yield sql().lit(False)  # noqa: FBT003 - a value
            else:
                name = "task_name" if side.against == SAME_TASKS else "source_queue"
                yield ~own & sql().col(name).isin(side.names)

    def of_successes(self) -> Iterator[Column]:
        """The same conditions for a message that succeeded."""
        yield sql().lit(False)  # noqa: FBT003 - a value
        for side in self.sides:
            if side.against == SUCCESSES:
                yield sql().col("task_name").isin(side.names)
            else:
                yield sql().lit(False)  # noqa: FBT003 - a value


def causes_of(df: DataFrame, begins: Sequence[str], successes: DataFrame | None) -> list[Cause]:
    """Find the causes and count their sides: one job for letters, one for successes."""
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
        same = sum(row[3] for row in others if row[1] in tasks)
        sides = [Others(SAME_TASKS, tasks, same)]
        if same < MIN_OTHERS:
            near = sum(row[3] for row in others if row[2] in queues)
            sides.append(Others(SAME_QUEUES, queues, near))
        if successes is not None:
            succeeded = sum(good.get(task, 0) for task in tasks)
            sides.append(Others(SUCCESSES, tasks, succeeded))
        found.append(Cause(own, sum(row[3] for row in rows), tuple(sides)))
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


def _with_sides(df: DataFrame, conditions: Sequence[Column]) -> DataFrame:
    """What letters are compared by, as text, and ``sides``, which has a bit for each condition."""
    bits = [
        sql().when(condition, 1 << bit).otherwise(0).cast("bigint")
        for bit, condition in enumerate(conditions)
    ]
    columns = [sql().col(name).cast("string") for name in _COMPARED]
    return df.select(reduce(add, bits).alias("sides"), *columns).where("sides != 0")


def sql() -> Any:
    """PySpark's SQL functions, imported when used."""
    return import_module("pyspark.sql.functions")
