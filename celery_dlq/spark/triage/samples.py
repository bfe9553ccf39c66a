"""What the causes of a triage are explained by: a sample of messages, and exact counts over time.

Spark counts the letters of causes, tasks and queues without reading arguments, and the driver
makes a `SamplePlan` of them: a few rows for each of the `MOST_CAUSES` largest causes. By it Spark
draws messages and counts each cause over time, in rows that are grouped by `SampleUnit`: the
messages of a task are compared with each other. On a cluster a task's causes are several units with
the same messages, so that no executor works alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count as counter
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.causes import SAMPLE
from celery_dlq.letters.comparison import FIELDS, MAX_ARGUMENTS_CHARS, MIN_OTHERS
from celery_dlq.letters.course import MOST_RELEASES, width_for
from celery_dlq.spark.triage.trends import counted, drawn, run_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COMPARED = (*FIELDS.values(), "args_json", "kwargs_json")
COLUMNS = ("id", "fingerprint", "task_name", "dead_lettered_at", *COMPARED)
"""The columns that are read."""

MOST_CAUSES = 500
"""Causes that are explained, the largest ones; smaller ones are compared with, together."""

LEAST_LETTERS, LEAST_SHARE = 20, 0.01
"""A cause with more letters, or with this share of all, is explained."""

BUCKETS, RELEASES, MESSAGE = range(3)
"""The kinds of rows of a unit, in their order."""

_LEAST_SAMPLE = 200
_MOST_MESSAGES = 100_000  # of all causes; of one task and seven arguments they take 320 MB
_MOST_UNITS = 40
_MOST_QUEUES = 10_000  # of all tasks together
_MOST_BUCKETS = 1_000
_HASHES = 2**32
_LEAST_WIDTH = 3600


def _put(text: str, **parts: str) -> str:
    """A query with its parts, which are named in capitals, put in."""
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _query_text(text: str, **parts: str) -> str:
    return _put(text, **parts, **_PARTS)


# A hash of the id draws the same messages whatever the files and partitions are.
DRAW = "crc32(coalesce(id, concat_ws(' ', dead_lettered_at, kwargs_json)))"
_PARTS = {
    # Known by name are at most `MOST_CAUSES`; others may have no name, or no task.
    "MESSAGE": """
        2 AS kind, DRAW AS draw, task_name, unix_micros(dead_lettered_at) / 1e6D AS at,
        release, source_queue, origin, worker_hostname, CAST(retries AS STRING) AS retries,
        IF(length(args_json) > MOST_CHARS, 'too large', args_json) AS args_json,
        IF(length(kwargs_json) > MOST_CHARS, 'too large', kwargs_json) AS kwargs_json
    """,
    "MOST_CHARS": str(MAX_ARGUMENTS_CHARS),
    "DRAW": DRAW,
    "TASK": "coalesce(task_name, 'unknown')",
}
_BEGINS = """
    SELECT start, slice(array_sort(collect_set(fingerprint)), 1, 6) AS fingerprints
    FROM {letters} JOIN {begins} ON startswith(fingerprint, start)
    GROUP BY start
"""
_NUMBERS = "SELECT min(id) FROM range({most}) GROUP BY pmod(hash(CAST(id AS INT)), {units})"
_CAUSES = _query_text("""
    SELECT fingerprint, sum(letters) AS letters, max_by(task, letters) AS task,
           min(first) AS first, max(last) AS last
    FROM (SELECT HINT fingerprint, TASK AS task, sum(stands_for) AS letters,
                 unix_micros(min(first_at)) AS first,
                 unix_micros(max(dead_lettered_at)) AS last
          FROM {letters} CHOSEN WHERE fingerprint IS NOT NULL GROUP BY 1, 2)
    GROUP BY fingerprint ORDER BY letters DESC, fingerprint LIMIT {most}
""")
_QUEUES = _query_text("""
    SELECT HINT TASK AS task, source_queue AS queue, sum(stands_for) AS letters
    FROM {letters} CHOSEN
    GROUP BY 1, 2 ORDER BY letters DESC, task, queue LIMIT {most}
""")
_CHOSEN = "LEFT SEMI JOIN {named} AS named ON COLUMN = named.name"
_COLUMNS = {"cause": "fingerprint", "task": _query_text("TASK"), "queue": "source_queue"}
_OF_TASK = _query_text("""
    SELECT unit, coalesce(fingerprint, 'unknown') AS cause, MESSAGE
    FROM (SELECT /*+ BROADCAST(causes), BROADCAST(tasks) */ letters.*,
                 coalesce(causes.unit, tasks.unit) AS unit,
                 IF(causes.unit IS NULL, tasks.below, causes.below) AS below
          FROM {letters} AS letters
          LEFT JOIN {causes} AS causes ON fingerprint = causes.cause
          LEFT JOIN {tasks} AS tasks ON causes.cause IS NULL AND TASK = tasks.task)
    WHERE DRAW < below
""")
_OF_QUEUE = _query_text("""
    SELECT /*+ BROADCAST(queues) */ unit, coalesce(fingerprint, 'unknown') AS cause, MESSAGE
    FROM {letters}
    JOIN {queues} AS queues ON source_queue = queues.queue AND TASK <> queues.task
    WHERE DRAW < below
""")
_SUCCEEDED = _query_text("""
    SELECT /*+ BROADCAST(tasks) */ unit, CAST(NULL AS STRING) AS cause, MESSAGE
    FROM {letters} JOIN {tasks} AS tasks ON TASK = tasks.task
    WHERE DRAW < below
""")
# The letters of each cause by a value, as JSON, in rows with the columns of messages.
_COUNTS = """
    SELECT unit, cause, KIND AS kind, 0L AS draw, CAST(NULL AS STRING) AS task_name,
           CAST(NULL AS DOUBLE) AS at, NOTHING,
           to_json(collect_list(struct(value, letters, first, last))) AS kwargs_json
    FROM (SELECT *, row_number() OVER (PARTITION BY unit, cause ORDER BY letters DESC, value)
                    AS place
          FROM (SELECT /*+ BROADCAST(causes) */ causes.unit, causes.cause, VALUE AS value,
                       sum(stands_for) AS letters,
                       unix_micros(min(first_at)) / 1e6D AS first,
                       unix_micros(max(dead_lettered_at)) / 1e6D AS last
                FROM {letters} JOIN {causes} AS causes ON fingerprint = causes.cause
                WHERE dead_lettered_at IS NOT NULL AND VALUE IS NOT NULL
                GROUP BY 1, 2, 3))
    WHERE place <= {most}
    GROUP BY unit, cause
"""
_NOTHING = ", ".join(f"CAST(NULL AS STRING) AS {name}" for name in COMPARED[:-1])
_IN_BUCKET = "floor(unix_micros(dead_lettered_at) / 1e6D / width)"
_OVER_TIME = _query_text(_COUNTS, KIND=str(BUCKETS), VALUE=_IN_BUCKET, NOTHING=_NOTHING)
_BY_RELEASE = _query_text(_COUNTS, KIND=str(RELEASES), VALUE="release", NOTHING=_NOTHING)


class CountedCause(NamedTuple):
    """A cause whose letters are counted; ``first`` and ``last`` are microseconds since 1970."""

    fingerprint: str
    letters: int
    task: str
    first: int | None
    last: int | None
    least: int = 1  # Seconds of a bucket at least: summaries of days count by hours

    @property
    def width(self) -> int:
        """Seconds of a bucket of its course."""
        if self.first is None or self.last is None:
            return max(self.least, width_for(0))
        return max(self.least, width_for((self.last - self.first) / 1e6))


class SampleUnit(NamedTuple):
    """Causes that one task of Spark explains, all by the same messages."""

    number: int
    causes: tuple[str, ...]


class NearQueue(NamedTuple):
    """A queue of a task with few others; ``below`` is the limit of the hash."""

    unit: int
    task: str
    queue: str
    below: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """Which letters are looked at, and where: a few rows for each cause."""

    wanted: tuple[CountedCause, ...]  # The causes to explain
    known: tuple[CountedCause, ...]  # Those as well that they are compared with
    # By task: its causes to explain, split into as many units as work side by side
    units: Mapping[str, Sequence[SampleUnit]]
    smaller: Mapping[str, int]  # Letters of causes that are not known, by task
    near: tuple[NearQueue, ...]
    successes: Mapping[str, int]  # Messages that succeeded, by task
    ends_at: float | None  # The last letter's time

    @property
    def sample(self) -> int:
        """Letters of each cause that are looked at."""
        return _share_of_messages(len(self.known))


def plan_of(
    df: DataFrame, fingerprints: Sequence[str] | None, successes: DataFrame | None
) -> SamplePlan:
    """Choose causes, by the beginnings of their fingerprints or by their number of letters."""
    totals = ("coalesce(sum(stands_for), 0)", "unix_micros(max(dead_lettered_at))")
    total, last = counted(df).selectExpr(*totals).collect()[0]
    if fingerprints is None:
        known = _largest_causes(df)
        wanted = [
            one
            for one in known
            if one.letters > LEAST_LETTERS or one.letters >= LEAST_SHARE * total
        ]
    else:
        names = _resolved(df, fingerprints)
        own = {one.fingerprint: one for one in _largest_causes(df, "cause", names)}
        wanted = [own[name] for name in dict.fromkeys(names)]
        others = _largest_causes(df, "task", {one.task for one in wanted})
        known = [*wanted, *(one for one in others if one.fingerprint not in own)][:MOST_CAUSES]
    partitions = str(df.sparkSession.conf.get("spark.sql.shuffle.partitions"))
    # Databricks knows "auto".
    units = _make_units(wanted, int(partitions) if partitions.isdecimal() else _MOST_UNITS)
    units = _spread_units(df, units)
    queues = _task_queues(df, "task", units)
    letters = _by_task(queues)
    lonely = {one.task for one in wanted if letters[one.task] - one.letters < MIN_OTHERS}
    for one in known:
        letters[one.task] -= one.letters
    return SamplePlan(
        wanted=tuple(wanted),
        known=tuple(one for one in known if one.task in units),
        units=units,
        smaller=letters,
        near=tuple(_near_queues(df, lonely, units, queues)),
        successes={} if successes is None else _by_task(_task_queues(successes, "task", units)),
        ends_at=None if last is None else last / 1e6,
    )


def _make_units(wanted: Sequence[CountedCause], partitions: int) -> dict[str, list[SampleUnit]]:
    """Each task's causes, in parts if there are more partitions than tasks."""
    of_task: defaultdict[str, list[str]] = defaultdict(list)
    for one in wanted:
        of_task[one.task].append(one.fingerprint)
    most = len(wanted)
    if partitions > len(of_task):
        most = ceil(len(wanted) / min(partitions, _MOST_UNITS))
    units: defaultdict[str, list[SampleUnit]] = defaultdict(list)
    numbers = counter()
    for task, causes in sorted(of_task.items()):
        for first in range(0, len(causes), most):
            units[task].append(SampleUnit(next(numbers), tuple(causes[first : first + most])))
    return dict(units)


def _spread_units(
    df: DataFrame, units: Mapping[str, Sequence[SampleUnit]]
) -> dict[str, list[SampleUnit]]:
    """The units with numbers that Spark's hash puts into a partition each."""
    total = sum(map(len, units.values()))
    if total == len(units):
        return {task: list(parts) for task, parts in units.items()}
    rows = run_sql(_NUMBERS, df, most=40 * total, units=total).collect()
    numbers = iter([int(row[0]) for row in rows])
    return {
        task: [SampleUnit(next(numbers, part.number + 40 * total), part.causes) for part in parts]
        for task, parts in units.items()
    }


def _resolved(df: DataFrame, begins: Sequence[str]) -> list[str]:
    rows = run_sql(_BEGINS, df, begins=_frame_of(df, "start STRING", [(one,) for one in begins]))
    found: dict[str, list[str]] = dict(rows.collect())
    return [_only_fingerprint(found.get(one, []) if one else [], one) for one in begins]


def _only_fingerprint(found: Sequence[str], begins: str) -> str:
    """The only fingerprint that begins so."""
    if begins in found:
        return begins
    if not found:
        raise DLQError(f"expected a fingerprint of these letters, got {begins!r}")
    if len(found) > 1:
        several = ", ".join(found[:5])
        raise DLQError(f"expected one fingerprint to begin with {begins!r}, got several: {several}")
    return found[0]


def _largest_causes(
    df: DataFrame, column: str = "", names: Iterable[str] = ()
) -> list[CountedCause]:
    """The largest causes, of all letters or of those whose cause or task has one of the names."""
    rows = _ask_rows(_CAUSES, df, column, names, MOST_CAUSES)
    least = _LEAST_WIDTH if "stands_for" in df.columns else 1
    return [CountedCause(*row)._replace(least=least) for row in rows]


def _task_queues(
    df: DataFrame, column: str, names: Iterable[str]
) -> list[tuple[str, str | None, int]]:
    """Tasks and source queues with their numbers of messages."""
    return [tuple(row) for row in _ask_rows(_QUEUES, df, column, names, _MOST_QUEUES)]


def _ask_rows(query: str, df: DataFrame, column: str, names: Iterable[str], most: int) -> list[Any]:
    if not column:
        return run_sql(_put(query, HINT="", CHOSEN=""), df, most=most).collect()
    chosen = _CHOSEN.replace("COLUMN", _COLUMNS[column])
    query = _put(query, HINT="/*+ BROADCAST(named) */", CHOSEN=chosen)
    named = _frame_of(df, "name STRING", [(one,) for one in names])
    return run_sql(query, df, named=named, most=most).collect()


def _by_task(queues: Iterable[tuple[str, str | None, int]]) -> Counter[str]:
    letters: Counter[str] = Counter()
    for task, _queue, count in queues:
        letters[task] += count
    return letters


def _near_queues(
    df: DataFrame,
    lonely: Collection[str],
    units: Mapping[str, Sequence[SampleUnit]],
    queues: Iterable[tuple[str, str | None, int]],
) -> Iterator[NearQueue]:
    """The queues of tasks with few others."""
    theirs = [(task, queue) for task, queue, _ in queues if task in lonely and queue is not None]
    if not theirs:
        return
    letters: defaultdict[str, int] = defaultdict(int)
    for _task, queue, count in _task_queues(df, "queue", {queue for _task, queue in theirs}):
        letters[queue or ""] += count
    sample = _share_of_messages(len(theirs))
    for task, queue in theirs:
        for unit in units[task]:
            yield NearQueue(unit.number, task, queue, _sample_limit(sample, letters[queue]))


def rows_of_units(df: DataFrame, plan: SamplePlan, successes: DataFrame | None) -> DataFrame:
    """The rows by which causes are explained, with their ``unit``."""
    known = [
        (one.fingerprint, unit.number, _sample_limit(plan.sample, one.letters), one.width)
        for one in plan.known
        for unit in plan.units[one.task]
    ]
    causes = _frame_of(df, "cause STRING, unit INT, below BIGINT, width BIGINT", known)
    parts = [
        run_sql(
            _OF_TASK,
            drawn(df),
            causes=causes,
            tasks=_task_messages(df, plan, plan.smaller, plan.sample),
        ),
        run_sql(_OVER_TIME, df, causes=causes, most=_MOST_BUCKETS),
        run_sql(_BY_RELEASE, df, causes=causes, most=MOST_RELEASES),
    ]
    if plan.near:
        queues = _frame_of(df, "unit INT, task STRING, queue STRING, below BIGINT", plan.near)
        parts.append(run_sql(_OF_QUEUE, drawn(df), queues=queues))
    if successes is not None:
        tasks = _task_messages(df, plan, plan.successes, _share_of_messages(len(plan.units)))
        parts.append(run_sql(_SUCCEEDED, successes, tasks=tasks))
    return reduce(lambda one, other: one.unionAll(other), parts)


def _task_messages(
    df: DataFrame, plan: SamplePlan, messages: Mapping[str, int], sample: int
) -> DataFrame:
    rows = [
        (task, unit.number, _sample_limit(sample, messages.get(task, 0)))
        for task, units in plan.units.items()
        for unit in units
    ]
    return _frame_of(df, "task STRING, unit INT, below BIGINT", rows)


def _share_of_messages(parts: int) -> int:
    return max(_LEAST_SAMPLE, min(SAMPLE, _MOST_MESSAGES // max(1, parts)))


def _sample_limit(sample: int, messages: int) -> int:
    """The limit of the hash that draws a sample; four standard deviations more, to be cut."""
    return min(_HASHES, int(_HASHES * most_drawn(sample) / max(1, messages)))


def most_drawn(sample: int) -> float:
    """How many messages are drawn, so that there are as many as are looked at."""
    return sample + 4 * sqrt(sample)


def _frame_of(df: DataFrame, schema: str, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return df.sparkSession.createDataFrame([tuple(row) for row in rows], schema)
