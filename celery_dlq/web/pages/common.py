"""What several pages do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeVar

from celery_dlq.errors import CorruptLetter, DLQError
from celery_dlq.letters import printable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import iso
from celery_dlq.letters.tracebacks import Raised, raised
from celery_dlq.policies.checks import age_seconds
from celery_dlq.web.http import RequestError

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry
    from celery_dlq.store.records import Group
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

_Value = TypeVar("_Value")

MAX_TICKED = 200
MAX_LINES_CHARS = 200_000


def suppressed(read: Callable[[], _Value], *errors: type[DLQError]) -> _Value | None:
    """The result of a call; ``None`` if it raised one of the errors."""
    try:
        return read()
    except errors:
        return None


def confirmed(call: Call) -> bool:
    """True if the form comes from the page that says what it does."""
    return call.request.value("confirmed") == "yes"


def confirm(
    call: Call,
    *,
    title: str,
    button: str,
    facts: Sequence[tuple[str, str]],
    back: str,
    section: str = "overview",
    problem: str = "",
) -> Response:
    """Say what a form would do, before it does; the form comes back with ``confirmed``."""
    forms = call.web.options.forms
    ours = {"confirmed", forms.field if forms else ""}
    return call.page(
        "confirm.html",
        section=section,
        title=title,
        button=button,
        facts=facts,
        back=back,
        problem=problem,
        fields=[
            (name, value.replace("\r\n", "\n"))  # browsers send the lines of a text so
            for name, values in call.request.form.items()
            if name not in ours
            for value in values
        ],
    )


def check_text(what: str, text: str, limit: int) -> str:
    """Check a text that somebody typed."""
    text = text.strip()
    if not text or len(text) > limit:
        raise RequestError(
            400, f"expected {what} to have 1 to {limit:,} characters, got {len(text):,}"
        )
    return text


def filter_of(call: Call) -> LetterFilter:
    """The filter in the URL or the form; ticked letters are its ids."""
    fields = {**call.request.query, **call.request.form}
    query = {
        **_carried(call),
        **{
            name: [value.strip() for value in values]
            for name, values in fields.items()
            if name in LetterFilter.__slots__
        },
    }
    if call.request.value("only") == "ticked" and not any(query.get("ids", ())):
        raise RequestError(400, "expected letters to be ticked, got none; nothing was done")
    if len(query.get("ids", ())) > MAX_TICKED:
        raise RequestError(
            400, f"expected at most {MAX_TICKED} ticked letters, got {len(query['ids']):,}"
        )
    for name in ("since", "until"):  # "2h" is what people type
        if query.get(name) and (seconds := age_seconds(query[name][-1])) is not None:
            query[name] = [iso(datetime.now(timezone.utc) - timedelta(seconds=seconds)) or ""]
    try:
        return LetterFilter.from_query(query)
    except (DLQError, ValueError, OverflowError) as exc:
        raise RequestError(400, str(exc)) from exc


def _carried(call: Call) -> dict[str, list[str]]:
    """The filter of the page from which a form comes, byte for byte."""
    text = call.request.value("where")
    try:
        found = json.loads(text or "{}")
        if all(isinstance(one, str) for values in found.values() for one in values):
            return {str(name): list(values) for name, values in found.items()}
    except (ValueError, RecursionError, AttributeError, TypeError):
        pass
    raise RequestError(400, "expected the filter of a page of ours, got another")


def query_of(where: LetterFilter) -> dict[str, list[str]]:
    """A filter as fields of a URL or form."""
    return suppressed(where.to_query, DLQError) or {}


def json_text(value: object) -> str:
    """A value as JSON in lines; in one where its indents would be most of the text."""
    lines = printable.json_text(value, indent=2)
    return lines if len(lines) < MAX_LINES_CHARS else printable.json_text(value)


def unreadable(call: Call, exc: CorruptLetter) -> str:
    """Why an entry is no letter; the reason may quote the entry."""
    return "an entry that cannot be read" if call.web.redaction else str(exc)


def outlined(call: Call, entry: RawEntry) -> dict[str, str]:
    """What a list says about a letter: a description may quote what the arguments hide."""
    description = entry.text("description")
    if call.web.redaction:
        letter = suppressed(entry.letter, CorruptLetter)
        shown = "" if letter is None else call.web.redaction.letter(letter).description
        description = shown or ""
    return {
        "id": entry.key,
        "task_name": entry.text("task_name"),
        "reason": entry.text("reason"),
        "description": description,
    }


def columns_of_day(group: Group) -> list[tuple[str, dict[str, int]]]:
    """A group's letters in each of the last 24 hours, for bars."""
    now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    return [
        (
            f"{now - timedelta(hours=len(group.course) - 1 - number):%d %b %H:00} UTC",
            {group.reason: letters} if letters else {},
        )
        for number, letters in enumerate(group.course)
    ]


def frames_of(letter: DeadLetter | None) -> Sequence[Raised]:
    """The exceptions of a letter's traceback, the one that escaped first."""
    return [] if letter is None or not letter.traceback else raised(letter.traceback)[::-1]
