"""Letters read from Redis by Spark tasks: id ranges of streams as Arrow record batches.

It needs redis-py and pyarrow where tasks run, imported when a task reads, and
neither Celery nor kombu. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from celery_dlq.backends.base import ordered
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.errors import MissingExtra, NotFound, StoreUnavailable
from celery_dlq.letters.packed import PackedFields, fields_of
from celery_dlq.policies.policy import suggestion
from celery_dlq.record import to_micros
from celery_dlq.spark.options import ReadOptions

START = "0-0"
"""The position before the first letter of every queue."""

LETTERS_A_TASK = 20_000
MOST_TASKS_A_QUEUE = 64

_PAGE = 500
_ROWS_A_BATCH = 5_000
_BYTES_A_BATCH = 16 * 1024 * 1024
_SAMPLES = 1_000

Entry = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class PositionRange:
    """A part of one queue: the letters after one position up to another, both stream ids."""

    queue: str
    after: str
    until: str


@dataclass(frozen=True, slots=True)
class Window:
    """Which letters, by the time of death: from ``since``, before ``until``."""

    since: datetime | None = None
    until: datetime | None = None

    def narrowed(self, since: datetime | None, until: datetime | None) -> Window:
        """The letters that are in this window and in another one."""
        starts = [moment for moment in (self.since, since) if moment is not None]
        ends = [moment for moment in (self.until, until) if moment is not None]
        return Window(max(starts, default=None), min(ends, default=None))

    def first_position(self, skew_seconds: float) -> str:
        """Where in a stream to begin: no letter of the window is before it.

        A letter is stored after its death, never before; only clocks may differ.
        There is no last position: a letter may have waited in a worker's spool.
        """
        if self.since is None:
            return START
        begin = self.since - timedelta(seconds=skew_seconds)
        return f"{max(0, to_micros(begin) // 1000)}-0"

    def holds(self, entry: Entry) -> bool:
        """Whether a letter is in it; one without a readable time is in no window but the open."""
        if self.since is None and self.until is None:
            return True
        try:
            died = int(entry[b"dead_lettered_at"])
        except (KeyError, ValueError):
            return False
        return (self.since is None or died >= to_micros(self.since)) and (
            self.until is None or died < to_micros(self.until)
        )


class LiveLetters:
    """The streams of dead-letter queues, for reading.

    Args:
        options: Where they are. A connection is made at the first question.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._keys = Keys(options.keyprefix)
        self._client = _connected(options)

    def __enter__(self) -> LiveLetters:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def queues(self) -> list[str]:
        """The queues that the options name.

        Raises:
            NotFound: There is no queue of that name.
            StoreUnavailable: Redis does not answer.
        """
        with self._translated():
            names = sorted(name.decode() for name in self._client.smembers(self._keys.queues()))
        if self._options.queue is None:
            return names
        if self._options.queue not in names:
            known = suggestion(self._options.queue, names) if names else "there are none yet"
            raise NotFound(
                f"expected the option 'queue' to be a dead-letter queue, "
                f"got {self._options.queue!r}; {known}"
            )
        return [self._options.queue]

    def end(self, queue: str) -> str:
        """The position of the queue's newest letter ever."""
        stream = self._keys.letters(queue)
        with self._translated():
            if not self._client.exists(stream):
                return START
            found = self._client.xinfo_stream(stream)["last-generated-id"]
        return found.decode() if isinstance(found, bytes) else str(found)

    def end_within(self, queue: str, after: str, until: str, letters: int) -> tuple[str, int]:
        """The position after at most so many letters, and how many they are."""
        position, left = after, letters
        while left > 0:
            page = self._range(queue, position, until, min(_PAGE, left))
            if not page:
                return until, letters - left
            position, left = page[-1][0], left - len(page)
        return position, letters

    def spans(self, span: PositionRange) -> list[PositionRange]:
        """Cut a span into parts with about equally many letters.

        The cuts come from a random sample of the index of letters, because a stream
        cannot be asked for its n-th entry.
        """
        with self._translated():
            length = self._client.xlen(self._keys.letters(span.queue))
            wanted = self._options.partitions or -(-length // LETTERS_A_TASK)
            parts = max(1, min(wanted, MOST_TASKS_A_QUEUE))
            if parts == 1:
                return [span]
            sample = self._client.hrandfield(self._keys.ids(span.queue), _SAMPLES, withvalues=True)
        inside = sorted(
            position
            for position in {ordered(text.decode()) for text in sample[1::2]}
            if ordered(span.after) < position < ordered(span.until)
        )
        cuts = {inside[len(inside) * part // parts] for part in range(1, parts)} if inside else {}
        edges = [span.after, *(f"{ms}-{sequence}" for ms, sequence in sorted(cuts)), span.until]
        return [PositionRange(span.queue, after, until) for after, until in pairwise(edges)]

    def batches(
        self, span: PositionRange, window: Window, columns: tuple[str, ...]
    ) -> Iterator[Any]:
        """The letters of a span as Arrow record batches, bounded in rows and bytes."""
        try:
            from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra
        except ImportError as exc:
            feature = "reading letters with Spark"
            raise MissingExtra(feature, "pyarrow", "spark") from exc
        rows: list[Entry] = []
        size = 0
        for entry in self._entries(span):
            if not window.holds(entry):
                continue
            rows.append(entry)
            size += _size(entry)
            if len(rows) >= _ROWS_A_BATCH or size >= _BYTES_A_BATCH:
                yield from _record_batches(table.table(rows, columns=columns), columns)
                rows, size = [], 0
        if rows:
            yield from _record_batches(table.table(rows, columns=columns), columns)

    def _entries(self, span: PositionRange) -> Iterator[Entry]:
        position = span.after
        while True:
            page = self._range(span.queue, position, span.until, _PAGE)
            for _position, parts in page:
                yield fields_of(parts)
            if len(page) < _PAGE:
                return
            position = page[-1][0]

    def _range(self, queue: str, after: str, until: str, count: int) -> list[tuple[str, Any]]:
        stream = self._keys.letters(queue)
        with self._translated():
            reply = self._client.execute_command(
                "XRANGE", stream, f"({after}", until, "COUNT", count
            )
        return [(position.decode(), parts) for position, parts in reply]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from redis.exceptions import RedisError  # noqa: PLC0415 - imported where tasks run

        try:
            yield
        except (RedisError, OSError) as exc:
            raise StoreUnavailable(
                f"expected the Redis at {self._options.place} to answer, got "
                f"{type(exc).__name__}: {exc}; check that it runs there and that the option "
                f"'url' is right"
            ) from None


def older(position: str, other: str) -> bool:
    """Whether a position is before another one."""
    return ordered(position) < ordered(other)


def _size(entry: Entry) -> int:
    if isinstance(entry, PackedFields):
        return entry.stored_bytes()
    return sum(map(len, entry.values()))


def _record_batches(table: Any, columns: tuple[str, ...]) -> Iterator[Any]:
    # Spark compares schemas strictly: order, types, and it wants no metadata.
    yield from table.select(list(columns)).replace_schema_metadata(None).to_batches()


def _connected(options: ReadOptions) -> Any:
    try:
        import redis  # noqa: PLC0415 - imported where tasks run
    except ImportError as exc:
        feature = "reading live letters with Spark"
        raise MissingExtra(feature, "redis", "spark") from exc
    client = redis.Redis.from_url(
        options.url,
        socket_timeout=options.timeoutseconds or None,
        socket_connect_timeout=options.timeoutseconds or None,
        client_name="celery_dlq-spark",
        protocol=2,
    )
    # Redis-py's own conversion of entries costs more than Redis itself.
    client.set_response_callback("XRANGE", lambda reply, **_: reply)
    return client
