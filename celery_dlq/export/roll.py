"""The Parquet files of one range of letters of one queue: written as drafts, committed together.

The order of a commit: every file is written as a draft and synced; the range is saved (the intent);
the drafts are put in place under names made from the range; the checkpoint moves. If the export is
killed before the intent, no file was visible. If it is killed later, the next export reads the same
range and writes files of the same names, so that no letter is there twice.

Letters are removed from their queue, or left out as known ones, once their files are read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import ExportError
from celery_dlq.export import partition, table
from celery_dlq.export.arrow import pa, pc, pq
from celery_dlq.export.checkpoint import Checkpoint
from celery_dlq.export.destination import Destination, Draft
from celery_dlq.letters.record import Use, record_fields
from celery_dlq.store.records import FIRST_POSITION, ordered

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters

ROWS_A_GROUP = 20_000
BYTES_A_GROUP = 48 * 1024 * 1024
MAX_DAYS = 64

WRITING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [name for name, field in record_fields().items() if field.use & Use.REPEATS],
    "write_statistics": [
        name for name, field in record_fields().items() if field.use & Use.FILTERED
    ],
    "write_page_checksum": True,
}
"""Arguments of `pyarrow.parquet.ParquetWriter`."""


class Background:
    """One thread that writes; nothing waits for it, because what waits is in memory."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "celery_dlq-export")
        self._last: Future[None] | None = None

    def __enter__(self) -> Background:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def submit(self, jobs: list[tuple[DayFile, list[Any]]]) -> Future[None]:
        """Write once the job before is done, whosever it was."""
        if self._last is not None:
            wait([self._last])
        self._last = self._thread.submit(_write_files, jobs)
        return self._last


class Roll:
    """Collects letters and writes them in the background, one file per day of death."""

    def __init__(
        self, destination: Destination, checkpoint: Checkpoint, background: Background
    ) -> None:
        self._destination = destination
        self._checkpoint = checkpoint
        self._background = background
        self._running: Future[None] | None = None
        self._days: dict[str, DayFile] = {}
        self._buffered_rows = 0
        self.buffered_bytes = 0
        self.rows = 0
        self.bytes = 0

    @property
    def too_many_days(self) -> bool:
        """True if `MAX_DAYS` files are open."""
        return len(self._days) >= MAX_DAYS

    def add_page(self, table: Any) -> None:
        """Add a page of letters."""
        size = table.nbytes
        for day, part in _split_by_day(table):
            if day not in self._days:
                self._days[day] = DayFile(self._destination.draft())
            self._days[day].tables.append(part)
        self.rows += table.num_rows
        self.bytes += size
        self._buffered_rows += table.num_rows
        self.buffered_bytes += size
        if self._buffered_rows >= ROWS_A_GROUP or self.buffered_bytes >= BYTES_A_GROUP:
            self._flush_buffer()

    def commit(self, last: str, since: datetime | None) -> tuple[int, int]:
        """Put all files in place, then move the checkpoint; return files and their bytes."""
        if not self._days and self._checkpoint.intent is None:
            self._checkpoint.pass_to(last)
            return 0, 0
        self._flush_buffer()
        self._wait_for_files()
        for file in self._days.values():
            file.close()
        if self._checkpoint.intent is None:
            self._checkpoint.intend(last, since)
        checkpoint = self._checkpoint
        name = partition.file_name(checkpoint.position, last, checkpoint.generation)
        size = 0
        for day, file in sorted(self._days.items()):
            place = partition.partition_folder(self._checkpoint.queue, day)
            size += self._destination.put_in_place(file.draft, f"{place}/{name}")
        self._checkpoint.commit()
        return len(self._days), size

    def abandon(self) -> None:
        """Discard drafts that were not committed; never raises."""
        with suppress(Exception):
            self._wait_for_files()
        for file in self._days.values():
            file.abandon()

    def _flush_buffer(self) -> None:
        """Write the buffered letters as row groups in the background."""
        self._wait_for_files()
        files = [file for file in self._days.values() if file.tables]
        jobs = [(file, file.take_tables()) for file in files]
        self._buffered_rows = self.buffered_bytes = 0
        self._running = self._background.submit(jobs)

    def _wait_for_files(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


class DayFile:
    """The draft of one day's file."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.tables: list[Any] = []
        self._sink: Any = None
        self._writer: Any = None

    def take_tables(self) -> list[Any]:
        """Return what is to be written, and keep it no longer."""
        tables, self.tables = self.tables, []
        return tables

    def write(self, tables: list[Any]) -> None:
        """Append to the draft."""
        if self._writer is None:
            self._sink = self.draft.opened()
            self._writer = pq.ParquetWriter(self._sink, table.schema(), **WRITING)
        self._writer.write_table(pa.concat_tables(tables), row_group_size=ROWS_A_GROUP)

    def close(self) -> None:
        """Complete the draft."""
        self._writer.close()
        self._sink.close()

    def abandon(self) -> None:
        """Remove the draft."""
        for closable in (self._writer, self._sink):
            with suppress(Exception):
                if closable is not None:
                    closable.close()
        self.draft.discard()


def _write_files(jobs: list[tuple[DayFile, list[Any]]]) -> None:
    for file, tables in jobs:
        file.write(tables)
        tables.clear()


def _split_by_day(table: Any) -> Iterator[tuple[str, Any]]:
    """Split a page by day of death; nearly always into one part."""
    micros = table.column("dead_lettered_at").cast(pa.int64())
    ends = pc.min_max(micros).as_py()
    if micros.null_count == 0 and ends["min"] is not None:
        first, last = (ends[end] // partition.MICROSECONDS_A_DAY for end in ("min", "max"))
        if first == last:
            yield partition.day_value(first), table
            return
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(micros.to_pylist()):
        day = None if value is None else value // partition.MICROSECONDS_A_DAY
        rows.setdefault(partition.day_value(day), []).append(row)
    for day_text, some in rows.items():
        yield day_text, table.take(some)


def trim_exported(
    store: Letters,
    destination: Destination,
    checkpoint: Checkpoint,
    until: str,
    begin: Callable[[], str] = lambda: "",
) -> int:
    """Remove the letters of the files that were put in place since the last trim.

    Only those of files up to a position: other folders may lack what is after it. Only the
    content of the files counts: every page of a file is read back and its checksum verified before
    its letters are removed. Letters of a file that was deleted stay in the queue. ``begin`` is
    called before the first of them, and gives the operation that counts them.
    """
    after, removed, letters = checkpoint.trimmed or FIRST_POSITION, 0, 0
    operation: str | None = None
    for name in destination.files(partition.queue_folder(checkpoint.queue)):
        held = partition.range_of(name.rpartition("/")[2])
        if held is None:
            continue
        if held.generation == checkpoint.generation and ordered(held.last) > ordered(until):
            continue
        if ordered(held.last) > ordered(after):
            ids = letter_ids_in(destination, name)
            operation = begin() if operation is None else operation
            count = store.remove(checkpoint.queue, ids, operation=operation)
            removed = count if operation else removed + count
            letters += len(ids)
    checkpoint.record_trim(until, letters)
    return removed


def earlier_ids(destination: Destination, checkpoint: Checkpoint) -> set[str]:
    """Return the ids in the files that a queue's letters are compared with."""
    after = ordered(checkpoint.compared[0]) if checkpoint.compared else ()
    ids: set[str] = set()
    for name in destination.files(partition.queue_folder(checkpoint.queue)):
        held = partition.range_of(name.rpartition("/")[2])
        if held and held.generation < checkpoint.generation and ordered(held.last) > after:
            ids.update(letter_ids_in(destination, name, ["id"]))
    return ids


def letter_ids_in(
    destination: Destination, name: str, columns: list[str] | None = None
) -> list[str]:
    """Read a file, or some of its columns, and return the ids of its letters."""
    ids: list[str] = []
    try:
        with destination.source(name) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for group in range(file.metadata.num_row_groups):
                found = file.read_row_group(group, columns)
                ids += [text for text in found.column("id").to_pylist() if text is not None]
    except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
        raise ExportError(
            f"{destination.name}/{name} cannot be read back ({type(exc).__name__}): its letters "
            f"stay in their queue; restore the file, or remove it and export to a new folder"
        ) from exc
    return ids
