"""Files of the letters that a filter finds, made while they are sent."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, MissingExtra, NotFound
from celery_dlq.operations.selection import batches
from celery_dlq.web.http import RequestError, Response
from celery_dlq.web.pages.common import filter_of

if TYPE_CHECKING:
    from celery_dlq.operations.selection import RawEntry
    from celery_dlq.web.web import Call

MAX_LETTERS = 200_000
"""Letters in one file; `dlq export` has no limit."""

_LETTERS_PER_GROUP = 20_000
_CHUNK_BYTES = 256 * 1024


def export(call: Call) -> Response:
    """Give the letters as a file."""
    queue, form = call.parts["queue"], call.parts["format"]
    where = filter_of(call)
    found = call.dlq.reading().entries(queue, where, limit=MAX_LETTERS)
    if form == "jsonl":
        return _file(queue, "jsonl", "application/x-ndjson", _lines(call, found))
    if form != "parquet":
        raise NotFound(f"expected jsonl or parquet, got {form!r}")
    try:
        import pyarrow.parquet  # noqa: F401, PLC0415 - an extra
    except ImportError as exc:
        raise MissingExtra("a Parquet file", "pyarrow", "parquet") from exc
    if call.web.redaction:
        raise RequestError(
            403,
            "expected no dlq_redact for Parquet files from here, because they have whole messages; "
            "`dlq export --redact` writes files without",
        )
    return _file(queue, "parquet", "application/vnd.apache.parquet", _parquet(found))


def _file(queue: str, ending: str, kind: str, parts: Iterator[bytes]) -> Response:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in queue)[:60]
    disposition = f'attachment; filename="{name}.{ending}"'
    return Response(content_type=kind, body=parts, headers=[("content-disposition", disposition)])


def _lines(call: Call, found: Iterator[RawEntry]) -> Iterator[bytes]:
    for entry in found:
        with suppress(CorruptLetter):
            record: dict[str, Any] = call.web.redaction.letter(entry.letter()).to_json()
            yield json.dumps(record).encode() + b"\n"


def _parquet(found: Iterator[RawEntry]) -> Iterator[bytes]:
    import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

    from celery_dlq.export import table  # noqa: PLC0415 - the same

    handle, name = tempfile.mkstemp(prefix="celery_dlq-", suffix=".parquet")
    os.close(handle)
    path = Path(name)
    try:
        with pq.ParquetWriter(path, table.schema(), compression="zstd") as writer:
            letters = (entry for entry in found if entry.is_letter)
            for batch in batches(letters, _LETTERS_PER_GROUP):
                writer.write_table(table.table([entry.fields for entry in batch]))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
