"""Letters in the files of an export, read as those of a queue in Redis.

1. Only the files of the queue and of the days that a filter wants are opened, and of a file only
   the row groups whose statistics may match.
2. A row becomes the fields that Redis had: texts and numbers as bytes, times in microseconds.
3. Its position is the end of its day, then the place of its file among those of the day, then its
   row: positions sort as the files are read, and are the same in every process.

Redis keeps the claims of such letters, and a receipt of each that was redriven.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from functools import partial, reduce
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import ExportError
from celery_dlq.export import partition
from celery_dlq.export.arrow import pa, pc, pq
from celery_dlq.export.destination import NOTES, Destination
from celery_dlq.letters.filters import LetterFilter, fields_read
from celery_dlq.letters.record import Kind, field_kinds, from_micros, to_micros
from celery_dlq.store.records import Group, GroupOrder, in_order, ordered

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters
    from celery_dlq.store.records import RawPage

_PLACE = re.compile(r"dlq=[^/]+/day=([^/]+)/([^/]+\.parquet)")
_MILLIS_A_DAY = 86_400_000
_EPOCH = date(1970, 1, 1)
_MOST_ROWS = 10**9  # of a file
_BUFFER_BYTES = 64 * 1024  # of a column that is being read
_EXACT = ("reason", "task_name", "worker_hostname", "release", "root_id", "group_id")
_SUMMED = (
    *("id", "fingerprint", "reason", "task_name", "exception_type", "dead_lettered_at"),
    "release",
)
_MOST_RELEASES = 5
# Without one, a message would be another than it was; letters may lack any other field.
_NEEDED = frozenset({"id", "dead_letter_queue", "reason", "body", "headers", "properties"})


class ExportedFile(NamedTuple):
    """A file of letters, and where it comes in the order of reading."""

    day_end: int  # Milliseconds since 1970 of the last moment of its day
    generation: int
    last: tuple[int, ...]  # The last position in Redis of its letters
    name: str

    def position(self, row: int) -> str:
        """The position of one of its rows."""
        millis, number = self.last
        place = (self.generation * 10**15 + millis) * 10**6 + min(number, 10**6 - 1)
        return f"{self.day_end}-{place * _MOST_ROWS + row}"


class ExportedLetters:
    """The letters in a folder that an export wrote; nothing is written there."""

    def __init__(
        self,
        destination: Destination,
        store: Letters,
        *,
        where: LetterFilter | None = None,
        reads: set[str] | None = None,
        end: str = "",
    ) -> None:
        self.destination = destination
        self.claims = store.claims.of_files()
        self.overviews = ExportedGroups(self)
        self._store = store
        self._where = where or LetterFilter()
        self._reads = reads  # The fields of letters that are asked for; `None` for all
        self._end = end

    def narrowed(self, where: LetterFilter, reads: set[str] | None = None) -> ExportedLetters:
        """The same, without the files and row groups in which no letter matches a filter.

        Of the letters only the fields that are named, or all of them, and those of the filter.
        """
        return self._with(where=where, reads=self._reads if reads is None else reads)

    def until(self, end: str) -> ExportedLetters:
        """The same, without files that were written after `end` was asked."""
        return self._with(end=end)

    def _with(self, **changed: Any) -> ExportedLetters:
        kept = {"where": self._where, "reads": self._reads, "end": self._end}
        return ExportedLetters(self.destination, self._store, **{**kept, **changed})

    def refuse_redacted(self) -> None:
        """Refuse a folder that has not the bodies of letters as they were.

        Raises:
            ExportError: The folder was redacted, or has samples of successes.
        """
        with self._readable():
            about = self.destination.load(f"{NOTES}/about")
        try:
            known = json.loads(about or b"{}")
            redacted, of = known.get("redacted"), known.get("of")
        except (ValueError, AttributeError):
            redacted = of = None
        name = self.destination.name
        if redacted:
            hidden = ", ".join(redacted.get("paths", ())) or "arguments"
            raise ExportError(
                f"expected a folder with the bodies of letters, got {name}, whose export hid "
                f"{hidden}; redrive from Redis or from an export without --redact"
            )
        if of:
            raise ExportError(f"expected a folder of letters, got {name}, which has {of}")

    def names(self) -> list[str]:
        """The names of the dead-letter queues, as their letters have them; sorted."""
        with self._readable():
            folders = self.destination.folders("dlq=")
        found = sorted({*filter(None, map(self._name_of, folders))})
        if not found:
            raise ExportError(
                f"expected {self.destination.name} to be a folder of an export, found no letters "
                f"there"
            )
        return found

    def has_queue(self, name: str) -> bool:
        """True if there are letters of this dead-letter queue."""
        return name in self.names()

    def length(self, dead_letter_queue: str) -> int:
        """The number of rows of a queue; also proves that each file is whole."""
        rows = 0
        for file in self._files(dead_letter_queue):
            with self._opened(file.name) as parquet:
                rows += parquet.metadata.num_rows
        return rows

    def end(self, dead_letter_queue: str) -> str:
        """The newest file there is now: what a job reads must not grow while it runs."""
        files = self._files(dead_letter_queue)
        newest = max(((file.generation, file.last) for file in files), default=(0, (0, 0)))
        return f"{newest[0]}:{newest[1][0]}-{newest[1][1]}"

    def last_position(self, _dead_letter_queue: str) -> str | None:
        """Unknown: the files of a day may still come."""
        return None

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None = None,
        until: str | None = None,  # noqa: ARG002 - of Redis; see `until`
        page_size: int = 500,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Iterate over bounded pages, the first day first; of a day in the order of the files."""
        files = self._files(dead_letter_queue)
        first = (0,) if after is None else ordered(after)
        for file in reversed(files) if newest_first else files:
            if after is not None and ordered(file.position(_MOST_ROWS - 1)) <= first:
                continue
            with self._opened(file.name) as parquet:
                for rows, batch in self._batches(parquet, page_size, newest_first=newest_first):
                    entries = zip(map(file.position, rows), entries_of(batch), strict=True)
                    page = [one for one in entries if after is None or ordered(one[0]) > first]
                    if page:
                        yield page

    def named(
        self, dead_letter_queue: str, letter_ids: Iterable[str]
    ) -> Iterator[tuple[str, Mapping[bytes, bytes]]]:
        """Iterate over the position and fields of those of the given letters that are there."""
        wanted = set(letter_ids)
        positions = {one for one in wanted if re.fullmatch(r"\d+-\d+", one)}
        only = LetterFilter(ids=None if positions else frozenset(wanted))
        for page in self.narrowed(only).fields(dead_letter_queue):
            for position, fields in page:
                name = fields.get(b"id", b"").decode("utf-8", "replace")
                if name in wanted or position in positions:
                    wanted -= {name, position}
                    yield position, fields
                    if not wanted:
                        return

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """The position and fields of one letter."""
        return next(self.named(dead_letter_queue, [letter_id]), None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """The letters whose ids begin with a text; of the files only that column is read."""
        found: dict[tuple[str, str], None] = {}
        for queue in dead_letter_queues:
            for column in self.columns(queue, ["id"]):
                matching = column.filter(pc.starts_with(column["id"], prefix))
                found |= dict.fromkeys((queue, one) for one in matching["id"].to_pylist())
                if len(found) >= most:
                    return [*found][:most]
        return [*found]

    def remove(self, dead_letter_queue: str, letter_ids: Iterable[str], **options: Any) -> int:
        """Remove the claims of letters, and those of the letters that are in Redis, too."""
        return self._store.remove(dead_letter_queue, letter_ids, **options)

    def columns(self, dead_letter_queue: str, names: Sequence[str]) -> Iterator[Any]:
        """Some columns of all files, in bounded tables; a column that a file lacks is null."""
        for file in self._files(dead_letter_queue):
            with self._opened(file.name) as parquet:
                known = [name for name in names if name in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(20_000, columns=known, use_threads=False):
                    table = pa.Table.from_batches([batch])
                    for name in [one for one in names if one not in known]:
                        table = table.append_column(name, pa.nulls(len(table), pa.string()))
                    yield table

    # -- files --------------------------------------------------------------------

    def _files(self, queue: str) -> list[ExportedFile]:
        with self._readable():
            names = self.destination.files(partition.queue_folder(queue))
        found = []
        for name in names:
            place = _PLACE.fullmatch(name)
            held = partition.range_of(place[2]) if place else None
            if place is None or held is None:
                raise ExportError(
                    f"expected only files of an export, got {self.destination.name}/{name}; move "
                    f"it away, for nobody knows which letters it has"
                )
            file = ExportedFile(_day_end(place[1]), held.generation, ordered(held.last), name)
            if self._wants(file):
                found.append(file)
        return sorted(found)

    def _wants(self, file: ExportedFile) -> bool:
        """True if a file was there in time, and its day is one that the filter wants."""
        if self._end:
            generation, _, last = self._end.partition(":")
            if (file.generation, file.last) > (int(generation), ordered(last)):
                return False
        if not file.day_end:
            return True  # of letters without a day
        since, until = self._where.since, self._where.until
        began = file.day_end + 1 - _MILLIS_A_DAY
        early = since is not None and file.day_end < to_micros(since) // 1000
        return not early and (until is None or began <= to_micros(until) // 1000)

    def _name_of(self, folder: str) -> str:
        for name in filter(_PLACE.fullmatch, self.destination.files(folder)):
            with self._opened(name) as parquet:
                for batch in parquet.iter_batches(1, columns=["dead_letter_queue"]):
                    return str(batch.column(0)[0].as_py() or "")
        return ""

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        with self._readable(name), self.destination.source(name) as source:
            parquet = pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            if lacking := _NEEDED.difference(parquet.schema_arrow.names):
                raise pa.ArrowInvalid(f"no column {', '.join(sorted(lacking))}")
            yield parquet

    @contextmanager
    def _readable(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as exc:
            reason = getattr(exc, "strerror", None) or str(exc).strip().partition("\n")[0]
            place = f"{self.destination.name}/{name}" if name else self.destination.name
            what = "a whole file of an export" if name else "a folder that can be read"
            raise ExportError(f"expected {place} to be {what}, got: {reason}") from None

    # -- rows ---------------------------------------------------------------------

    def _batches(
        self, parquet: Any, size: int, *, newest_first: bool
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """The rows that may match, in parts: their numbers in the file, and their columns."""
        wanted = self._reads and self._reads | fields_read(self._where)
        names = [one for one in parquet.schema_arrow.names if one in (wanted or field_kinds())]
        count = parquet.num_row_groups
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(count)]
        firsts = [*accumulate(sizes, initial=0)]
        for group in reversed(range(count)) if newest_first else range(count):
            if not may_match(parquet.metadata.row_group(group), self._where):
                continue
            chosen = self._chosen(parquet, group)
            if chosen is not None and not pc.any(chosen).as_py():
                continue
            if newest_first:
                rows = parquet.read_row_group(group, names, use_threads=False)
                yield from _sorted(rows, chosen, firsts[group], size)
                continue
            first = firsts[group]
            for batch in parquet.iter_batches(size, [group], names, use_threads=False):
                numbers: Sequence[int] = range(first, first + len(batch))
                if chosen is not None:
                    mask = chosen.slice(first - firsts[group], len(batch))
                    numbers = [first + n for n in pc.indices_nonzero(mask).to_pylist()]
                first += len(batch)
                if numbers:
                    yield numbers, batch if chosen is None else batch.filter(mask)

    def _chosen(self, parquet: Any, group: int) -> Any | None:
        """Which rows match the parts of the filter that Arrow can judge; ``None`` for all."""
        where = self._where
        tests = {name: partial(pc.equal, text) for name, text in _exact(where)}
        if where.ids is not None:
            tests["id"] = partial(pc.is_in, value_set=pa.array(sorted(where.ids), pa.string()))
        if where.fingerprint is not None:
            tests["fingerprint"] = partial(pc.starts_with, pattern=where.fingerprint)
        known = sorted(tests.keys() & {*parquet.schema_arrow.names})
        if not known:
            return None
        table = parquet.read_row_group(group, known, use_threads=False)
        mask = reduce(pc.and_kleene, [tests[name](table[name]) for name in known])
        return pc.fill_null(mask, False).combine_chunks()  # noqa: FBT003 - the value


class ExportedGroups:
    """The letters in files by fingerprint, as `celery_dlq.store.overviews.Overviews` has them."""

    def __init__(self, letters: ExportedLetters) -> None:
        self._letters = letters
        self._found: dict[str, dict[str, Group]] = {}

    def ranked(
        self,
        dead_letter_queue: str,
        by: GroupOrder,
        *,
        most: int | None = None,
        of: Sequence[str] | None = None,
    ) -> list[str]:
        """The fingerprints of a queue, in an order; only those of ``of``."""
        found = self._all(dead_letter_queue)
        chosen = found.values() if of is None else [found[one] for one in of if one in found]
        return [one.fingerprint for one in in_order([*chosen], by)][:most]

    def groups(self, dead_letter_queue: str, fingerprints: Sequence[str]) -> list[Group]:
        """The groups of fingerprints that are known."""
        found = self._all(dead_letter_queue)
        return [found[one] for one in fingerprints if one in found]

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group | None:
        """The group of a fingerprint."""
        return self._all(dead_letter_queue).get(fingerprint)

    def holders(self, names: Sequence[str], letter_id: str) -> list[str]:
        """The first of the given queues that has a letter: to ask all would read all files."""
        return [*islice((one for one in names if self._letters.entry(one, letter_id)), 1)]

    def _all(self, queue: str) -> dict[str, Group]:
        if queue not in self._found:
            sums: dict[str, _Sum] = {}
            for table in self._letters.columns(queue, _SUMMED):
                for row in zip(*(table[name].to_pylist() for name in _SUMMED), strict=True):
                    sums.setdefault(row[1] or "", _Sum()).add(row)
            self._found[queue] = {name: one.group(name) for name, one in sums.items()}
        return self._found[queue]


class _Sum:
    """The letters of one fingerprint, summed up; the newest one is the example."""

    __slots__ = ("first", "last", "letters", "newest", "releases")

    def __init__(self) -> None:
        self.letters = 0
        self.newest: tuple[Any, ...] = ()
        self.first: datetime | None = None
        self.last: datetime | None = None
        self.releases: dict[str, None] = {}

    def add(self, row: tuple[Any, ...]) -> None:
        at, release = row[5], row[6]
        self.letters += 1
        if at is not None and (self.first is None or at < self.first):
            self.first = at
        if self.last is None or (at is not None and at >= self.last):
            self.last, self.newest = at, row
        if release and len(self.releases) < _MOST_RELEASES:
            self.releases[release] = None

    def group(self, fingerprint: str) -> Group:
        letter_id, _, reason, task, exception, _, release = self.newest
        others = (one for one in self.releases if one != release)
        return Group(
            fingerprint=fingerprint,
            letters=self.letters,
            task_name=task or "",
            reason=reason or "",
            exception_type=exception,
            first_seen_at=self.first or from_micros(0),
            last_seen_at=self.last or from_micros(0),
            example_id=letter_id or "",
            releases=(*([release] if release else []), *others),
        )


def entries_of(batch: Any) -> list[dict[bytes, bytes]]:
    """The fields of rows as Redis has them; a null is a field that the letter has not."""
    kinds, columns = field_kinds(), {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count < len(column):
            columns[name.encode()] = _values(_stored(column, kinds[name]))
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    return [{name: value for name, value in row if value is not None} for row in rows]


def may_match(group: Any, where: LetterFilter) -> bool:
    """False if the statistics of a row group say that none of its rows matches."""
    wanted = {name: (text, text) for name, text in _exact(where)}
    if where.fingerprint is not None:
        wanted["fingerprint"] = where.fingerprint, f"{where.fingerprint}g"  # beyond hexadecimal
    for number in range(group.num_columns if wanted else 0):
        column = group.column(number)
        first, last = wanted.get(column.path_in_schema, ("", ""))
        found = column.statistics if last else None
        if found is not None and found.has_min_max and (last < found.min or first > found.max):
            return False
    return True


def _exact(where: LetterFilter) -> list[tuple[str, str]]:
    """The fields that must have exactly a value."""
    found = ((name, getattr(where, name)) for name in _EXACT)
    return [(name, str(value)) for name, value in found if value is not None]


def _stored(column: Any, kind: Kind) -> Any:
    if kind is Kind.BYTES:
        return pc.cast(column, pa.binary())
    if kind is Kind.TIME:
        column = pc.cast(pc.cast(column, pa.timestamp("us", "UTC"), safe=False), pa.int64())
    return pc.cast(pc.cast(column, pa.string()), pa.binary())


def _values(column: Any) -> Any:
    """The values of a column of bytes; Arrow makes an object of its own for each."""
    if column.null_count:
        return column.to_pylist()
    _validity, offsets, text = column.buffers()
    ends = memoryview(offsets)[4 * column.offset :][: 4 * len(column) + 4].cast("i")
    first = ends[0]
    values = bytes(memoryview(text)[first : ends[-1]]) if text is not None else b""
    return [values[at - first : end - first] for at, end in pairwise(ends)]


def _sorted(rows: Any, chosen: Any, first: int, size: int) -> Iterator[tuple[list[int], Any]]:
    """The chosen rows of a group, from the newest death on."""
    order = pc.sort_indices(rows, [("dead_lettered_at", "descending")])
    if chosen is not None:
        order = order.filter(chosen.take(order))
    for start in range(0, len(order), size):
        some = order.slice(start, size)
        numbers = [first + number for number in some.to_pylist()]
        yield numbers, rows.take(some).combine_chunks().to_batches()[0]


def _day_end(value: str) -> int:
    """The last millisecond of a day; 0 for letters that have none."""
    try:
        days = (date.fromisoformat(value) - _EPOCH).days
    except ValueError:
        return 0
    return max(0, (days + 1) * _MILLIS_A_DAY - 1)
