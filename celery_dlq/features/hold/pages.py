"""Holds and circuit breakers: what is not executed for now, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence

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
            back=_way_back(call),
        )
    except DLQError as exc:
        return holds(call, str(exc))


def end_hold(call: Call) -> Page:
    """End a hold, or close a circuit breaker: first show what would go back, and where to."""
    hold_id = call.value("id")
    found = next((one for one in call.dlq.holds() if one.hold.id == hold_id), None)
    if found is None:
        raise NotFound(f"expected the id of a hold, got {hold_id!r}")
    held, dlq, slowly = found.hold, call.dlq, "slowly at first, about twice as many each second"
    pace = slowly if held.circuit else "500 messages a second"
    workers = call.site.status.fleet().workers
    return confirm(
        call,
        lambda: dlq.close_breaker(held.task, held.queue) if held.circuit else dlq.end_hold(hold_id),
        title=f"Release {found.held:,} messages?",
        button=f"Release {found.held:,} messages",
        facts={
            "hold": f"{hold_id}: {', '.join((held.task, *held.where))} in {held.queue}",
            "where to": f"the queues they come from, in order, {pace}",
            "by": "a worker" if workers else "a worker, as soon as one runs: there is none now",
        },
        back=_way_back(call),
    )


def in_force(_call: Call, found: InForce) -> Panel:
    """The holds and circuit breakers that every page shows."""
    return "in_force_held.html", {"held": found.held}


def of_cause(_call: Call, found: Incident) -> Panel:
    """The button that holds the messages of a cause: task and argument are filled in."""
    return "hold_cause.html", {"incident": found}


def _way_back(call: Call) -> str:
    """Where the browser goes after a change: to where the form came from, a page of ours."""
    path = call.value("back")
    whole = path.isascii() and path.isprintable() and path[1:2] not in ("/", "\\")
    return path if whole and path.startswith(call.link("overview")) else call.link("holds")


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
