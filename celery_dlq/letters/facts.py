"""The facts of a letter, as ``dlq show`` and its page list them; a new field is there by itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from celery_dlq.letters.record import DeadLetter, Kind, record_fields

_LISTED = frozenset({Kind.TEXT, Kind.INTEGER, Kind.BOOLEAN, Kind.TIME})
_ELSEWHERE = (
    # In `_looked_for`
    *("id", "task_id", "source_queue", "dead_letter_queue", "dead_lettered_at", "description"),
    *("exception_type", "deliveries", "max_deliveries", "retries", "max_retries"),
    *("worker_hostname", "worker_pid"),
    # In another part of the page, or in no part of it
    *("schema_version", "task_name", "reason", "exception_message", "traceback", "content_type"),
    *("content_encoding", "exchange", "routing_key"),
    *("args_json", "kwargs_json", "argsrepr", "kwargsrepr"),
)


def facts_of(letter: DeadLetter) -> Iterator[tuple[str, str | datetime]]:
    """Name and value of each fact that is known: what people look for first, then the others."""
    yield from ((name, value) for name, value in _looked_for(letter).items() if value)
    for name, field in record_fields().items():
        value = getattr(letter, name)
        same = field.same_as and value == getattr(letter, field.same_as)
        if (
            field.kind in _LISTED
            and name not in _ELSEWHERE
            and value not in (None, "")
            and not same
        ):
            shown = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            label = name.removesuffix("_at").replace("_", " ")
            yield label, value if isinstance(value, datetime) else shown


def _looked_for(letter: DeadLetter) -> dict[str, str | datetime]:
    process = "" if letter.worker_pid is None else f" (pid {letter.worker_pid})"
    return {
        "letter": letter.id,
        "task id": letter.task_id,
        "queue": f"{letter.source_queue or 'unknown'} → {letter.dead_letter_queue}",
        "died": letter.dead_lettered_at,
        "description": letter.description,
        "exception": letter.exception_type or "",
        "deliveries": f"{count_of(letter.deliveries, letter.max_deliveries)}, of this message",
        "retries": f"{count_of(letter.retries, letter.max_retries)}, of this task",
        "worker": f"{letter.worker_hostname or ''}{process}",
    }


def count_of(count: int, limit: int | None) -> str:
    """A count, and the limit that it has."""
    return f"{count}" if limit is None else f"{count} of {limit}"
