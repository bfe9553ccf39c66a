"""The schema of a folder, beside its files: readers of old and new files need not guess.

``_celery_dlq/schema`` is a Parquet file without rows, which every tool reads. It has the columns of
all files: an export adds those that are new in its version, and keeps those that a later version
has added.
"""

from __future__ import annotations

from typing import Any

from celery_dlq.export import table
from celery_dlq.export.arrow import pa, pq
from celery_dlq.export.destination import NOTES, Destination

PLACE = f"{NOTES}/schema"
_VERSION = b"celery_dlq.schema_version"


def publish(destination: Destination) -> None:
    """Write the schema if the folder has none, or one that lacks columns."""
    before = _parsed_schema(destination.load(PLACE))
    schema = table.schema() if before is None else _merged_schema(before, table.schema())
    if before is None or not before.equals(schema, check_metadata=True):
        sink = pa.BufferOutputStream()
        pq.write_table(schema.empty_table(), sink)
        destination.save(PLACE, sink.getvalue().to_pybytes())


def _parsed_schema(text: bytes | None) -> Any | None:
    """A schema; ``None`` if there is none, or a damaged one, which is replaced."""
    try:
        return None if text is None else pq.read_schema(pa.BufferReader(text))
    except (pa.ArrowException, OSError):
        return None


def _merged_schema(before: Any, ours: Any) -> Any:
    """Our columns, then those of a later version."""
    more = [field for field in before if field.name not in ours.names]
    # Another tool may have written the file anew.
    texts = [(one.metadata or {}).get(_VERSION, b"0") for one in (before, ours)]
    versions = [int(text) if text.isdigit() else 0 for text in texts]
    return pa.schema([*ours, *more], metadata={_VERSION: str(max(versions)).encode()})
