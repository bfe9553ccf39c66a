"""Letters removed from their queue once they were found in the files."""

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
    """Remove the letters of files that are in place and were not asked about before.

    What the files hold decides, not what the exporter remembers: every page of a file is read
    back and its checksum compared before one letter of it is removed. Letters of a file that
    somebody took away stay in the queue.

    Returns:
        How many letters were there to be removed.

    Raises:
        ExportError: A file does not read; nothing of it was removed.
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
    """The ids of a file's letters, after all of it was read."""
    ids: list[str] = []
    try:
        with destination.source(name) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group)
                ids += [text for text in table.column("id").to_pylist() if text is not None]
    except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
        raise ExportError(
            f"expected {destination.name}/{name} to be read back before its letters are removed, "
            f"got {type(exc).__name__}; they stay in their queue"
        ) from exc
    return ids
