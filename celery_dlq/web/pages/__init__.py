"""What several pages do: filters, the page that asks before a change, and parts of letters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeVar

from celery_dlq.errors import CorruptLetter, DLQError, NotFound
from celery_dlq.letters import printable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import iso
from celery_dlq.letters.tracebacks import Raised, raised_exceptions
from celery_dlq.policies.checks import age_seconds, duration_seconds
from celery_dlq.web.http import MAX_TICKED, Call, Page, RequestError

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.redrive.select import RawEntry

_Value = TypeVar("_Value")

MOST_PAGES = 10_000
MAX_LINES_CHARS = 200_000


def suppressed(read: Callable[[], _Value], *errors: type[DLQError]) -> _Value | None:
    """The result of a call; ``None`` if it raised one of the errors."""
    try:
        return read()
    except errors:
        return None


def confirm(
    call: Call,
    change: Callable[[], object],
    *,
    title: str,
    button: str,
    facts: Mapping[str, str],
    back: str,
    to: str = "",
    problem: str = "",
) -> Page:
    """Say what a form would do; once it comes back with ``confirmed``, do that."""
    if call.value("confirmed") == "yes" and not problem:
        change()
        return Page(status=303, headers={"location": to or back})
    return call.page(
        "confirm.html",
        title=title,
        button=button,
        facts=facts,
        back=back,
        problem=problem,
        fields=[
            (name, value.replace("\r\n", "\n"))  # browsers send the lines of a text so
            for name, values in call.form.items()
            if name not in ("confirmed", call.token_field)
            for value in values
        ],
    )


def gone_page(call: Call, exc: NotFound) -> Page:
    """A letter that somebody knew: say who redrove or discarded letters of its queue lately."""
    queue = call.parts["queue"]
    if queue not in call.dlq.store.names():
        raise exc
    return call.page(
        "gone.html",
        status=410,
        title=f"{queue}: letter gone",
        text=str(exc),
        changes=[one for one in call.dlq.changes(limit=200) if one.target == queue][:5],
    )


def span_of(call: Call) -> timedelta | None:
    """The time span in the field ``for``; ``None`` if it is empty."""
    text = call.typed("for")
    seconds = duration_seconds(text)
    if text and not seconds:
        raise RequestError(400, f"expected a time such as 30m, 2h or 7d, got {text[:80]!r}")
    return timedelta(seconds=seconds) if seconds else None


def page_of(call: Call) -> int:
    """The number of the page that is asked for."""
    text = call.typed("page") or "1"
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) <= MOST_PAGES):
        raise RequestError(400, f"expected a page from 1 to {MOST_PAGES:,}, got {text[:80]!r}")
    return int(text)


def filter_of(call: Call) -> LetterFilter:
    """The filter in the URL or the form; ticked letters are its ids."""
    fields = {**call.query, **call.form}
    query = {
        **_carried(call),
        **{
            name: [value.strip() for value in values]
            for name, values in fields.items()
            if name in LetterFilter.__slots__
        },
    }
    if call.value("only") == "ticked" and not any(query.get("ids", ())):
        raise RequestError(400, "expected letters to be ticked, got none; nothing was done")
    if (ticked := len(query.get("ids", ()))) > MAX_TICKED:
        raise RequestError(400, f"expected at most {MAX_TICKED} ticked letters, got {ticked:,}")
    for name in ("since", "until"):  # "2h" is what people type
        if query.get(name) and (seconds := age_seconds(query[name][-1])) is not None:
            query[name] = [iso(datetime.now(timezone.utc) - timedelta(seconds=seconds)) or ""]
    try:
        return LetterFilter.from_query(query)
    except (DLQError, ValueError, OverflowError) as exc:
        raise RequestError(400, str(exc)) from exc


def _carried(call: Call) -> dict[str, list[str]]:
    """The filter of the page from which a form comes, byte for byte."""
    text = call.value("where")
    try:
        found = json.loads(text or "{}")
        if all(isinstance(one, str) for values in found.values() for one in values):
            return {str(name): list(values) for name, values in found.items()}
    except (ValueError, RecursionError, AttributeError, TypeError):
        pass
    raise RequestError(400, "expected a filter that these pages made, got another")


def query_of(where: LetterFilter) -> dict[str, list[str]]:
    """A filter as fields of a URL or form."""
    return suppressed(where.to_query, DLQError) or {}


def json_text(value: object) -> str:
    """A value as JSON in lines; in one where its indents would be most of the text."""
    lines = printable.json_text(value, indent=2)
    return lines if len(lines) < MAX_LINES_CHARS else printable.json_text(value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a list says about an entry."""

    id: str
    letter: DeadLetter | None  # Masked; none for an entry that is no letter
    error: str = ""  # Why it is none

    @classmethod
    def of(cls, call: Call, entry: RawEntry) -> Row:
        """The row of an entry; a reason why it cannot be read may quote it."""
        try:
            return cls(id=entry.key, letter=call.masked(entry))
        except CorruptLetter as exc:
            error = "an entry that cannot be read" if call.dlq.redaction else str(exc)
            return cls(id=entry.key, letter=None, error=error)

    @property
    def task_name(self) -> str:
        """The task; a name for what has none."""
        return (self.letter and self.letter.task_name) or "no task"

    @property
    def reason(self) -> str:
        """Why it died."""
        return self.letter.reason.value if self.letter else ""

    @property
    def description(self) -> str:
        """What happened."""
        return (self.letter.description or "") if self.letter else self.error


def frames_of(letter: DeadLetter | None) -> Sequence[Raised]:
    """The exceptions of a letter's traceback, the one that escaped first."""
    return (
        [] if letter is None or not letter.traceback else raised_exceptions(letter.traceback)[::-1]
    )
