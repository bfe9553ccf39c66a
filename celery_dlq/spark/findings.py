"""A triage that also says why: causes of the largest groups, what is new, floods, look-alikes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.spark import causes
from celery_dlq.spark.lookalikes import COMPARED, MOST_COMPARED, alike
from celery_dlq.spark.report import Triage, ask, rows_of, session_for
from celery_dlq.spark.triage import (
    COLUMNS,
    check_folder,
    limits,
    new_since,
    readable_errors,
    scan,
    spikes,
)
from celery_dlq.spark.triage import successes as successful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST_GROUPS = 3
"""Of so many groups, the largest, `findings` says why, if they have `LEAST_LETTERS`."""

LEAST_LETTERS = 5
MOST_ROWS = 20
MOST_LIMITS = 200

_LONGEST_NEWS = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow:
    """A value that is over-represented in a group; see `celery_dlq.spark.triage.why`."""

    feature: str
    value: str
    against: str
    letters: int
    support: float
    share_of_others: float
    lift: float
    p_value: float
    q_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A cause that appeared or came back; see `celery_dlq.spark.triage.new_since`."""

    fingerprint: str
    kind: str
    letters: int
    first_seen_at: datetime
    last_seen_at: datetime
    gone_since: datetime | None
    task_name: str
    exception_type: str | None
    example_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRow:
    """A flood of letters; see `celery_dlq.spark.triage.spikes`."""

    fingerprint: str
    task_name: str
    bucket_start: datetime
    letters: int
    expected: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarRow:
    """Two causes that look alike; see `celery_dlq.spark.triage.similar`."""

    fingerprint: str
    other_fingerprint: str
    similarity: float
    letters: int
    other_letters: int
    task_name: str
    other_task_name: str
    message: str
    other_message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    """What one delivery of a task's messages is worth; see `celery_dlq.spark.triage.limits`."""

    task_name: str
    delivery: int
    reached: float
    succeeded: float
    died: int
    share: float | None
    cumulative_share: float | None
    advised_max_deliveries: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a folder of letters says, and why.

    Attributes:
        triage: The rows of the plain triage.
        news_from: Since when causes count as new: the last tenth of the letters' time, a
            day at most; ``None``: the letters have no times.
        new: Causes that are new or came back since then.
        spikes: Floods, the strongest first.
        similar: Pairs of causes that look alike.
        causes: For the largest groups, by fingerprint, what their letters have in common.
        limits: Which delivery succeeded, of tasks of which successes are known; empty
            without a sample of successes.
    """

    triage: Triage
    news_from: datetime | None
    new: tuple[NewRow, ...]
    spikes: tuple[SpikeRow, ...]
    similar: tuple[SimilarRow, ...]
    causes: dict[str, tuple[CauseRow, ...]]
    limits: tuple[LimitRow, ...] = ()


def findings(
    path: Path | str,
    spark: SparkSession | None = None,
    *,
    successes: Path | str | None = None,
) -> Findings:
    """Read an exported folder with Spark and answer all questions of the triage.

    Args:
        path: The folder that ``dlq export`` wrote, or a URL that Spark reads.
        spark: The session to use; ``None``: this process's, or a new one on this machine.
        successes: The folder that ``dlq export --successes`` wrote; ``None``: there is none.

    Returns:
        The rows of all answers.

    Raises:
        ExportError: The folder is missing, holds no letters or cannot be read.
        MissingExtra: PySpark or Java is not installed.
        DLQError: Spark did not start.
    """
    size = check_folder(path)
    if successes is not None:
        check_folder(successes)
    with session_for(spark, size) as session, readable_errors(path):
        good = None if successes is None else successful(session, successes)
        columns = dict.fromkeys(
            (*COLUMNS, *causes.COLUMNS, *(["history"] if good is not None else []))
        )
        df = scan(session, path).select(*columns)
        found = ask(session, path, df)
        since = _news_from(found)
        fresh = iter(()) if since is None else rows_of(new_since(df, since).limit(MOST_ROWS))
        floods = rows_of(spikes(df, found.bucket).limit(MOST_ROWS))
        return Findings(
            triage=found,
            news_from=since,
            new=tuple(NewRow(**row) for row in fresh),
            spikes=tuple(SpikeRow(**row) for row in floods),
            similar=_similar(found),
            causes=_causes(df, found, good),
            limits=() if good is None else _limits(df, good),
        )


def _similar(found: Triage) -> tuple[SimilarRow, ...]:
    largest = found.groups[:MOST_COMPARED]
    rows = [{name: getattr(group, name) for name in COMPARED} for group in largest]
    return tuple(SimilarRow(**row) for row in alike(rows)[:MOST_ROWS])


def _causes(
    df: DataFrame, found: Triage, good: DataFrame | None
) -> dict[str, tuple[CauseRow, ...]]:
    """Why the largest groups died, asked of all letters at once."""
    largest = [
        group.fingerprint
        for group in found.groups[:MOST_GROUPS]
        if group.letters >= LEAST_LETTERS and group.fingerprint != "unknown"
    ]
    named: dict[str, list[CauseRow]] = {fingerprint: [] for fingerprint in largest}
    for row in rows_of(causes.why_each(df, largest, good)) if largest else ():
        named[row.pop("fingerprint")].append(CauseRow(**row))
    return {fingerprint: tuple(rows[:MOST_ROWS]) for fingerprint, rows in named.items()}


def _limits(df: DataFrame, good: DataFrame) -> tuple[LimitRow, ...]:
    known = limits(df, good).where("advised_max_deliveries IS NOT NULL")
    return tuple(LimitRow(**row) for row in rows_of(known.limit(MOST_LIMITS)))


def _news_from(found: Triage) -> datetime | None:
    if found.first_seen_at is None or found.last_seen_at is None:
        return None
    span = found.last_seen_at - found.first_seen_at
    return found.last_seen_at - min(span / 10, _LONGEST_NEWS)
