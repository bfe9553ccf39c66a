"""Files of the letters that a filter finds, made while they are sent."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, NotFound
from celery_dlq.operations.redrive.select import batches
from celery_dlq.web.http import RequestError, Response
from celery_dlq.web.pages.common import filter_of

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.select import RawEntry
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
    import celery_dlq.export.table  # noqa: F401, PLC0415 - says now if its extra is missing

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
    from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra

    handle, name = tempfile.mkstemp(prefix="celery_dlq-", suffix=".parquet")
    os.close(handle)
    path = Path(name)
    try:
        letters = (entry for entry in found if entry.is_letter)
        groups = batches(letters, _LETTERS_PER_GROUP)
        table.write_file(path, ([entry.fields for entry in group] for group in groups))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
