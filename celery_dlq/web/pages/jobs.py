"""Jobs: plans that wait for a yes, operations that run, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError
from celery_dlq.filters import LetterFilter
from celery_dlq.web.http import Permission, RequestError
from celery_dlq.web.pages.common import query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Job
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

TYPED_ABOVE = 1000
"""Number of letters above which the queue's name must be typed, as for each discard."""

_NEEDED = {
    "redrive": Permission.REDRIVE,
    "discard": Permission.DISCARD,
    "purge": Permission.DISCARD,
}


def jobs(call: Call) -> Response:
    """Show the newest jobs."""
    found = [job for job in call.dlq.operations().jobs() if job.state != "planned"][:100]
    return call.page("jobs.html", section="jobs", title="Jobs", jobs=found)


def job(call: Call) -> Response:
    """Show one job, or the plan that it still is."""
    found = call.dlq.operations().job(call.parts["job"])
    return _page(call, found)


def start(call: Call) -> Response:
    """Start a plan."""
    operations = call.dlq.operations()
    found = operations.job(call.parts["job"])
    _check(call, found)
    if _must_type(found) and call.request.value("typed").strip() != found.queue:
        return _page(call, found, f"expected the name {found.queue} to be typed; nothing was done")
    if found.state == "planned":
        operations.start(found.id)
    call.web.runner.wake()
    return call.to("job", job=found.id)


def cancel(call: Call) -> Response:
    """Cancel a job after its current batch."""
    operations = call.dlq.operations()
    found = operations.job(call.parts["job"])
    _check(call, found)
    operations.cancel(found.id)
    return call.to("job", job=found.id)


def resume(call: Call) -> Response:
    """Continue a job that was interrupted, cancelled or stopped."""
    operations = call.dlq.operations()
    found = operations.job(call.parts["job"])
    _check(call, found)
    operations.start(found.id)
    call.web.runner.wake()
    return call.to("job", job=found.id)


def _check(call: Call, found: Job) -> None:
    needed = _NEEDED.get(found.kind, Permission.DISCARD)
    if not call.user.may(needed):
        raise RequestError(403, f"expected the permission {needed}. {call.user.why_not}")


def _must_type(found: Job) -> bool:
    return found.kind != "redrive" or (found.total or TYPED_ABOVE + 1) > TYPED_ABOVE


def _page(call: Call, found: Job, error: str = "") -> Response:
    where = suppressed(lambda: LetterFilter.from_json(found.filter), DLQError)
    shown = {"planned": "plan.html"}.get(found.state, "job.html")
    verb = found.kind.capitalize()
    return call.page(
        shown,
        status=400 if error else 200,
        section="jobs",
        title=f"{verb} of {found.queue}: {found.state}",
        job=found,
        verb=verb,
        query=query_of(where) if where is not None else {},
        must_type=_must_type(found),
        allowed=call.web.options.forms is not None
        and call.user.may(_NEEDED.get(found.kind, Permission.DISCARD)),
        error=error,
    )
