"""The letter of the same cause before another one, and the one after it."""

from __future__ import annotations

import time
from itertools import chain

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.letters import Letters
from celery_dlq.web.http import Call, Panel

SECONDS = 0.005
"""How long each of the two is looked for."""

_AT_ONCE = 50


def links(call: Call, letter: DeadLetter) -> Panel:
    """Links to both; to the list where one is too far away."""
    letters, queue = call.dlq.assembly.backend.letters, call.parts["queue"]
    entry = letters.entry(queue, letter.id)
    found = dict[str, str | None]()
    group = letters.overviews.group(queue, letter.fingerprint) if entry else None
    if entry is not None and group is not None:
        newest, alone = letter.id == group.example_id, group.letters == 1
        for way, known in (("newer", newest or alone), ("older", alone)):
            older = way == "older"
            found[way] = (
                "" if known else _next_letter(letters, queue, letter, entry[0], older=older)
            )
    return "neighbours.html", {"found": found, "fingerprint": letter.fingerprint}


def _next_letter(
    letters: Letters, queue: str, letter: DeadLetter, position: str, *, older: bool
) -> str | None:
    """The id of the next letter of the cause; empty if there is none, `None` if it is far away."""
    ends, wanted = time.monotonic() + SECONDS, letter.fingerprint.encode()
    pages = letters.fields(
        queue,
        after=None if older else position,
        until=position if older else None,
        page_size=_AT_ONCE,
        newest_first=older,
    )
    for place, fields in chain.from_iterable(pages):
        if place != position and fields.get(b"fingerprint") == wanted and fields.get(b"id"):
            return fields[b"id"].decode("utf-8", "replace")
        if time.monotonic() >= ends:
            return None
    return ""
