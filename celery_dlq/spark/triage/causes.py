"""The question why: what the letters of a cause share, and what others have less often.

Messages are a sample, and counts over time are exact: see `celery_dlq.spark.triage.samples`. On the
executors `celery_dlq.letters.causes` explains the causes of a unit, as it does for
``dlq differences``. The driver gets the explanations, some KB each.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.causes import SAMPLE, Message, explain_causes
from celery_dlq.letters.comparison import ALPHA, TASK, Pair, pairs_of
from celery_dlq.letters.course import Course
from celery_dlq.letters.explanation import Explanation
from celery_dlq.spark.triage.again import again_of
from celery_dlq.spark.triage.samples import (
    BUCKETS,
    MESSAGE,
    RELEASES,
    Known,
    Plan,
    plan_of,
    rows_of_units,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def why(
    df: DataFrame,
    fingerprint: str,
    successes: DataFrame | None = None,
    *,
    alpha: float = ALPHA,
) -> DataFrame:
    """Explain the letters of one cause: what all share, and what others have less often.

    See `celery_dlq.letters.causes` for what is compared, and how. At most 2,000 letters of each
    cause of the task are looked at, and 2,000 messages that succeeded; counts over time are of all
    letters. This package explains them on the executors, which need pyarrow.

    A finding is a correlation: a host that got all the bad orders is found as well as the
    orders.

    Returns:
        A row for each value that all letters have, then one for each finding, which has the side
        in ``against``, then a row for each sentence that has only ``letters`` and ``text``: with
        what they were compared, and what that leaves open. Only where everything was compared is
        it said that nothing stands out.

    Raises:
        DLQError: No fingerprint, or more than one, begins with ``fingerprint``, or ``alpha`` is not
            between 0 and 1.
    """
    found = why_each(df, [fingerprint], successes, alpha)
    rows = [tuple(row.values()) for row in found]
    return df.sparkSession.createDataFrame(rows, _DDL).drop("fingerprint").coalesce(1)


_DDL = (
    "fingerprint STRING, feature STRING, value STRING, against STRING, letters BIGINT, "
    "support DOUBLE, share_of_others DOUBLE, lift DOUBLE, p_value DOUBLE, q_value DOUBLE, "
    "text STRING"
)


def why_each(
    df: DataFrame,
    fingerprints: Sequence[str],
    successes: DataFrame | None = None,
    alpha: float = ALPHA,
) -> list[dict[str, Any]]:
    """Answer `why` for several causes in one pass over the letters."""
    found = explanations_of(df, fingerprints, successes, alpha)
    return [row for fingerprint, one in found.items() for row in _rows(fingerprint, one)]


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


def explanations_of(
    df: DataFrame,
    fingerprints: Sequence[str] | None = None,
    successes: DataFrame | None = None,
    alpha: float = ALPHA,
) -> dict[str, Explanation]:
    """The explanations of causes by their fingerprints, in the order asked for.

    Without ``fingerprints``, of all causes with more than 20 letters or 1 % of all, the 500
    largest, the largest first.
    """
    if not 0 < alpha < 1:
        raise DLQError(f"expected alpha between 0 and 1, got {alpha}")
    plan = plan_of(df, fingerprints, successes)
    if not plan.wanted:
        return {}
    found: dict[str, str] = dict(explained(df, plan, successes, alpha).collect())
    again = again_of(df, successes)
    return {
        one.fingerprint: replace(
            Explanation.from_json(json.loads(found[one.fingerprint])),
            again=again.get(one.fingerprint),
        )
        for one in plan.wanted
        if one.fingerprint in found
    }


def explained(
    df: DataFrame, plan: Plan, successes: DataFrame | None, alpha: float = ALPHA
) -> DataFrame:
    """The fingerprint of each wanted cause, and its explanation as JSON."""
    asked = Asked(
        known={one.fingerprint: one for one in plan.known},
        wanted={unit.number: unit.causes for units in plan.units.values() for unit in units},
        sample=plan.sample,
        ends_at=plan.ends_at,
        # Together the units may err as often as one.
        alpha=alpha / len(plan.units),
    )
    rows = rows_of_units(df, plan, successes)
    tasks = len(asked.wanted)  # of Spark
    rows = rows.repartition(tasks, "unit").sortWithinPartitions("unit", "kind", "draw", "cause")
    return rows.mapInArrow(
        partial(explained_units, asked), "fingerprint STRING, explanation STRING"
    )


class Asked(NamedTuple):
    """What a task of Spark has to know of all units."""

    known: Mapping[str, Known]
    wanted: Mapping[int, Sequence[str]]  # By unit
    sample: int
    ends_at: float | None
    alpha: float


def explained_units(asked: Asked, batches: Iterable[Any]) -> Iterator[Any]:
    """Explain the wanted causes of each unit, whose rows follow each other."""
    import pyarrow as pa  # noqa: PLC0415 - where tasks run

    rows = (row for batch in batches for row in batch.to_pylist())
    for number, of_unit in groupby(rows, itemgetter("unit")):
        unit = _Unit(asked, asked.wanted[number])
        for row in of_unit:
            unit.add(row)
        found = unit.explained()
        if found:
            texts = [json.dumps(one.to_json()) for one in found.values()]
            columns = [pa.array(list(column), pa.string()) for column in (found, texts)]
            yield pa.record_batch(columns, names=["fingerprint", "explanation"])


class _Unit:
    """The messages of a task and the courses of its causes."""

    def __init__(self, asked: Asked, wanted: Sequence[str]) -> None:
        self._asked = asked
        self._wanted = wanted
        self._messages: list[Message] = []
        self._drawn: Counter[str | None] = Counter()
        self._courses: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._pairs: dict[Pair, Pair] = {}  # one object for equal pairs

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row: of the hash's smallest, as many messages of a cause as are looked at."""
        cause = row["cause"]
        if row["kind"] != MESSAGE:
            self._courses[cause][row["kind"]] = json.loads(row["kwargs_json"])
        elif self._drawn[cause] < (SAMPLE if cause is None else self._asked.sample):
            self._drawn[cause] += 1
            same = self._pairs.setdefault
            self._messages.append(
                Message(
                    cause=cause,
                    task=row["task_name"] or "unknown",
                    queue=row["source_queue"] or "",
                    at=row["at"],
                    # Without the task: it follows from the cause.
                    pairs=frozenset(
                        same(pair, pair) for pair in pairs_of(row.get) if pair[0] != TASK
                    ),
                )
            )

    def explained(self) -> dict[str, Explanation]:
        """The explanations of the causes of this unit."""
        courses = {
            cause: _course(known, self._courses[cause])
            for cause, known in self._asked.known.items()
            if cause in self._drawn
        }
        return explain_causes(
            self._messages,
            courses,
            [cause for cause in self._wanted if cause in self._drawn],
            ends_at=self._asked.ends_at,
            alpha=self._asked.alpha,
        )


def _course(known: Known, counted: Mapping[int, Any]) -> Course:
    return Course(
        letters=known.letters,
        first_at=None if known.first is None else known.first / 1e6,
        last_at=None if known.last is None else known.last / 1e6,
        width=known.width,
        buckets={one["value"]: one["letters"] for one in counted.get(BUCKETS, ())},
        releases={
            one["value"]: (one["letters"], one["first"], one["last"])
            for one in counted.get(RELEASES, ())
        },
    )
