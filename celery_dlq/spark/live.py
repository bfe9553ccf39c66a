"""Letters read from Redis by Spark tasks: ranges of queues as Arrow record batches.

Executors need redis-py and pyarrow, which are imported when a task reads, and
neither Celery nor kombu. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from celery_dlq.errors import MissingExtra, NotFound
from celery_dlq.letters.filters import LetterFilter, fields_read
from celery_dlq.letters.packed import PackedFields, codes_of
from celery_dlq.letters.record import field_kinds, to_micros
from celery_dlq.policies.checks import suggestion
from celery_dlq.spark.options import ReadOptions
from celery_dlq.store.records import FIRST_POSITION, Choice, RawPage, ordered

LETTERS_PER_TASK = 20_000
_IDS_PER_TASK = 500
MAX_TASKS_PER_QUEUE = 64

_PAGE_LETTERS = 500
_MAX_BATCH_ROWS = 5_000
_MAX_BATCH_BYTES = 16 * 1024 * 1024
_SAMPLE_LETTERS = 1_000
_TIMEOUT_SECONDS = 10.0  # for a reply of Redis
_CLOCK_SKEW = timedelta(hours=1)  # reading begins so long before `since` in the stream
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class PositionRange:
    """The letters of a queue after one position, up to another; both are stream ids.

    With ``ids`` only these letters, wherever they are.
    """

    queue: str
    after: str
    until: str
    ids: tuple[str, ...] = ()


class LiveLetters:
    """Reads the letters of dead-letter queues in parts."""

    def __init__(self, options: ReadOptions) -> None:
        try:
            from celery_dlq.store.store import Store  # noqa: PLC0415 - where tasks run
        except ImportError as exc:
            feature = "reading live letters with Spark"
            raise MissingExtra(feature, "redis", "spark") from exc
        self._options = options
        self._redis = Store(
            options.address, prefix=options.key_prefix, timeout_seconds=_TIMEOUT_SECONDS
        )
        self._store = self._redis.letters

    def __enter__(self) -> LiveLetters:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.close()

    def queues(self) -> list[str]:
        """The names of the queues to read."""
        names = self._store.names()
        if self._options.queue is None:
            return names
        if self._options.queue not in names:
            known = suggestion(self._options.queue, names) if names else "there are none yet"
            raise NotFound(
                f"expected the option 'queue' to be a dead-letter queue, "
                f"got {self._options.queue!r}; {known}"
            )
        return [self._options.queue]

    def start_position(self, since: datetime | None) -> str:
        """A position before all letters that died at ``since`` or later.

        A letter is stored after its death, but clocks may differ. ``until`` has no such
        position: a letter may have waited in a worker's spool.
        """
        if since is None:
            return FIRST_POSITION
        milliseconds = max(0, (to_micros(since) - _CLOCK_SKEW // _MICROSECOND) // 1000)
        return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else FIRST_POSITION

    def end_position(self, queue: str) -> str:
        """The position of the newest letter that was ever in the queue."""
        return self._store.last_position(queue) or FIRST_POSITION

    def split_range(self, span: PositionRange) -> list[PositionRange]:
        """Split a range into parts with about equally many letters.

        The boundaries come from a random sample of the index of letters, because Redis
        has no command for the n-th entry of a stream.
        """
        tasks = -(-self._store.length(span.queue) // LETTERS_PER_TASK)
        parts = max(1, min(tasks, MAX_TASKS_PER_QUEUE))
        if parts == 1:
            return [span]
        ids = self._redis.keys.ids(span.queue)
        sample = self._redis.client.hrandfield(ids, _SAMPLE_LETTERS, withvalues=True)
        inside = sorted(
            position
            for position in {ordered(text.decode()) for text in sample[1::2]}
            if ordered(span.after) < position < ordered(span.until)
        )
        cuts = {inside[len(inside) * part // parts] for part in range(1, parts)} if inside else {}
        edges = [span.after, *(f"{ms}-{sequence}" for ms, sequence in sorted(cuts)), span.until]
        return [PositionRange(span.queue, after, until) for after, until in pairwise(edges)]

    def spans_of(self, queue: str, ids: Iterable[str]) -> list[PositionRange]:
        """The letters of some ids that a queue has now."""
        there = self._store.present(queue, sorted(ids))
        return [
            PositionRange(
                queue, FIRST_POSITION, FIRST_POSITION, tuple(there[at : at + _IDS_PER_TASK])
            )
            for at in range(0, len(there), _IDS_PER_TASK)
        ]

    def batches(
        self,
        span: PositionRange,
        wanted: LetterFilter,
        columns: tuple[str, ...],
        fingerprints: tuple[str, ...] = (),
    ) -> Iterator[Any]:
        """The letters of a range as Arrow record batches, bounded in rows and bytes.

        Redis leaves out the letters that it can judge and the fields that nobody reads; here
        the whole filter is applied. ``fingerprints`` are beginnings, one of which matches.
        """
        try:
            from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra
        except ImportError as exc:
            feature = "reading letters with Spark"
            raise MissingExtra(feature, "pyarrow", "spark") from exc

        def batch() -> Iterator[Any]:
            # Spark compares schemas strictly: order, types and metadata, of which it expects none.
            letters = table.table(rows, columns=columns).select(list(columns))
            yield from letters.replace_schema_metadata(None).to_batches()

        rows: list[Mapping[bytes, bytes]] = []
        size = 0
        for page in self._raw_pages(span, choice_of(wanted, columns, fingerprints)):
            for _position, entry in page:
                if wanted.matches_fields(entry) and _begins_with(entry, fingerprints):
                    rows.append(entry)
                    size += _entry_size(entry)
            if len(rows) >= _MAX_BATCH_ROWS or size >= _MAX_BATCH_BYTES:
                yield from batch()
                rows, size = [], 0
        if rows:
            yield from batch()

    def _raw_pages(self, span: PositionRange, choice: Choice | None) -> Iterator[RawPage]:
        if span.ids:
            found = (self._store.entry(span.queue, one) for one in span.ids)
            return ([one] for one in found if one is not None)
        return self._store.fields(
            span.queue,
            after=span.after,
            until=span.until,
            page_size=_PAGE_LETTERS,
            choice=choice,
        )


def choice_of(
    wanted: LetterFilter, columns: tuple[str, ...], fingerprints: tuple[str, ...] = ()
) -> Choice | None:
    """What Redis leaves out; ``None``: nothing."""
    given = wanted.to_json()
    whole = len(columns) == len(field_kinds())
    read = {*columns, *fields_read(wanted), *(["fingerprint"] if fingerprints else [])}
    choice = Choice(
        codes="" if whole else codes_of(read),
        since=given.get("since"),
        until=given.get("until"),
        reason=given.get("reason", ""),
        fingerprints=fingerprints or ((wanted.fingerprint,) if wanted.fingerprint else ()),
    )
    return None if choice == Choice() else choice


def _begins_with(entry: Mapping[bytes, bytes], fingerprints: tuple[str, ...]) -> bool:
    found = entry.get(b"fingerprint", b"").decode("utf-8", "replace") if fingerprints else ""
    return found.startswith(fingerprints or "")


def is_before(position: str, other: str) -> bool:
    """True if a position is before another one."""
    return ordered(position) < ordered(other)


def _entry_size(entry: Mapping[bytes, bytes]) -> int:
    if isinstance(entry, PackedFields):
        return entry.stored_bytes()
    return sum(map(len, entry.values()))
