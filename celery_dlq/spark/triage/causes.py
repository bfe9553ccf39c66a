"""The explanations of causes: what their letters share, and what others have less often.

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
from celery_dlq.letters.causes import SAMPLE, ComparedMessage, explain_causes
from celery_dlq.letters.comparison import ALPHA, TASK, FeatureValue, pairs_of
from celery_dlq.letters.course import Course
from celery_dlq.letters.explanation import Explanation
from celery_dlq.spark.triage.again import again_of
from celery_dlq.spark.triage.samples import (
    BUCKETS,
    MESSAGE,
    RELEASES,
    CountedCause,
    SamplePlan,
    plan_of,
    rows_of_units,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    df: DataFrame, plan: SamplePlan, successes: DataFrame | None, alpha: float = ALPHA
) -> DataFrame:
    """The fingerprint of each wanted cause, and its explanation as JSON."""
    asked = TaskInput(
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


class TaskInput(NamedTuple):
    """What a task of Spark has to know of all units."""

    known: Mapping[str, CountedCause]
    wanted: Mapping[int, Sequence[str]]  # By unit
    sample: int
    ends_at: float | None
    alpha: float


def explained_units(asked: TaskInput, batches: Iterable[Any]) -> Iterator[Any]:
    """Explain the wanted causes of each unit, whose rows follow each other."""
    import pyarrow as pa  # noqa: PLC0415 - where tasks run

    rows = (row for batch in batches for row in batch.to_pylist())
    for number, of_unit in groupby(rows, itemgetter("unit")):
        unit = _Unit(asked, asked.wanted[number])
        for row in of_unit:
            unit.add_row(row)
        found = unit.explained()
        if found:
            texts = [json.dumps(one.to_json()) for one in found.values()]
            columns = [pa.array(list(column), pa.string()) for column in (found, texts)]
            yield pa.record_batch(columns, names=["fingerprint", "explanation"])


class _Unit:
    """The messages of a task and the courses of its causes."""

    def __init__(self, asked: TaskInput, wanted: Sequence[str]) -> None:
        self._asked = asked
        self._wanted = wanted
        self._messages: list[ComparedMessage] = []
        self._drawn: Counter[str | None] = Counter()
        self._courses: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._pairs: dict[FeatureValue, FeatureValue] = {}  # one object for equal pairs

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take a row: of the hash's smallest, as many messages of a cause as are looked at."""
        cause = row["cause"]
        if row["kind"] != MESSAGE:
            self._courses[cause][row["kind"]] = json.loads(row["kwargs_json"])
        elif self._drawn[cause] < (SAMPLE if cause is None else self._asked.sample):
            self._drawn[cause] += 1
            same = self._pairs.setdefault
            self._messages.append(
                ComparedMessage(
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
            cause: _course_of(known, self._courses[cause])
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


def _course_of(known: CountedCause, counted: Mapping[int, Any]) -> Course:
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
