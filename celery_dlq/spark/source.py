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
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    InputPartition,
)

from celery_dlq.errors import SettingsError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import Reason, field_kinds
from celery_dlq.policies.checks import check_names
from celery_dlq.spark.live import LiveLetters, PositionRange, older
from celery_dlq.spark.options import ReadOptions
from celery_dlq.spark.triage.questions import column_ddl

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
    "fingerprint",
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


def _read(
    options: ReadOptions,
    partition: InputPartition,
    columns: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    **others: Any,
) -> Iterator[Any]:
    """Read a partition as Arrow record batches; nothing if ``since`` is after ``until``."""
    span: PositionRange | None = getattr(partition, "span", None)
    if span is not None and (since is None or until is None or since <= until):
        wanted = LetterFilter(since=since, until=until, conditions=options.where, **others)
        with LiveLetters(options) as live:
            yield from live.batches(span, wanted, columns)


class LetterReader(DataSourceReader):
    """Reads the letters that are in the queues when the query is planned."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._since, self._until = options.since, options.until
        self._queues: frozenset[str] | None = None
        self._others: dict[str, Any] = {}

    def partitions(self) -> list[InputPartition]:
        """Split the queues into parts with about equally many letters."""
        found: list[InputPartition] = []
        with LiveLetters(self._options) as live:
            first = live.start(self._since)
            for queue in live.queues():
                end = live.end(queue)
                if (self._queues is None or queue in self._queues) and older(first, end):
                    found += map(RangePartition, live.spans(PositionRange(queue, first, end)))
        return found or [RangePartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The letters of one partition, as Arrow record batches."""
        return _read(
            self._options, partition, self._columns, self._since, self._until, **self._others
        )


class FilteringReader(LetterReader):
    """A `LetterReader` that applies conditions of a query's WHERE while it reads."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        """Take what a filter of letters has too; Spark applies all of it again afterwards."""
        for condition in filters:
            self._take(condition)
        return filters

    def _take(self, condition: Any) -> None:
        column: tuple[str, ...] = getattr(condition, "attribute", ())
        kind = type(condition).__name__
        value = getattr(condition, "value", None)
        if column == ("dead_letter_queue",) and kind in {"EqualTo", "EqualNullSafe", "In"}:
            names = frozenset(value if isinstance(value, tuple) else [value])
            self._queues = names if self._queues is None else self._queues & names
        if kind in {"EqualTo", "EqualNullSafe"} and isinstance(value, str):
            self._take_text(column[0] if len(column) == 1 else "", value)
        if column == ("deliveries",) and kind in _AT_LEAST and isinstance(value, int):
            least = value + (kind == "GreaterThan")
            if least > self._others.get("min_deliveries", 0):
                self._others["min_deliveries"] = least
        if column == ("dead_lettered_at",) and isinstance(value, datetime):
            moment = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
            # ``until`` is exclusive; times have whole microseconds.
            if kind in _AT_LEAST:
                self._since = max(self._since or moment, moment)
            if kind in {"EqualTo", "LessThan", "LessThanOrEqual"}:
                end = moment if kind == "LessThan" else moment + _MICROSECOND
                self._until = min(self._until or end, end)

    def _take_text(self, column: str, value: str) -> None:
        if column in _TEXTS and (column != "reason" or value in set(map(str, Reason))):
            self._others.setdefault(column, value)  # with another value, Spark finds nothing


def _columns(schema: StructType) -> tuple[str, ...]:
    names = tuple(schema.fieldNames())
    check_names("columns of a letter", names, field_kinds(), SettingsError)
    return names
