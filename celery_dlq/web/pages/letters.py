"""Letters: a list that stays where it is while letters arrive, and one letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, DLQError, NotFound
from celery_dlq.letters.links import WHEN, links_of
from celery_dlq.web import tree
from celery_dlq.web.http import RequestError, Response
from celery_dlq.web.pages.common import filter_of, frames_of, query_of, suppressed, unreadable

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry
    from celery_dlq.web.web import Call

PAGE = 50
DEADLINE_SECONDS = 1.0
MAX_BODY_SHOWN = 256 * 1024


def letters(call: Call) -> Response:
    """Show the letters of a queue that match a filter."""
    queue = call.parts["queue"]
    where = filter_of(call)
    reading = call.dlq.reading()
    page = reading.page(
        queue,
        where,
        cursor=call.request.value("cursor") or None,
        size=PAGE,
        deadline_seconds=DEADLINE_SECONDS,
    )
    rows = [_row(call, entry) for entry in page.entries]
    query = query_of(where)
    return call.page(
        "letters.html",
        section="overview",
        title=f"{queue}: letters",
        queue=queue,
        where=where,
        query=query,
        rows=rows,
        page=page,
        total=call.dlq.backend.letters.length(queue),
        newer=page.newer and call.link("letters", {**query, "cursor": page.newer}, queue=queue),
        older=page.older and call.link("letters", {**query, "cursor": page.older}, queue=queue),
    )


def _row(call: Call, entry: RawEntry) -> dict[str, Any]:
    """One letter of the list; its body is not shown."""
    try:
        letter = call.web.redaction.letter(entry.letter())
    except CorruptLetter as exc:
        return {"id": entry.key, "letter": None, "error": unreadable(call, exc), "arguments": ""}
    shown = ", ".join(
        text
        for text in (letter.args_json or letter.argsrepr, letter.kwargs_json or letter.kwargsrepr)
        if text and text not in ("[]", "{}", "()")
    )
    return {"id": entry.key, "letter": letter, "error": "", "arguments": shown}


def letter(call: Call) -> Response:
    """Show one letter; if it is gone, say how it ended."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    reading = call.dlq.reading()
    try:
        queue, entry = reading.entry(letter_id, queue)
    except NotFound as exc:
        return gone(call, queue, letter_id, exc)
    try:
        found = entry.letter()
    except CorruptLetter as exc:
        return call.page(
            "unreadable.html",
            section="overview",
            title=f"{queue}: entry {entry.position}",
            queue=queue,
            entry=entry,
            error=unreadable(call, exc),
            fields=call.web.redaction.fields(
                {
                    name.decode("utf-8", "backslashreplace"): _cut(value)
                    for name, value in list(entry.fields.items())[:50]
                }
            ),
        )
    shown = call.web.redaction.letter(found)
    group = suppressed(lambda: reading.group(queue, found.fingerprint), NotFound)
    return call.page(
        "letter.html",
        section="overview",
        title=f"{queue}: {shown.task_name or 'letter'} {shown.id[:8]}",
        queue=queue,
        letter=shown,
        group=group,
        exceptions=frames_of(shown),
        arguments=tree.arguments(shown),
        headers=tree.of(_mapping(shown, "headers"), "headers"),
        properties=tree.of(_mapping(shown, "properties"), "properties"),
        links=links_of(shown.content_type, shown.body),
        when=WHEN,
        trail=tree.trail(_mapping(shown, "headers")),
        editable=_editable(found),
    )


def body(call: Call) -> Response:
    """Give the message's body as it came, as a file."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    queue, entry = call.dlq.reading().entry(letter_id, queue)
    if call.web.redaction:
        raise RequestError(403, "expected no dlq_redact for the raw body, because it holds all")
    name = "".join(c for c in entry.key if c.isalnum() or c in "-_")[:60] or "letter"
    return Response(
        content_type="application/octet-stream",
        body=entry.fields.get(b"body", b""),
        headers=[("content-disposition", f'attachment; filename="{name}.body"')],
    )


def gone(call: Call, queue: str, letter_id: str, exc: NotFound) -> Response:
    """A letter that somebody knew: say who redrove or discarded letters of its queue lately."""
    call.dlq.reading().check_queue(queue)
    changes = [c for c in call.dlq.jobs().changes(limit=200) if c.target == queue][:5]
    return call.page(
        "gone.html",
        status=410,
        section="overview",
        title=f"{queue}: letter gone",
        queue=queue,
        letter_id=letter_id,
        text=str(exc),
        changes=changes,
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
    text = value[:1000].decode("utf-8", "backslashreplace")
    return text if len(value) <= 1000 else text + "…"  # noqa: PLR2004
