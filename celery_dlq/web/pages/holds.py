"""Holds and circuit breakers: what is not executed for now, since when, and why."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError
from celery_dlq.policies.policy import duration_seconds
from celery_dlq.web.http import RequestError

if TYPE_CHECKING:
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call


def holds(call: Call) -> Response:
    """Show what is held."""
    return _page(call)


def hold(call: Call) -> Response:
    """Hold the messages of a task or queue."""
    value = call.request.value
    try:
        call.dlq.holds().hold(
            value("task").strip() or None,
            queue=value("queue").strip() or None,
            conditions=[one.strip() for one in call.request.form.get("where", ()) if one.strip()],
            span=_span(value("for").strip()),
            reason=value("reason").strip(),
        )
    except DLQError as exc:
        return _page(call, str(exc))
    return call.to("holds")


def end_hold(call: Call) -> Response:
    """End a hold, or close a circuit breaker; a worker releases the messages."""
    hold_id = call.request.value("id")
    found = next((one.hold for one in call.dlq.holds().holds() if one.hold.id == hold_id), None)
    if found is not None and found.circuit is not None:
        call.dlq.breakers().close_breaker(found.task, found.queue)
    else:
        call.dlq.holds().end(hold_id)
    return call.to("holds")


def _span(text: str) -> timedelta | None:
    if not text:
        return None
    seconds = duration_seconds(text)
    if seconds is None:
        raise RequestError(400, f"expected a time such as 30m, 2h or 7d, got {text!r}")
    return timedelta(seconds=seconds)


def _page(call: Call, error: str = "") -> Response:
    return call.page(
        "holds.html",
        status=400 if error else 200,
        section="holds",
        title="Holds",
        found=call.dlq.holds().holds(),
        error=error,
        typed=call.request.value,
    )
