"""The ids in files: letters are removed from their queue, or left out, once read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dlq.errors import ExportError, MissingExtra
from celery_dlq.export import partition
from celery_dlq.export.checkpoint import Checkpoint
from celery_dlq.export.destination import Destination
from celery_dlq.store.records import ordered

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc


def trim(store: Letters, destination: Destination, checkpoint: Checkpoint) -> int:
    """Remove the letters of the files that were put in place since the last trim.

    Only the content of the files counts: every page of a file is read back and its checksum
    verified before its letters are removed. Letters of a file that was deleted stay in the queue.
    """
    until, after = checkpoint.position, checkpoint.trimmed
    if until is None or until == after:
        return 0
    removed = 0
    for name in destination.files(partition.queue_folder(checkpoint.queue)):
        held = partition.range_of(name.rpartition("/")[2])
        if held is None:
            continue
        if held.generation == checkpoint.generation and ordered(held.last) > ordered(until):
            continue
        if after is None or ordered(held.last) > ordered(after):
            removed += store.remove(checkpoint.queue, _ids(destination, name))
    checkpoint.trim(until)
    return removed


def earlier_ids(destination: Destination, checkpoint: Checkpoint) -> set[str]:
    """Return the ids in the files that a queue's letters are compared with."""
    after = ordered(checkpoint.compared[0]) if checkpoint.compared else ()
    ids: set[str] = set()
    for name in destination.files(partition.queue_folder(checkpoint.queue)):
        held = partition.range_of(name.rpartition("/")[2])
        if held and held.generation < checkpoint.generation and ordered(held.last) > after:
            ids.update(_ids(destination, name, ["id"]))
    return ids


def _ids(destination: Destination, name: str, columns: list[str] | None = None) -> list[str]:
    """Read a file, or some of its columns, and return the ids of its letters."""
    ids: list[str] = []
    try:
        with destination.source(name) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns)
                ids += [text for text in table.column("id").to_pylist() if text is not None]
    except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
        raise ExportError(
            f"{destination.name}/{name} cannot be read back ({type(exc).__name__}): its letters "
            f"stay in their queue; restore the file, or remove it and export to a new folder"
        ) from exc
    return ids
