"""Export to a folder of Parquet files: each letter once, however often the exporter is killed.

The folder::

    dlq=<queue>/day=<YYYY-MM-DD>/letters-<first>-<last>.parquet
    _celery_dlq/<queue>.json        checkpoint and, while a batch is written, its intent
    _celery_dlq/lock                held by the one exporter that writes

The commit order of a batch: note the intent (the id range) durably; write each
file under a hidden temporary name, sync it, rename it; then move the checkpoint.
Killed anywhere, the next export reads the same id range and writes files of the
same names, so that nothing is there twice.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from celery_dlq.errors import ExportError, MissingExtra
from celery_dlq.export import arrow
from celery_dlq.ports import DeadLetterStore

try:
    import pyarrow.parquet as pq
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc

ROWS_A_BATCH = 20_000
BYTES_A_BATCH = 64 * 1024 * 1024
PAGE = 500

_STATE = "_celery_dlq"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

Entry = tuple[str, Mapping[bytes, bytes]]


@dataclass(slots=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        destination: The folder.
        letters: Letters written by this run.
        files: Files written by this run.
        bytes: Their size.
        by_queue: Letters written, by dead-letter queue.
    """

    destination: str
    letters: int = 0
    files: int = 0
    bytes: int = 0
    by_queue: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {name: getattr(self, name) for name in self.__slots__}


class ParquetExport:
    """Writes what is new in a store to a folder.

    Args:
        store: Where the letters are.
        destination: The folder; made if it is not there.
    """

    def __init__(self, store: DeadLetterStore, destination: Path) -> None:
        self._store = store
        self._root = destination

    def run(
        self, dead_letter_queues: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> ExportReport:
        """Export the queues; see `DeadLetters.export`."""
        report = ExportReport(destination=str(self._root))
        with _readable_errors(self._root), self._locked():
            for name in dead_letter_queues:
                self._queue(name, report, progress)
        return report

    def _queue(
        self, name: str, report: ExportReport, progress: Callable[[int], None] | None
    ) -> None:
        checkpoint = _Checkpoint.read(self._root / _STATE / f"{quote(name, safe='')}.json", name)
        end = self._store.last_position(name)
        if checkpoint.position is not None and (end is None or _older(end, checkpoint.position)):
            message = (
                f"expected {name!r} to have letters after {checkpoint.position}, its last export; "
                f"got a queue that ends at {end}: it was deleted and made anew. "
                f"Export it to a new folder"
            )
            raise ExportError(message)
        if end is None:
            return
        if checkpoint.intent is not None:  # the batch that a killed export left unfinished
            self._batch(checkpoint, list(self._entries(name, checkpoint.position,
                                                       checkpoint.intent)), report)  # fmt: skip
        for batch in _batches(self._entries(name, checkpoint.position, end)):
            checkpoint.intend(batch[-1][0])
            self._batch(checkpoint, batch, report)
            if progress is not None:
                progress(len(batch))

    def _entries(self, name: str, after: str | None, until: str) -> Iterator[Entry]:
        for page in self._store.fields(name, after=after, until=until, page_size=PAGE):
            yield from page

    def _batch(self, checkpoint: _Checkpoint, batch: list[Entry], report: ExportReport) -> None:
        days: dict[str, list[Entry]] = {}
        for entry in batch:
            days.setdefault(_day(entry[1]), []).append(entry)
        first, last = checkpoint.position or "0-0", checkpoint.intent
        for day, entries in sorted(days.items()):
            folder = self._root / f"dlq={escaped(checkpoint.queue)}" / f"day={day}"
            size = _write(folder / f"letters-{first}-{last}.parquet", entries)
            report.files += 1
            report.bytes += size
        report.letters += len(batch)
        report.by_queue[checkpoint.queue] = report.by_queue.get(checkpoint.queue, 0) + len(batch)
        checkpoint.commit()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One exporter a folder: two would write one letter twice."""
        state = self._root / _STATE
        state.mkdir(parents=True, exist_ok=True)
        with (state / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = (
                    f"expected {self._root} to be free, got another export that is writing there; "
                    f"wait for its end or choose another folder"
                )
                raise ExportError(message) from None
            yield


@dataclass(slots=True)
class _Checkpoint:
    """How far a queue is exported, kept durably beside the files."""

    path: Path
    queue: str
    position: str | None = None
    intent: str | None = None

    @classmethod
    def read(cls, path: Path, queue: str) -> _Checkpoint:
        if not path.exists():
            return cls(path, queue)
        try:
            state = json.loads(path.read_text("utf-8"))
            return cls(path, queue, state["position"], state["intent"])
        except (ValueError, KeyError, TypeError) as exc:
            message = (
                f"expected {path} to be a checkpoint of celery_dlq, got something else ({exc!r}); "
                f"export to a new folder"
            )
            raise ExportError(message) from exc

    def intend(self, last: str) -> None:
        self.intent = last
        self._save()

    def commit(self) -> None:
        self.position, self.intent = self.intent, None
        self._save()

    def _save(self) -> None:
        state = {"queue": self.queue, "position": self.position, "intent": self.intent}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(state), "utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that readers see all of it or none, also after a power cut.

    The temporary name is hidden and ends in ``.tmp``: Spark reads ``x.parquet.tmp``, and
    DuckDB's ``*.parquet`` would match a name that only begins oddly.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def escaped(name: str) -> str:
    """A partition value as Spark writes it: it decodes just these, and non-ASCII stays raw."""
    unsafe = "\"#%'*/:=?\\\x7f{[]^"
    return "".join(
        f"%{ord(character):02X}" if character in unsafe or ord(character) < 0x20 else character  # noqa: PLR2004 - control characters
        for character in name
    )


def _write(path: Path, entries: Sequence[Entry]) -> int:
    with replacing(path) as temporary:
        pq.write_table(
            arrow.table([fields for _position, fields in entries]),
            temporary,
            compression="zstd",
            compression_level=1,
            row_group_size=ROWS_A_BATCH,
        )
    return path.stat().st_size


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """Batches bounded in rows and in bytes."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[1].get(b"body", b"")) + len(entry[1].get(b"traceback", b""))
        if len(batch) >= ROWS_A_BATCH or size >= BYTES_A_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _day(fields: Mapping[bytes, bytes]) -> str:
    try:
        return (
            (_EPOCH + timedelta(microseconds=int(fields[b"dead_lettered_at"]))).date().isoformat()
        )
    except (KeyError, ValueError, OverflowError):
        return "unknown"


def _older(position: str, other: str) -> bool:
    def order(text: str) -> list[int]:
        return [int(part) for part in text.split("-")]

    return order(position) < order(other)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _readable_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        message = (
            f"expected {root} to be a folder that can be written, got {type(exc).__name__}: "
            f"{exc.strerror or exc}; nothing is lost, run the export again once it can"
        )
        raise ExportError(message) from exc
