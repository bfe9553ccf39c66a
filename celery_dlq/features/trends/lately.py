"""What a hold would have caught lately, by the letters of its messages: said before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_dlq import timing
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.templating import duration

_LATELY, _MOST_QUEUES, _MOST_COUNTED = timedelta(minutes=10), 10, 2_000


def before(call: Call, route: str) -> Panel:
    """What is said before a change that a form asks for: nothing but before a hold."""
    return "caught.html", _caught(call) if route == "hold" else {"lately": ""}


def _caught(call: Call) -> Mapping[str, Any]:
    """How many of its messages died lately, in the busiest queues."""
    task, queue = call.typed("task") or None, call.typed("queue") or None
    where = tuple(one.strip() for one in call.form.get("where", ()) if one.strip())
    tasks, _queues = call.dlq.check_hold(task, queue=queue, conditions=where)
    now, reading = datetime.now(timezone.utc), call.dlq.assembly.reading()
    meant = LetterFilter(since=now - _LATELY, conditions=where)
    names = [*reading.busiest()][:_MOST_QUEUES]
    seconds = timing.current.page / max(1, len(names))
    pages = [reading.page(x, meant, size=_MOST_COUNTED, deadline_seconds=seconds) for x in names]
    died = [
        entry
        for page in pages
        for entry in page.entries
        if entry.text("task_name") in tasks and queue in (None, entry.text("source_queue"))
    ]
    cut = (not one.complete or len(one.entries) >= _MOST_COUNTED for one in pages)
    return {"died": len(died), "more": any(cut), "lately": duration(_LATELY)}
