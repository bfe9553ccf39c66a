"""Forms that begin a change: redrive, discard, edit. Each makes a plan; its job page starts it."""

from __future__ import annotations

import json
from typing import Any

from celery_dlq.errors import BrokerUnavailable, DLQError, NotFound, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable_json
from celery_dlq.operations.edit import Edit
from celery_dlq.web.http import Call, Page, RequestError
from celery_dlq.web.pages.parts import filter_of, gone, json_text, query_of

COUNTED = 10_000
COUNT_SECONDS = 1.0
MAX_NUMBER = 1e9


def redrive_form(call: Call) -> Page:
    """Ask how letters are to be redriven."""
    return _form(call, "redrive")


def discard_form(call: Call) -> Page:
    """Ask how letters are to be discarded."""
    return _form(call, "discard")


def _form(call: Call, kind: str) -> Page:
    queue, where = call.parts["queue"], filter_of(call)
    letters, exact = call.dlq.count(queue, where, most=COUNTED, deadline_seconds=COUNT_SECONDS)
    return call.page(
        f"{kind}.html",
        title=f"{kind.capitalize()} letters of {queue}",
        query=query_of(where),
        letters=letters,
        exact=exact,
        waits_for=call.dlq.waits_for(queue, where) if kind == "redrive" else (),
    )


def plan_redrive(call: Call) -> Page:
    """Make the plan of a redrive."""
    given = {
        "rate": _number(call, "rate"),
        "limit": _number(call, "limit", int),
        "to_queue": call.typed("to_queue") or None,
        "delay": _number(call, "delay"),
        "new_id": bool(call.value("new_id")),
        "keep_count": bool(call.value("keep_count")),
        "canary": _number(call, "canary", int),
        "max_failures": _number(call, "max_failures", int),
        "canary_wait": _number(call, "canary_wait"),
        "force": bool(call.value("force")),
    }
    return _planned(call, "redrive", {k: one for k, one in given.items() if one is not None})


def plan_discard(call: Call) -> Page:
    """Make the plan of a discard."""
    return _planned(call, "discard", {"limit": _number(call, "limit", int)})


def _planned(call: Call, kind: str, options: dict[str, Any]) -> Page:
    job = call.dlq.plan(kind, call.parts["queue"], filter_of(call), **options)
    return call.to("job", job=job.id)


def edit_form(call: Call) -> Page:
    """Show a message's arguments to be edited."""
    try:
        return _edit_page(call)
    except NotFound as exc:
        return gone(call, exc)


def plan_edit(call: Call) -> Page:
    """Make the plan of an edit."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        job = call.dlq.plan(
            "edit",
            queue,
            LetterFilter(ids=frozenset({letter_id})),
            change=Edit(
                args=_json(call, "args", list, "a list"),
                kwargs=_json(call, "kwargs", dict, "an object"),
            ),
            to_queue=call.typed("to_queue") or None,
            force=bool(call.value("force")),
        )
    except NotFound as exc:
        return gone(call, exc)
    except (StoreUnavailable, BrokerUnavailable):
        raise
    except DLQError as exc:
        return _edit_page(call, error=str(exc))
    return call.to("job", job=job.id)


def _edit_page(call: Call, error: str = "") -> Page:
    """Show the form, with what was typed if it was refused."""
    queue = call.parts["queue"]
    args, kwargs = call.dlq.arguments(call.parts["letter"], queue)  # masked
    return call.page(
        "edit.html",
        status=400 if error else 200,
        title=f"Edit a letter of {queue}",
        args=printable_json(call.value("args")) or json_text(args),
        kwargs=printable_json(call.value("kwargs")) or json_text(kwargs),
        error=error,
        redacts=bool(call.dlq.redaction),
    )


def _number(call: Call, name: str, kind: type[float] = float) -> float | None:
    """A number that was typed, if any; the operation checks its bounds."""
    text = call.typed(name)
    try:
        number = kind(text) if text else None
    except ValueError:
        number = float("nan")
    if number is not None and not abs(number) < MAX_NUMBER:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(400, f"expected {name} to be {what}, got {text[:80]!r}")
    return number


def _json(call: Call, name: str, kind: type, wanted: str) -> Any:
    text = call.value(name)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RequestError(400, f"expected {name} to be {wanted} in JSON: {exc}") from exc
    if not isinstance(value, kind):
        raise RequestError(400, f"expected {name} to be {wanted} in JSON, got {text[:80]!r}")
    return value
