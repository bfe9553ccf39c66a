"""Forms that begin a change: redrive, discard, edit. Each makes a plan; its job page starts it."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from celery_dlq.errors import BrokerUnavailable, DLQError, NotFound, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable_json
from celery_dlq.operations.edit import Edit
from celery_dlq.web.http import Call, Page, RequestError
from celery_dlq.web.pages.letters import gone
from celery_dlq.web.pages.parts import Row, confirm, confirmed, filter_of, json_text, query_of

COUNTED = 10_000
COUNT_SECONDS = 1.0
MAX_DISCARDED_SCANNED = 10_000


def redrive_form(call: Call) -> Page:
    """Ask how letters are to be redriven."""
    return _form(call, "redrive")


def discard_form(call: Call) -> Page:
    """Ask how letters are to be discarded."""
    return _form(call, "discard")


def _form(call: Call, kind: str) -> Page:
    queue, where = call.parts["queue"], filter_of(call)
    letters, exact = call.dlq.count(queue, where, most=COUNTED, deadline_seconds=COUNT_SECONDS)
    waits_for = call.dlq.waits_for(queue, where) if kind == "redrive" else ()
    return call.page(
        f"{kind}.html",
        section="overview",
        title=f"{kind.capitalize()} letters of {queue}",
        queue=queue,
        where=where,
        query=query_of(where),
        letters=letters,
        exact=exact,
        waits_for=waits_for,
    )


def plan_redrive(call: Call) -> Page:
    """Make the plan of a redrive."""
    value, wait = call.value, _number(call, "canary_wait")
    options = {
        "rate": _number(call, "rate", at_least=0.01),
        "limit": _whole(call, "limit"),
        "to_queue": value("to_queue").strip() or None,
        "delay": _number(call, "delay") or 0,
        "new_id": bool(value("new_id")),
        "keep_count": bool(value("keep_count")),
        "canary": _whole(call, "canary"),
        "max_failures": _whole(call, "max_failures", at_least=0) or 0,
        "canary_wait": 60 if wait is None else wait,
        "force": bool(value("force")),
    }
    return _planned(call, "redrive", options)


def plan_discard(call: Call) -> Page:
    """Make the plan of a discard."""
    return _planned(call, "discard", {"limit": _whole(call, "limit")})


def _planned(call: Call, kind: str, options: dict[str, Any]) -> Page:
    job = call.dlq.plan(kind, call.parts["queue"], filter_of(call), **options)
    return call.to("job", job=job.id)


def edit_form(call: Call) -> Page:
    """Show a message's arguments to be edited."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        return _edit_page(call, queue, letter_id)
    except NotFound as exc:
        return gone(call, queue, letter_id, exc)


def plan_edit(call: Call) -> Page:
    """Make the plan of an edit."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        args = _json(call, "args", list)
        kwargs = _json(call, "kwargs", dict)
        job = call.dlq.plan(
            "edit",
            queue,
            LetterFilter(ids=frozenset({letter_id})),
            change=Edit(args=args, kwargs=kwargs),
            to_queue=call.value("to_queue").strip() or None,
            force=bool(call.value("force")),
        )
    except NotFound as exc:
        return gone(call, queue, letter_id, exc)
    except (StoreUnavailable, BrokerUnavailable):
        raise
    except DLQError as exc:
        return _edit_page(call, queue, letter_id, error=str(exc))
    return call.to("job", job=job.id)


def _edit_page(call: Call, queue: str, letter_id: str, error: str = "") -> Page:
    """Show the form, with what was typed if it was refused."""
    args, kwargs = call.dlq.arguments(letter_id, queue)  # masked
    typed = call.value
    return call.page(
        "edit.html",
        status=400 if error else 200,
        section="overview",
        title=f"Edit a letter of {queue}",
        queue=queue,
        letter_id=letter_id,
        args=printable_json(typed("args")) or json_text(args),
        kwargs=printable_json(typed("kwargs")) or json_text(kwargs),
        error=error,
        redacts=bool(call.dlq.redaction),
    )


def discarded(call: Call) -> Page:
    """Show the newest discarded letters of a queue."""
    queue = call.parts["queue"]
    rows: list[Row] = []
    problem = ""
    try:
        rows += (Row.of(call, entry) for entry in islice(call.dlq.discarded(queue), 100))
    except DLQError as exc:
        problem = str(exc)
    return call.page(
        "discarded.html",
        section="overview",
        title=f"{queue}: discarded letters",
        queue=queue,
        rows=rows,
        problem=problem,
        length=call.dlq.store.length(queue),
    )


def restore(call: Call) -> Page:
    """Put a discarded letter back: first show which and where to, then do it."""
    queue, letter_id = call.parts["queue"], call.value("id")
    try:
        if not confirmed(call):
            return _restore_page(call, queue, letter_id)
        call.dlq.restore(letter_id, queue)
    except NotFound as exc:  # or another operator was faster
        if call.dlq.store.entry(queue, letter_id) is None:
            return gone(call, queue, letter_id, exc)
    return call.to("letter", queue=queue, letter=letter_id)


def _restore_page(call: Call, queue: str, letter_id: str) -> Page:
    bin_ = islice(call.dlq.discarded(queue), MAX_DISCARDED_SCANNED)
    entry = next((one for one in bin_ if one.key == letter_id), None)
    if entry is None:
        raise NotFound(
            f"expected a discarded letter of {queue}, got {letter_id!r}; discarded letters stay in "
            f"the bin for 24 hours"
        )
    found = Row.of(call, entry)
    again = call.dlq.store.entry(queue, letter_id) is not None
    return confirm(
        call,
        title=f"Restore a letter of {queue}?",
        button="Restore 1 letter",
        facts=[
            ("letter", letter_id),
            ("task", found.task_name),
            ("reason", found.reason),
            ("what happened", found.description or "-"),
            ("where to", f"{queue}, as its newest letter; an export then has it once more"),
        ],
        back=call.link("discarded", queue=queue),
        problem=f"{queue} has this letter again: its message died again." if again else "",
    )


def _number(call: Call, name: str, at_least: float = 0) -> float | None:
    text = call.value(name).strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not at_least <= number < 1e9:  # noqa: PLR2004 - also not a number
        raise RequestError(
            400, f"expected {name} to be a number, at least {at_least}, got {text!r}"
        )
    return number


def _whole(call: Call, name: str, at_least: int = 1) -> int | None:
    number = _number(call, name, at_least)
    if number is not None and number != int(number):
        raise RequestError(400, f"expected {name} to be a whole number, got {number}")
    return None if number is None else int(number)


def _json(call: Call, name: str, kind: type) -> Any:
    text = call.value(name)
    wanted = "a list" if kind is list else "an object"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RequestError(400, f"expected {name} to be {wanted} in JSON: {exc}") from exc
    if not isinstance(value, kind):
        raise RequestError(400, f"expected {name} to be {wanted} in JSON, got {text[:80]!r}")
    return value
