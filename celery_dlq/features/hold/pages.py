"""Holds and circuit breakers: what is not executed for now, since when, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.operations.in_force import InForce
from celery_dlq.operations.incidents import Incident
from celery_dlq.web.http import Call, Page, Panel, Permission, get, post
from celery_dlq.web.pages import confirm, span_of
from celery_dlq.web.templating import duration

SHOWN = 12
"""Names in a list."""


def holds(call: Call, error: str = "") -> Page:
    """Show what is held, and why something was not held."""
    return call.page(
        "holds.html",
        status=400 if error else 200,
        title="Holds",
        found=[one.shown(call.dlq.redaction) for one in call.dlq.holds()],
        error=error,
    )


def hold(call: Call) -> Page:
    """Hold the messages of a task or queue: first show of which, then do it."""
    task, queue = call.typed("task") or None, call.typed("queue") or None
    where = [one.strip() for one in call.form.get("where", ()) if one.strip()]
    span, reason = span_of(call), call.typed("reason")
    try:
        tasks, queues = call.dlq.check_hold(task, queue=queue, conditions=where, span=span)
        return confirm(
            call,
            lambda: call.dlq.hold(task, queue=queue, conditions=where, span=span, reason=reason),
            title="Hold these messages?",
            button="Hold",
            facts={
                "tasks": _some_names(tasks, all_of=task is None),
                "queues": _some_names(queues, all_of=queue is None),
                "only with": ", ".join(where) or "any arguments",
                "for": "until somebody releases them" if span is None else duration(span),
                "why": reason or "-",
                "noticed": "by workers within 2 seconds; tasks that run go on",
            },
            back=call.link("holds"),
        )
    except DLQError as exc:
        return holds(call, str(exc))


def end_hold(call: Call) -> Page:
    """End a hold, or close a circuit breaker: first show what would go back, and where to."""
    hold_id = call.value("id")
    found = next((one for one in call.dlq.holds() if one.hold.id == hold_id), None)
    if found is None:
        raise NotFound(f"expected the id of a hold, got {hold_id!r}")
    pace = "500 messages a second"
    change: Callable[[], object] = partial(call.dlq.end_hold, hold_id)
    if found.hold.circuit is not None:
        pace = "slowly at first, about twice as many each second"
        change = partial(call.dlq.close_breaker, found.hold.task, found.hold.queue)
    workers = call.site.status.fleet().workers
    return confirm(
        call,
        change,
        title=f"Release {found.held:,} messages?",
        button=f"Release {found.held:,} messages",
        facts={
            "hold": f"{hold_id}: {found.hold.task} in {found.hold.queue}",
            "where to": f"the queues they come from, in order, {pace}",
            "by": "a worker" if workers else "a worker, as soon as one runs: there is none now",
        },
        back=call.link("holds"),
    )


def in_force(_call: Call, found: InForce) -> Panel:
    """The holds and circuit breakers that every page shows."""
    return "in_force_held.html", {"held": found.held}


def of_cause(_call: Call, found: Incident) -> Panel:
    """The button that holds the messages of a cause: task and argument are filled in."""
    return "hold_cause.html", {"incident": found}


def _some_names(names: Sequence[str], *, all_of: bool) -> str:
    """Names, the first of many; those that nobody knows yet are meant, too."""
    shown = ", ".join(names[:SHOWN]) or "none known yet"
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"all: {shown}{more}" if all_of else shown + more


ROUTES = (
    get("/holds", holds, tab="Holds"),
    post("/holds", hold, Permission.HOLD, "hold messages before they start"),
    post("/holds/end", end_hold, Permission.HOLD, "release them"),
)
