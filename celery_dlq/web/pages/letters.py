"""Letters: a list that stays where it is while letters arrive, one letter, and files of many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, DLQError, NotFound
from celery_dlq.letters.headers import REDRIVE_HEADER
from celery_dlq.letters.links import WHEN, links_of
from celery_dlq.operations.redrive.select import batches
from celery_dlq.web import tree
from celery_dlq.web.http import Call, Page, RequestError
from celery_dlq.web.pages.parts import Row, filter_of, frames_of, gone, query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry

PAGE = 50
DEADLINE_SECONDS = 1.0
MAX_BODY_SHOWN = 256 * 1024
MAX_FIELDS_SHOWN = 50
MAX_FIELD_SHOWN = 1000
MAX_LETTERS = 200_000
"""Letters in one file; `dlq export` has no limit."""

_LETTERS_PER_GROUP = 20_000
_CHUNK_BYTES = 256 * 1024


def letters(call: Call) -> Page:
    """Show the letters of a queue that match a filter."""
    queue = call.parts["queue"]
    where = filter_of(call)
    page = call.dlq.page(
        queue,
        where,
        cursor=call.value("cursor") or None,
        size=PAGE,
        deadline_seconds=DEADLINE_SECONDS,
    )
    rows = [Row.of(call, entry) for entry in page.entries]
    query = query_of(where)
    return call.page(
        "letters.html",
        title=f"{queue}: letters",
        where=where,
        query=query,
        rows=rows,
        page=page,
        total=call.dlq.store.length(queue),
        newer=page.newer and call.link("letters", {**query, "cursor": page.newer}, queue=queue),
        older=page.older and call.link("letters", {**query, "cursor": page.older}, queue=queue),
    )


def letter(call: Call) -> Page:
    """Show one letter; if it is gone, say how it ended."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        queue, entry = call.dlq.entry(letter_id, queue)
    except NotFound as exc:
        return gone(call, exc)
    row = Row.of(call, entry)
    if row.letter is None:
        fields = {
            name.decode("utf-8", "backslashreplace"): _cut(value)
            for name, value in list(entry.fields.items())[:MAX_FIELDS_SHOWN]
        }
        return call.page(
            "unreadable.html",
            title=f"{queue}: entry {entry.position}",
            queue=queue,
            entry=entry,
            error=row.error,
            fields=call.dlq.redaction.fields(fields),
        )
    shown, headers = row.letter, _mapping(row.letter, "headers")
    redriven_by = headers.get(REDRIVE_HEADER)
    return call.page(
        "letter.html",
        title=f"{queue}: {shown.task_name or 'letter'} {shown.id[:8]}",
        queue=queue,
        letter=shown,
        group=suppressed(lambda: call.dlq.group(queue, shown.fingerprint), NotFound),
        exceptions=frames_of(shown),
        arguments=tree.arguments(shown),
        headers=tree.of(headers, "headers"),
        properties=tree.of(_mapping(shown, "properties"), "properties"),
        links=links_of(shown.content_type, shown.body),
        when=WHEN,
        edits=tree.edits(headers),
        redriven_by=redriven_by if isinstance(redriven_by, str) else "",
        editable=_editable(shown),
    )


def body(call: Call) -> Page:
    """Give the message's body as it came, as a file."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    queue, entry = call.dlq.entry(letter_id, queue)
    if call.dlq.redaction:
        raise RequestError(403, "expected no dlq_redact for the raw body, because it holds all")
    name = "".join(c for c in entry.key if c.isalnum() or c in "-_")[:60] or "letter"
    return Page(
        content_type="application/octet-stream",
        body=entry.fields.get(b"body", b""),
        headers=[("content-disposition", f'attachment; filename="{name}.body"')],
    )


def _mapping(found: DeadLetter, name: str) -> dict[str, Any]:
    try:
        value = found.decoded(name)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _editable(found: DeadLetter) -> bool:
    if len(found.body) > MAX_BODY_SHOWN:
        return False
    from celery_dlq.operations.edit import arguments  # noqa: PLC0415

    try:
        arguments(found.content_type, found.body, _mapping(found, "headers"))
    except DLQError:
        return False
    return True


def _cut(value: bytes) -> str:
    text = value[:MAX_FIELD_SHOWN].decode("utf-8", "backslashreplace")
    return text if len(value) <= MAX_FIELD_SHOWN else text + "…"


def export(call: Call) -> Page:
    """Give the letters as a file."""
    queue, form = call.parts["queue"], call.parts["format"]
    where = filter_of(call)
    found = call.dlq.entries(queue, where, limit=MAX_LETTERS)
    if form == "jsonl":
        return _file(queue, "jsonl", "application/x-ndjson", _lines(call, found))
    if form != "parquet":
        raise NotFound(f"expected jsonl or parquet, got {form!r}")
    import celery_dlq.export.table  # noqa: F401, PLC0415 - says now if its extra is missing

    if call.dlq.redaction:
        raise RequestError(
            403,
            "expected no dlq_redact for Parquet files from here, because they have whole messages; "
            "`dlq export --redact` writes files without",
        )
    return _file(queue, "parquet", "application/vnd.apache.parquet", _parquet(found))


def _file(queue: str, ending: str, kind: str, parts: Iterator[bytes]) -> Page:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in queue)[:60]
    disposition = f'attachment; filename="{name}.{ending}"'
    return Page(content_type=kind, body=parts, headers=[("content-disposition", disposition)])


def _lines(call: Call, found: Iterator[RawEntry]) -> Iterator[bytes]:
    for entry in found:
        with suppress(CorruptLetter):
            record: dict[str, Any] = call.masked(entry).to_json()
            yield json.dumps(record).encode() + b"\n"


def _parquet(found: Iterator[RawEntry]) -> Iterator[bytes]:
    from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra

    with TemporaryDirectory(prefix="celery_dlq-") as folder:
        path = Path(folder) / "letters.parquet"
        letters = (entry for entry in found if entry.is_letter)
        groups = batches(letters, _LETTERS_PER_GROUP)
        table.write_file(path, ([entry.fields for entry in group] for group in groups))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
