"""What several pages do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dlq.contrib.tracebacks import Raised, raised
from celery_dlq.errors import DLQError
from celery_dlq.filters import LetterFilter
from celery_dlq.web.http import RequestError

if TYPE_CHECKING:
    from celery_dlq.record import DeadLetter
    from celery_dlq.web.web import Call

_Value = TypeVar("_Value")

MAX_TICKED = 200


def suppressed(read: Callable[[], _Value], *errors: type[DLQError]) -> _Value | None:
    """The result of a call; ``None`` if it raised one of the errors."""
    try:
        return read()
    except errors:
        return None


def check_text(what: str, text: str, limit: int) -> str:
    """Check a text that somebody typed.

    Raises:
        RequestError: It is empty or too long.
    """
    text = text.strip()
    if not text or len(text) > limit:
        raise RequestError(
            400, f"expected {what} to have 1 to {limit:,} characters, got {len(text):,}"
        )
    return text


def filter_of(call: Call) -> LetterFilter:
    """The filter in the URL or the form; ticked letters are its ids.

    Raises:
        RequestError: A field is malformed.
    """
    request = call.request
    fields = {**request.query, **request.form}
    query = {name: [v for v in values if v.strip()] for name, values in fields.items()}
    ids = query.pop("id", [])
    if len(ids) > MAX_TICKED:
        raise RequestError(400, f"expected at most {MAX_TICKED} ticked letters, got {len(ids):,}")
    try:
        where = LetterFilter.from_query(
            {k: v for k, v in query.items() if k in FILTER_FIELDS and v}
        )
    except DLQError as exc:
        raise RequestError(400, str(exc)) from exc
    if not ids:
        return where
    return LetterFilter.from_json({**where.to_json(), "ids": ids})


FILTER_FIELDS = (
    "reason",
    "task_name",
    "fingerprint",
    "exception_type",
    "worker_hostname",
    "since",
    "until",
    "grep",
    "release",
    "root_id",
    "group_id",
    "min_deliveries",
    "where",
)


def query_of(where: LetterFilter) -> dict[str, list[str]]:
    """A filter as fields of a URL or form."""
    query = {name: list(values) for name, values in where.to_query().items() if name != "ids"}
    if where.ids is not None:
        query["id"] = sorted(where.ids)
    return query


def columns_of_day(group: Any) -> list[tuple[str, dict[str, int]]]:
    """A group's letters in each of the last 24 hours, for bars."""
    hour = int(datetime.now(timezone.utc).timestamp()) // 3600
    columns = []
    for at in range(hour - 23, hour + 1):
        start = datetime.fromtimestamp(at * 3600, timezone.utc)
        letters = int(group.course.get(at, 0))
        columns.append((f"{start:%d %b %H:00} UTC", {group.reason: letters} if letters else {}))
    return columns


def frames_of(letter: DeadLetter | None) -> Sequence[Raised]:
    """The exceptions of a letter's traceback, the one that escaped first."""
    return [] if letter is None or not letter.traceback else raised(letter.traceback)[::-1]
