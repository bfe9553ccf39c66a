"""The field at the top of every page, the page of what was found, and completions for the field."""

from __future__ import annotations

import json
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.features.search.completion import completions
from celery_dlq.features.search.finding import MOST, MOST_COUNTED, Finder, Found
from celery_dlq.features.search.words import WORDS, parsed
from celery_dlq.operations.reading import ID_LENGTH
from celery_dlq.web.http import Call, Page, Panel, get
from celery_dlq.web.pages import Row, page_of, query_of

_ROWS = 3
"""Letters of a queue that are shown; its list has them all."""


def field(call: Call, _subject: Any) -> Panel:
    """The field; a page of results keeps what was typed."""
    typed = call.typed("q") if call.route is not None and call.route.name == "find" else ""
    return "search_field.html", {"typed": typed, "words": [f"{word}=" for word in WORDS]}


def find(call: Call) -> Page:
    """Show what was found; a whole id of a letter leads to the letter."""
    typed, found, problem = call.typed("q"), Found(), ""
    first = page_of(call) - 1
    try:
        asked = parsed(typed)
        if asked.text or asked.where or asked.queue:
            found = Finder(call.dlq.assembly).find(asked, first)
    except DLQError as exc:
        problem = str(exc)
    if len(found.by_id) == 1 and len(typed) == ID_LENGTH and not found.of_task:
        queue, entry = found.by_id[0]
        return call.to("letter", queue=queue, letter=entry.key)
    return call.page(
        "search.html",
        status=400 if problem else 200,
        title=f"Find {typed[:60]}".strip(),
        typed=typed,
        found=found,
        by_id=[(queue, Row.of(call, entry)) for queue, entry in found.by_id],
        letters=[
            (one, query_of(one.where), [Row.of(call, entry) for entry in one.entries[:_ROWS]])
            for one in found.letters
        ],
        most=MOST,
        most_counted=MOST_COUNTED,
        problem=problem,
    )


def words(call: Call) -> Page:
    """Give what the field may become, as a list of texts."""
    found = completions(call.dlq, call.value("q"))
    return Page(content_type="application/json", body=json.dumps(found).encode())


ROUTES = (get("/find", find), get("/find/words", words, name="find_words"))
