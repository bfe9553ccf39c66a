"""Letters: a list that stays where it is while letters arrive, one letter, and files of many."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import CorruptLetter, DLQError, NotFound
from celery_dlq.letters.conditions import MAX_CHARS
from celery_dlq.letters.conditions import MAX_DEPTH as MAX_CONDITION_DEPTH
from celery_dlq.letters.facts import facts_of
from celery_dlq.letters.headers import REDRIVE_HEADER
from celery_dlq.letters.links import MAX_PARSED_BYTES, WHEN, links_of
from celery_dlq.letters.printable import json_text, shortened
from celery_dlq.letters.redriven import lives_of
from celery_dlq.letters.replacing import MARKER
from celery_dlq.operations.edit import edits_of
from celery_dlq.web.http import Call, Page, RequestError
from celery_dlq.web.pages import Row, filter_of, frames_of, gone_page, query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry

PAGE = 50
MAX_BODY_SHOWN = 256 * 1024
MAX_FIELDS_SHOWN = 50
MAX_FIELD_SHOWN = 1000
MAX_LETTERS = 200_000
"""Letters in one file; `dlq export` has no limit."""

MAX_NODES = 2000
MAX_DEPTH = 40
MAX_CHILDREN = 200
MAX_TEXT = 2000

_PLAIN = re.compile(r"[A-Za-z_][\w-]*")


def letters(call: Call) -> Page:
    """Show the letters of a queue that match a filter."""
    queue = call.parts["queue"]
    where = filter_of(call)
    page = call.dlq.page(
        queue,
        where,
        cursor=call.value("cursor") or None,
        size=PAGE,
        deadline_seconds=timing.current.page,
    )
    return call.page(
        "letters.html",
        title=f"{queue}: letters",
        where=where,
        query=query_of(where),
        rows=[Row.of(call, entry) for entry in page.entries],
        page=page,
        total=call.dlq.store.length(queue),
    )


def letter(call: Call) -> Page:
    """Show one letter; if it is gone, say how it ended."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        queue, entry = call.dlq.entry(letter_id, queue, whole=True)
    except NotFound as exc:
        return gone_page(call, exc)
    row = Row.of(call, entry)
    if row.letter is None:
        fields = {
            _text_of(name): _text_of(value)
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
    arguments, why_none = arguments_of(row.letter)
    shown, headers = row.letter, _mapping(row.letter, "headers")
    redriven_by = headers.get(REDRIVE_HEADER)
    return call.page(
        "letter.html",
        title=f"{queue}: {shown.task_name or 'letter'} {shown.id[:8]}",
        queue=queue,
        letter=shown,
        facts=facts_of(shown),
        group=suppressed(lambda: call.dlq.group(queue, shown.fingerprint), NotFound),
        exceptions=frames_of(shown),
        arguments=arguments,
        why_none=why_none,
        headers=tree_of(headers, "headers"),
        properties=tree_of(_mapping(shown, "properties"), "properties"),
        links=links_of(shown.content_type, shown.body),
        when=WHEN,
        edits=edits_of(headers),
        lives=lives_of(headers),
        redriven_by=redriven_by if isinstance(redriven_by, str) else "",
        editable=len(shown.body) <= MAX_BODY_SHOWN
        and suppressed(lambda: call.dlq.arguments(entry.key, queue), DLQError) is not None,
    )


def body(call: Call) -> Page:
    """Give the message's body as it came, as a file."""
    _, entry = call.dlq.entry(call.parts["letter"], call.parts["queue"], whole=True)
    if call.dlq.redaction:
        raise RequestError(403, "expected no dlq_redact, got one: the raw body shows every value")
    content = entry.fields.get(b"body", b"")
    return _file_page(entry.key, "body", "application/octet-stream", content)


def _mapping(found: DeadLetter, name: str) -> dict[str, Any]:
    try:
        value = found.decoded(name)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text_of(value: bytes) -> str:
    text = value[: MAX_FIELD_SHOWN + 1].decode("utf-8", "backslashreplace")
    return shortened(text, MAX_FIELD_SHOWN)


# -- Values of a message as trees: a publisher chooses them, so one may be nested a thousand deep --


@dataclass(slots=True, kw_only=True)
class Node:
    """A value of the arguments as the page draws it, with what is below it."""

    key: str  # Its name in its mapping, or its number in its list
    path: str  # How a filter or an edit names it, e.g. `kwargs.order.id`
    text: str = ""  # The value as JSON; empty for a mapping or list
    kind: str = "value"  # `mapping`, `list` or `value`
    size: int = 0  # Number of children, shown or not
    children: list[Node] = field(default_factory=list)  # Those that are shown
    filter: str = ""  # A condition that finds letters with this value; empty if there is none


def tree_of(value: Any, name: str) -> Node:
    """Make the tree of a value."""
    return _make_node(value, name, name, 0, iter(range(MAX_NODES)))


def arguments_of(letter: DeadLetter) -> tuple[list[Node], str]:
    """The trees of the arguments of a letter that is masked already; or why there are none."""
    if letter.args_json is None and letter.kwargs_json is None:
        return [], "The body is not plain JSON of Celery."
    texts = {"args": letter.args_json or "[]", "kwargs": letter.kwargs_json or "{}"}
    if sum(map(len, texts.values())) > MAX_PARSED_BYTES:
        return [], "The arguments are larger than 256 KB; the body can be downloaded."
    try:
        return [tree_of(json.loads(text), name) for name, text in texts.items()], ""
    except (ValueError, RecursionError):
        return [], "The arguments cannot be read."


def _make_node(value: Any, key: str, path: str, depth: int, budget: Iterator[int]) -> Node:
    """A value and what is below it, as long as the budget of nodes lasts."""
    if isinstance(value, (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        node = Node(key=key, path=path, kind=kind, size=len(value))
        found = value.items() if isinstance(value, dict) else enumerate(value)
        shown = islice(found, MAX_CHILDREN if depth < MAX_DEPTH else 0)
        for (name, one), _ in zip(shown, budget, strict=False):
            below = f"{path}{_path_step(name)}"
            node.children.append(_make_node(one, str(name), below, depth + 1, budget))
        return node
    text = json_text(value)
    condition = f"{path}={text}"
    usable = (
        len(condition) <= MAX_CHARS
        and depth <= MAX_CONDITION_DEPTH
        and value != MARKER
        and path.startswith(("args", "kwargs", "headers"))  # no conditions on properties
    )
    return Node(
        key=key, path=path, text=shortened(text, MAX_TEXT), filter=condition if usable else ""
    )


def _path_step(key: str | int) -> str:
    """A name as the conditions of a filter spell it."""
    plain = isinstance(key, str) and _PLAIN.fullmatch(key)
    return f".{key}" if plain else f"[{json.dumps(key)}]"


# -- Letters as a file ---------------------------------------------------------------------------


def export(call: Call) -> Page:
    """Give the letters as a file, a JSON object a line."""
    queue, form = call.parts["queue"], call.parts["format"]
    if form != "jsonl":
        raise NotFound(f"expected jsonl, got {form!r}; `dlq export` writes Parquet")
    found = call.dlq.entries(queue, filter_of(call), limit=MAX_LETTERS)
    return _file_page(queue, "jsonl", "application/x-ndjson", _json_lines(call, found))


def _file_page(queue: str, ending: str, kind: str, content: bytes | Iterator[bytes]) -> Page:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in queue)[:60]
    disposition = f'attachment; filename="{name}.{ending}"'
    return Page(content_type=kind, body=content, headers={"content-disposition": disposition})


def _json_lines(call: Call, found: Iterator[RawEntry]) -> Iterator[bytes]:
    for entry in found:
        with suppress(CorruptLetter):
            record: dict[str, Any] = call.masked(entry).to_json()
            yield json.dumps(record).encode() + b"\n"
