"""Removal of exported letters from their queue, after their files were read back."""

from __future__ import annotations

from celery_dlq.backends.base import DeadLetterStore, ordered
from celery_dlq.errors import ExportError, MissingExtra
from celery_dlq.export import partition
from celery_dlq.export.checkpoint import Checkpoint
from celery_dlq.export.destination import Destination

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc


def trim(store: DeadLetterStore, destination: Destination, checkpoint: Checkpoint) -> int:
    """Remove the letters of the files that were put in place since the last trim.

    Only the content of the files counts: every page of a file is read back and its checksum
    verified before its letters are removed. Letters of a file that was deleted stay in the queue.

    Returns:
        The number of letters removed.

    Raises:
        ExportError: A file cannot be read back; its letters stay in their queue.
    """
    until, after = checkpoint.position, checkpoint.trimmed
    if until is None or until == after:
        return 0
    removed = 0
    for name in destination.files(partition.queue_folder(checkpoint.queue)):
        held = partition.range_of(name.rpartition("/")[2])
        if held is None or ordered(held[1]) > ordered(until):
            continue
        if after is None or ordered(held[1]) > ordered(after):
            removed += store.remove(checkpoint.queue, _ids(destination, name))
    checkpoint.trim(until)
    return removed


def _ids(destination: Destination, name: str) -> list[str]:
    """Read a whole file and return the ids of its letters."""
    ids: list[str] = []
    try:
        with destination.source(name) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group)
                ids += [text for text in table.column("id").to_pylist() if text is not None]
    except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
        raise ExportError(
            f"{destination.name}/{name} cannot be read back ({type(exc).__name__}), so its letters "
            f"are not removed; they stay in their queue"
        ) from exc
    return ids
