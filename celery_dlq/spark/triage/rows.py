"""The triage of an exported folder as plain Python values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dlq.errors import ExportError
from celery_dlq.letters.printable import get_logger, url_without_secrets
from celery_dlq.letters.record import from_micros, iso
from celery_dlq.spark.session import session_and_start
from celery_dlq.spark.triage.against import ComparedPeriod, RateChanges
from celery_dlq.spark.triage.causes import explanations_of
from celery_dlq.spark.triage.questions import (
    COLUMNS,
    check_folder,
    deliveries_before_death,
    groups,
    limits,
    not_letters,
    overview,
    reasons,
    scan,
    timeline,
)
from celery_dlq.spark.triage.questions import successes as successful
from celery_dlq.spark.triage.samples import COLUMNS as WHY_COLUMNS
from celery_dlq.spark.triage.samples import MOST_CAUSES
from celery_dlq.spark.triage.selection import EVERYTHING, Selection, is_remote
from celery_dlq.spark.triage.summaries import SUMMARIES, summarized
from celery_dlq.spark.triage.trends import (
    bucket_for,
    bucket_width,
    largest_new_since,
    run_sql,
    spikes,
)
from celery_dlq.spark.triage.unreadable import java_errors, no_letters, readable_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from celery_dlq.letters.explanation import Explanation

logger = get_logger("celery_dlq.spark")
T = TypeVar("T")

EARLIEST = datetime(1, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
"""The first and last time of Python's calendar."""

MAX_GROUPS = MOST_CAUSES
"""The largest causes that a triage shows; it counts all."""

MAX_ROWS = 20
UNKNOWN = "unknown"  # The fingerprint of what has none

MOST_DRAWN = 50
"""The largest causes whose letters are counted over time, for the page."""

Row = SimpleNamespace
"""One row of an answer; its attributes are the columns that the question's docstring names."""

_STRONGEST = """
    SELECT fingerprint, task_name, bucket_start, letters, expected, score
    FROM (SELECT *, row_number() OVER (PARTITION BY fingerprint ORDER BY score DESC, bucket_start)
                    AS place
          FROM {letters})
    WHERE place = 1
    ORDER BY score DESC, bucket_start, fingerprint LIMIT {most}
"""
_OF_LARGEST = """
    WITH largest AS (
        SELECT coalesce(fingerprint, 'unknown') AS name
        FROM {letters} GROUP BY 1 ORDER BY sum(stands_for) DESC, name LIMIT {most})
    SELECT /*+ BROADCAST(largest) */ letters.*
    FROM {letters} AS letters
    LEFT SEMI JOIN largest ON coalesce(letters.fingerprint, 'unknown') = largest.name
"""
_OVER_TIME = """
    SELECT /*+ BROADCAST(drawn) */ drawn.name AS fingerprint,
           floor(unix_micros(dead_lettered_at) / {width}) AS bucket,
           sum(stands_for) AS letters
    FROM {letters} LEFT JOIN {drawn} AS drawn ON coalesce(fingerprint, 'unknown') = drawn.name
    WHERE dead_lettered_at IS NOT NULL
    GROUP BY 1, 2
"""
_MAX_DELIVERIES = 10_000  # rows
_MAX_NEWS_PERIOD = timedelta(days=7)
# Of files, some thousand letters: Spark answers before it would have compiled the questions to
# Java code, which takes a quarter of the CPU of a small triage.
_MAX_INTERPRETED_BYTES = 256 * 1024
_MAX_QUICK_BYTES = 128 * 1024 * 1024  # of files; a million small letters are half of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """The answers to the plain questions about a folder."""

    path: str  # The folder
    letters: int  # Letters in it
    queues: tuple[str, ...]  # Names of their dead-letter queues, sorted
    # Time of the first death, aware UTC; `None`: no letter has a time
    first_seen_at: datetime | None
    last_seen_at: datetime | None  # Time of the last death
    bucket: str  # Width of the buckets of `timeline`, e.g. `"10 minutes"`
    causes: int  # Number of all causes
    groups: tuple[Row, ...]  # By cause, the largest first, `MAX_GROUPS` at most
    reasons: tuple[Row, ...]  # By reason, the most frequent first
    timeline: tuple[Row, ...]  # By time and reason, the oldest first
    deliveries: tuple[Row, ...]  # By task and number of deliveries

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names; times as ISO 8601 in UTC."""
        return {one.name: _json_value(getattr(self, one.name)) for one in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The answers to all questions about a folder."""

    triage: Triage  # The rows of the plain triage
    # The explanations of causes with more than 20 letters or 1 % of all, by fingerprint
    causes: dict[str, Explanation]
    # Start of the period in which causes count as new: the last half of the letters' time, seven
    # days at most; `None`: the letters have no or one time
    news_from: datetime | None = None
    # The largest causes that are new or came back since then, `MAX_ROWS` at most
    new: tuple[Row, ...] = ()
    new_causes: int = 0  # Number of all causes that are new or came back
    # The strongest flood of each cause, the strongest first, `MAX_GROUPS` at most
    spikes: tuple[Row, ...] = ()
    # The outcome of each delivery, for tasks with known successes; empty without a sample of
    # successes
    limits: tuple[Row, ...] = ()
    # Letters by `floor(time / width of triage.bucket)`, of each of the `MOST_DRAWN` largest causes
    # by fingerprint, and of all others together (`None`)
    over_time: Mapping[str | None, Mapping[int, int]] = field(default_factory=dict)
    successes: int | None = None  # Messages that succeeded; `None`: none were given
    changes: RateChanges | None = None  # What changed against another time; `None`: not asked

    @property
    def unexplained(self) -> tuple[int, int]:
        """The causes that are not explained, and their letters."""
        own = [one.letters for one in self.triage.groups if one.fingerprint in self.causes]
        return self.triage.causes - len(own), self.triage.letters - sum(own)

    def to_json(self) -> dict[str, Any]:
        """`Triage.to_json`, ``explained`` with the causes, ``unexplained`` with their numbers.

        And ``changes``, if the letters were compared with others.
        """
        causes, letters = self.unexplained
        explained = [
            {
                "fingerprint": fingerprint,
                "headline": one.headline,
                "sentences": one.sentences,
                **one.to_json(),
            }
            for fingerprint, one in self.causes.items()
        ]
        unexplained = {"causes": causes, "letters": letters}
        found = {**self.triage.to_json(), "explained": explained, "unexplained": unexplained}
        return found if self.changes is None else {**found, "changes": self.changes.to_json()}


def triage(
    path: Path | str,
    spark: SparkSession | None = None,
    *,
    selection: Selection = EVERYTHING,
    summaries: bool | None = None,
) -> Triage:
    """Answer the plain questions about an exported folder with Spark.

    It stops only a session that it started itself. ``summaries`` of days: ``None`` keeps them where
    that is quicker, ``False`` never.
    """

    def counted(*, summaries: bool | None) -> Triage:
        with _open_folder(path, spark, selection) as (session, place):
            kept = summaries if place == path else False
            df = _letters(session, place, selection, COLUMNS, kept=kept)
            return ask_questions(session, _shown_path(path), df, selection)

    return _with_or_without(counted, path, summaries=summaries)


def findings(
    path: Path | str,
    spark: SparkSession | None = None,
    *,
    successes: Path | str | None = None,
    selection: Selection = EVERYTHING,
    against: ComparedPeriod | None = None,
    brief: bool = False,
    summaries: bool | None = None,
) -> Findings:
    """Answer all questions about an exported folder with Spark.

    If ``brief``, only those of the terminal: what changed over time is for the page.
    ``summaries`` is that of `triage`.
    """

    def answered(*, summaries: bool | None) -> Findings:
        return _findings(path, spark, successes, selection, against, brief=brief, kept=summaries)

    return _with_or_without(answered, path, summaries=summaries)


def _with_or_without(ask: Callable[..., T], path: Path | str, *, summaries: bool | None) -> T:
    """Ask again without summaries if one was replaced, by another triage, while it was read."""
    try:
        return ask(summaries=summaries)
    except ExportError as exc:
        if summaries is False or SUMMARIES not in str(exc):
            raise
        logger.warning("%s is read without summaries of its days: %s", _shown_path(path), exc)
    return ask(summaries=False)


def _findings(
    path: Path | str,
    spark: SparkSession | None,
    successes: Path | str | None,
    selection: Selection,
    against: ComparedPeriod | None,
    *,
    brief: bool,
    kept: bool | None,
) -> Findings:
    for folder in (successes, against.folder if against is not None else None):
        if folder is not None:
            check_folder(folder)
    files = selection if against is None else against.around(selection)
    with _open_folder(path, spark, files) as (session, place), ExitStack() as until_then:
        good = None
        if successes is not None:
            ended_well = until_then.enter_context(_readable_place(session, successes, EVERYTHING))
            good = successful(session, ended_well)
        columns = [*COLUMNS, *WHY_COLUMNS]
        if good is not None:
            columns += ["history", "headers", "redrives"]
        if against is not None:
            selection = against.selected(selection, partial(read_letters, session, place))
        # What a cause is compared with has other fingerprints, and other releases.
        wider = replace(selection, fingerprint=None, release=None)
        # No summary has the history of a message.
        kept = kept if place == path and good is None else False
        around = _letters(session, place, wider, columns, kept=kept)
        df = selection.select_from(around)
        found = ask_questions(session, _shown_path(path), df, selection)
        causes = None
        if wider != selection:
            names = (group.fingerprint for group in found.groups)
            causes = [name for name in names if name != UNKNOWN]
        explained = explanations_of(around, causes, good)
        answers = Findings(triage=found, causes=explained)
        if not brief:
            answers = _with_changes(df, good, found, explained)
        if against is None:
            return answers
        return replace(answers, changes=changes_of(session, place, selection, against))


def read_letters(session: SparkSession, place: Path | str, selection: Selection) -> DataFrame:
    """The letters of a part of a folder, for the plain questions."""
    return scan(session, place, selection).select(*COLUMNS)


def changes_of(
    session: SparkSession, place: Path | str, selection: Selection, against: ComparedPeriod
) -> RateChanges:
    """Compare the selected letters with those of another time or folder."""
    with ExitStack() as until_then:

        def other(selection: Selection) -> DataFrame:
            folder = str(against.folder)
            check_folder(folder, selection)
            return read_letters(
                session,
                until_then.enter_context(_readable_place(session, folder, selection)),
                selection,
            )

        reads = partial(read_letters, session, place)
        here, there, df = against.compared(selection, reads, other)
        rows = tuple(rows_of(df))
    return RateChanges(here=here, there=there, folder=against.folder, rows=rows)


def _letters(
    session: SparkSession,
    place: Path | str,
    selection: Selection,
    columns: Iterable[str],
    *,
    kept: bool | None,
) -> DataFrame:
    """The letters of a folder, by its summaries where they are kept."""
    if kept is not False:
        return summarized(session, place, selection, always=kept is True)
    return scan(session, place, selection).select(*dict.fromkeys(columns))


def _with_changes(
    df: DataFrame, good: DataFrame | None, found: Triage, explained: dict[str, Explanation]
) -> Findings:
    """The answers to the questions about changes and limits as well."""
    since = _news_from(found)
    if since is not None and "stands_for" in df.columns:  # summaries count by hours
        since = since.replace(minute=0, second=0, microsecond=0)
    fresh: list[Row] = []
    if since is not None:
        fresh += rows_of(largest_new_since(df, since, MAX_ROWS))
    return Findings(
        triage=found,
        causes=explained,
        news_from=since,
        new=tuple(fresh),
        new_causes=max((row.among for row in fresh), default=0),
        spikes=tuple(rows_of(run_sql(_STRONGEST, spikes(df, found.bucket), most=MAX_GROUPS))),
        limits=() if good is None else tuple(rows_of(limits(df, good).where("samples > 0"))),
        over_time=_over_time(df, found),
        successes=None if good is None else good.count(),
    )


def _over_time(df: DataFrame, found: Triage) -> dict[str | None, dict[int, int]]:
    """Count the letters of the largest causes by time, some thousand rows."""
    names = [(group.fingerprint,) for group in found.groups[:MOST_DRAWN]]
    drawn = df.sparkSession.createDataFrame(names, "name STRING")
    width = bucket_width(found.bucket) // timedelta(microseconds=1)
    courses: dict[str | None, dict[int, int]] = defaultdict(dict)
    for fingerprint, bucket, letters in run_sql(_OVER_TIME, df, drawn=drawn, width=width).collect():
        courses[fingerprint][bucket] = letters
    return dict(courses)


def _news_from(found: Triage) -> datetime | None:
    first, last = found.first_seen_at, found.last_seen_at
    if first is None or last is None or first == last:
        return None
    return last - min((last - first) / 2, _MAX_NEWS_PERIOD)


def _shown_path(path: Path | str) -> str:
    return url_without_secrets(str(path)) if is_remote(path) else str(path)


@contextmanager
def _readable_place(
    session: SparkSession, path: Path | str, selection: Selection
) -> Iterator[Path | str]:
    """Where Spark finds the files: what it cannot read itself is copied, the selected folders."""
    if not is_remote(path) or _spark_reads(session, str(path)):
        yield path
        return
    from celery_dlq.export.destination import Destination  # noqa: PLC0415 - for a bucket only

    has = selection.may_have if selection.chooses_folders else None
    with TemporaryDirectory(prefix="celery-dlq-triage-") as folder:
        if not Destination(path).copy_letters(Path(folder), has):
            raise no_letters(_shown_path(path), selected=bool(selection))
        yield folder


def _spark_reads(session: SparkSession, url: str) -> bool:
    """True if Spark has a file system for a URL; pyarrow's URLs have keys and options in them."""
    if "?" in url or "@" in url:
        return False
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    unread: tuple[type[Exception], ...] = (PySparkException, *java_errors())
    try:
        _ = session.read.schema("id STRING").parquet(url).columns
    except unread as exc:
        return not re.search(r"No FileSystem for scheme|ClassNotFoundException", str(exc))
    return True


@contextmanager
def _open_folder(
    path: Path | str, spark: SparkSession | None, selection: Selection
) -> Iterator[tuple[SparkSession, Path | str]]:
    """A session, and where it finds the files of a folder; what it cannot read is one line."""
    with (
        session_for(spark, check_folder(path, selection)) as session,
        readable_errors(_shown_path(path), selected=bool(selection)),
        _readable_place(session, path, selection) as place,
    ):
        yield session, place


@contextmanager
def session_for(given: SparkSession | None, size: int) -> Iterator[SparkSession]:
    """A session for one triage: the given one, this process's, or a new one that is stopped.

    ``size`` is the size of the files in bytes, see `check_folder`; 0: unknown.
    """
    if given is not None:
        yield given
        return
    session, started = session_and_start(quick=0 < size < _MAX_QUICK_BYTES)
    if 0 < size < _MAX_INTERPRETED_BYTES:
        session.conf.set("spark.sql.codegen.wholeStage", "false")
        session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    try:
        yield session
    finally:
        if started:
            session.stop()


def ask_questions(
    spark: SparkSession, path: Path | str, df: DataFrame, selection: Selection = EVERYTHING
) -> Triage:
    """Collect the answers to the plain questions."""
    total = next(rows_of(overview(df)))
    if total.strangers == total.letters:
        raise not_letters(spark, path, selection)
    if total.successes:
        raise ExportError(
            f"expected {path} to hold letters, got messages that succeeded; pass this folder "
            f"with --successes, and a folder of letters"
        )
    if total.strangers:
        raise ExportError(
            f"expected {path} to hold letters only, got other rows as well; remove their files"
        )
    first, last = total.first_seen_at, total.last_seen_at
    bucket = bucket_for((last - first).total_seconds() if first and last else 0.0)
    many = total.causes > MAX_GROUPS
    large = run_sql(_OF_LARGEST, df, hosts=True, most=MAX_GROUPS) if many else df
    return Triage(
        path=str(path),
        letters=total.letters,
        queues=total.queues,
        first_seen_at=first,
        last_seen_at=last,
        bucket=bucket,
        causes=total.causes,
        groups=tuple(rows_of(groups(large))),
        reasons=tuple(rows_of(reasons(df))),
        timeline=tuple(rows_of(timeline(df, bucket))),
        deliveries=tuple(rows_of(deliveries_before_death(df).limit(_MAX_DELIVERIES))),
    )


def rows_of(df: DataFrame) -> Iterator[Row]:
    """Collect rows; times as microseconds, because PySpark would return naive local times."""
    names = df.columns
    times = {name for name, kind in df.dtypes if kind == "timestamp"}
    columns = [f"unix_micros({name}) AS {name}" if name in times else name for name in names]
    for row in df.selectExpr(*columns).collect():
        yield Row(**{name: _plain_value(row[name], is_time=name in times) for name in names})


def _plain_value(value: Any, *, is_time: bool) -> Any:
    if is_time and value is not None:
        try:
            return from_micros(value)
        except OverflowError:  # the bucket of a letter of year 1 may begin before it
            return EARLIEST if value < 0 else LATEST
    return tuple(value) if isinstance(value, list) else value


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Row):
        return {name: _json_value(item) for name, item in vars(value).items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return value
