"""The answers of the package to the letters of a folder: by Spark, or by the core alone."""

from __future__ import annotations

import atexit
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.planted.folders import Expected
from benchmarks.planted.judging import Verdict, claims_of, judge
from benchmarks.planted.truths import SAMPLE

from celery_dlq.letters.causes import ComparedMessage, explain_causes
from celery_dlq.letters.comparison import MIN_OTHERS, pairs_of
from celery_dlq.letters.course import Course, Moment

_COLUMNS = (
    *("id", "fingerprint", "task_name", "source_queue", "dead_lettered_at", "release", "origin"),
    *("worker_hostname", "retries", "args_json", "kwargs_json"),
)


def timed(
    folder: Path, ask: Callable[[Path], dict[str, Any]]
) -> tuple[float, list[tuple[str, Verdict]]]:
    """Ask of a folder that `benchmarks.planted.folders` wrote, and judge each answer."""
    begun = time.perf_counter()
    answers = ask(folder)
    seconds = time.perf_counter() - begun
    found = []
    for name, expected in Expected.read(folder).items():
        if expected.wanted:
            claims = claims_of(answers[name]) if name in answers else ()
            found.append((expected.kind, judge(expected, claims)))
    return seconds, found


def by_spark(folder: Path) -> dict[str, Any]:
    """Explain all causes that are wanted by the triage, in one session for all folders."""
    from celery_dlq.spark.triage import letters, successes
    from celery_dlq.spark.triage.causes import explanations_of

    spark = _session()
    good = folder / "successes"
    sample = successes(spark, good) if good.exists() else None
    return dict(explanations_of(letters(spark, folder / "letters"), None, sample))


@cache
def _session() -> Any:
    from celery_dlq.spark.session import local_session

    spark = local_session("planted causes")
    atexit.register(spark.stop)
    return spark


def by_core(folder: Path) -> dict[str, Any]:
    """Explain all causes that are wanted, in this process, without Spark."""
    wanted = {name for name, one in Expected.read(folder).items() if one.wanted}
    courses, drawn, queues = _read(folder / "letters")
    good = _read(folder / "successes")[1] if (folder / "successes").exists() else {}
    tasks: dict[str, list[ComparedMessage]] = defaultdict(list)
    for messages in (*drawn.values(), *good.values()):
        tasks[messages[0].task] += messages
    ends_at = max(one.last_at or 0 for one in courses.values())
    found: dict[str, Any] = {}
    for task, messages in tasks.items():
        mine = {one.cause for one in messages if one.cause is not None} & wanted
        for name in mine:
            others = sum(one.cause != name for one in messages)
            unit = messages
            if others < MIN_OTHERS:
                beside = {
                    each for queue in queues[name] for each in queues if queue in queues[each]
                }
                unit = messages + [
                    one for each in beside for one in drawn[each] if one.task != task
                ]
                found |= explain_causes(unit, courses, {name}, ends_at=ends_at)
                mine = mine - {name}
        if mine:
            found |= explain_causes(messages, courses, mine, ends_at=ends_at)
    return found


def _read(
    folder: Path,
) -> tuple[dict[str, Course], dict[str, list[ComparedMessage]], dict[str, set[str]]]:
    """The course of each cause, a sample of its letters, and its queues."""
    import pyarrow.dataset as ds

    table = ds.dataset(folder, format="parquet").to_table(columns=list(_COLUMNS))
    found: dict[str, Course] = {}
    drawn: dict[str, list[ComparedMessage]] = {}
    queues: dict[str, set[str]] = {}
    import pyarrow.compute as pc

    key = pc.coalesce(
        table["fingerprint"], pc.binary_join_element_wise("=", table["task_name"], "")
    )
    for name in pc.unique(key).to_pylist():
        rows = table.filter(pc.equal(key, name))
        at = [one / 1e6 for one in pc.cast(rows["dead_lettered_at"], "int64").to_pylist()]
        moments = map(Moment, at, rows["release"].to_pylist())
        found[name] = Course.of(moments)
        sample = rows.sort_by("id").slice(0, SAMPLE).to_pylist()
        drawn[name] = [_message(row) for row in sample]
        queues[name] = set(pc.unique(rows["source_queue"]).to_pylist())
    return found, drawn, queues


def _message(row: dict[str, Any]) -> ComparedMessage:
    # Without its task, which follows from the cause.
    names = [name for name in _COLUMNS if name != "task_name" and row[name] is not None]
    texts = {name: str(row[name]) for name in names}
    return ComparedMessage(
        cause=row["fingerprint"],
        task=row["task_name"],
        queue=row["source_queue"],
        at=row["dead_lettered_at"].timestamp(),
        pairs=frozenset(pairs_of(texts.get)),
    )
