"""The PySpark data source ``celery_dlq``: reads letters from Redis.

>>> from celery_dlq.spark.source import register  # doctest: +SKIP
>>> register(spark)  # doctest: +SKIP
>>> df = (
...     spark.read.format("celery_dlq").option("url", "redis://localhost/0").load()
... )  # doctest: +SKIP

Executors need redis-py and pyarrow, and neither Celery nor kombu. The options are in
`celery_dlq.spark.options`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, MissingExtra, SettingsError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.json_codec import with_zone
from celery_dlq.letters.record import Reason, field_kinds
from celery_dlq.policies.checks import check_names
from celery_dlq.spark.live import LiveLetters, PositionRange, is_before
from celery_dlq.spark.options import ReadOptions
from celery_dlq.spark.triage.questions import column_ddl

try:
    from pyspark import __version__ as pyspark_version
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
except ModuleNotFoundError as exc:
    if exc.name == "pyspark.sql.datasource":
        raise DLQError(
            f"expected PySpark 4.0 or later for the format celery_dlq, got {pyspark_version}; "
            f"export the letters, and read the files"
        ) from exc
    feature = "the format celery_dlq"
    raise MissingExtra(feature, "pyspark", "spark") from exc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = [
    "DeadLetterSource",
    "register",
]

NAME = "celery_dlq"

# PySpark refuses a reader with `pushFilters` while push-down is off, and does not pass the setting
# to the reader. Only the process that pushes filters down imports this module.
_PUSHES_FILTERS = "pyspark.sql.worker.data_source_pushdown_filters"
_MICROSECOND = timedelta(microseconds=1)
_AT_LEAST = ("EqualTo", "GreaterThan", "GreaterThanOrEqual")
# Columns of text that a `LetterFilter` compares; it may keep letters that Spark then leaves out.
_TEXTS = (
    "reason",
    "task_name",
    "exception_type",
    "worker_hostname",
    "release",
    "root_id",
    "group_id",
)


def register(spark: SparkSession) -> None:
    """Register the format ``celery_dlq`` with a session, and switch filter push-down on.

    Spark would find the format by itself in a top-level module ``pyspark_celery_dlq`` with a
    class ``DefaultSource``. There is none on purpose: Spark would import it, and this module,
    for every format that any session looks up; push-down would stay off; and ``--py-files``
    would need two packages.

    Args:
        spark: The session. Its setting ``spark.sql.python.filterPushdown.enabled``
            becomes true where PySpark has it (4.1 and later).
    """
    spark.dataSource.register(DeadLetterSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


class DeadLetterSource(DataSource):
    """The format ``celery_dlq``: one row per letter, columns as in exported files."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return NAME

    def schema(self) -> str:
        """The chosen columns, with the types of `celery_dlq.spark.triage.letters`."""
        return column_ddl(ReadOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read the letters that are there now."""
        options = ReadOptions.parse(self.options)
        kind = FilteringReader if _PUSHES_FILTERS in sys.modules else LetterReader
        return kind(options, _columns(schema))


@dataclass
class RangePartition(InputPartition):
    """The range that one task reads; ``None``: an empty one."""

    span: PositionRange | None


class LetterReader(DataSourceReader):
    """Reads the letters that are in the queues when the query is planned."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._since, self._until = options.since, options.until
        self._ids = None if options.id is None else frozenset(options.id)
        self._fingerprints = options.fingerprint
        self._queues: frozenset[str] | None = None
        self._others: dict[str, Any] = {}

    def partitions(self) -> list[InputPartition]:
        """Split the queues into parts with about equally many letters."""
        found: list[InputPartition] = []
        with LiveLetters(self._options) as live:
            first = live.start_position(self._since)
            for queue in live.queues():
                if self._queues is not None and queue not in self._queues:
                    continue
                if self._ids is not None:
                    found += map(RangePartition, live.spans_of(queue, self._ids))
                elif is_before(first, end := live.end_position(queue)):
                    found += map(RangePartition, live.split_range(PositionRange(queue, first, end)))
        return found or [RangePartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The letters of one partition, as Arrow record batches; none if no time is left."""
        span: PositionRange | None = getattr(partition, "span", None)
        since, until, where = self._since, self._until, self._options.where
        if span is not None and (since is None or until is None or since <= until):
            wanted = LetterFilter(since=since, until=until, conditions=where, **self._others)
            with LiveLetters(self._options) as live:
                yield from live.batches(span, wanted, self._columns, self._fingerprints or ())


class FilteringReader(LetterReader):
    """A `LetterReader` that applies conditions of a query's WHERE while it reads."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        """Take what a filter of letters has too; Spark applies all of it again afterwards."""
        for condition in filters:
            self._take_condition(condition)
        return filters

    def _take_condition(self, condition: Any) -> None:
        column: tuple[str, ...] = getattr(condition, "attribute", ())
        kind = type(condition).__name__
        value = getattr(condition, "value", None)
        if kind == "In" or (kind in {"EqualTo", "EqualNullSafe"} and value is not None):
            several = value if isinstance(value, (list, tuple)) else [value]
            self._take_one_of(column, frozenset(one for one in several if one is not None))
        if kind in {"EqualTo", "EqualNullSafe"} and isinstance(value, str):
            self._take_text(column[0] if len(column) == 1 else "", value)
        if column == ("deliveries",) and kind in _AT_LEAST and isinstance(value, int):
            least = value + (kind == "GreaterThan")
            if least > self._others.get("min_deliveries", 0):
                self._others["min_deliveries"] = least
        if column == ("dead_lettered_at",) and isinstance(value, datetime):
            moment = with_zone(value)
            # ``until`` is exclusive; times have whole microseconds.
            if kind in _AT_LEAST:
                self._since = max(self._since or moment, moment)
            if kind in {"EqualTo", "LessThan", "LessThanOrEqual"}:
                end = moment if kind == "LessThan" else _microsecond_after(moment)
                if end is not None:
                    self._until = min(self._until or end, end)

    def _take_one_of(self, column: tuple[str, ...], values: frozenset[str]) -> None:
        if column == ("dead_letter_queue",):
            self._queues = values if self._queues is None else self._queues & values
        if column == ("id",):
            self._ids = values if self._ids is None else self._ids & values
        if column == ("fingerprint",) and self._fingerprints is None:
            self._fingerprints = tuple(sorted(values)) or None

    def _take_text(self, column: str, value: str) -> None:
        if column in _TEXTS and (column != "reason" or value in set(map(str, Reason))):
            self._others.setdefault(column, value)  # with another value, Spark finds nothing


def _microsecond_after(moment: datetime) -> datetime | None:
    """The next microsecond; ``None`` after the last one of the calendar."""
    try:
        return moment + _MICROSECOND
    except OverflowError:
        return None


def _columns(schema: StructType) -> tuple[str, ...]:
    names = tuple(schema.fieldNames())
    check_names("columns of a letter", names, field_kinds(), SettingsError)
    return names
