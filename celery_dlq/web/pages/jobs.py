"""Jobs: plans that wait for a yes, operations that run, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, RedriveError, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable
from celery_dlq.operations.job import REDRIVES, REMOVALS
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.web.http import Permission, RequestError
from celery_dlq.web.pages.common import json_text, outlined, query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.operations.job import Job
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

TYPED_ABOVE = 1000
"""Number of letters above which the queue's name must be typed, as for each discard."""

_LABELS = (
    ("published", "published"),
    ("finished", "published before, removed now"),
    ("maybe_twice", "perhaps published twice"),
    ("removed", "removed"),
    ("exported", "exported"),
    ("succeeded", "succeeded since"),
    ("died_again", "died again"),
    ("skipped", "gone or claimed by others"),
    ("corrupt", "no letters"),
    ("refused", "kept, because they would be lost or have no delivery left"),
    ("failures", "not taken by the broker"),
)
"""Counts of jobs in the words of the page."""


def jobs(call: Call) -> Response:
    """Show the newest jobs."""
    found = [
        job.shown(call.web.redaction)
        for job in call.dlq.jobs().jobs()
        if job.state not in ("planned", "expired")
    ][:100]
    return call.page("jobs.html", section="jobs", title="Jobs", jobs=found)


def job(call: Call) -> Response:
    """Show one job, or the plan that it still is."""
    found = call.dlq.jobs().job(call.parts["job"])
    return _page(call, found)


def start(call: Call) -> Response:
    """Start a plan."""
    found = call.dlq.jobs().job(call.parts["job"])
    _check(call, found)
    if found.state == "expired":
        return _page(call, found, status=409)
    if _not_typed(call, found):
        return _page(call, found, _not_typed(call, found), status=400)
    try:
        call.dlq.operations().start(found.id)
    except RedriveError as exc:  # all its messages would be lost
        return _page(call, found, str(exc), status=409)
    call.web.runner().wake()
    return call.to("job", job=found.id)


def cancel(call: Call) -> Response:
    """Cancel a job after its current batch."""
    jobs = call.dlq.jobs()
    found = jobs.job(call.parts["job"])
    _check(call, found)
    try:
        jobs.cancel(found.id)
    except StoreUnavailable:
        raise
    except DLQError as exc:  # it has ended meanwhile
        return _page(call, jobs.job(found.id), str(exc), status=409)
    return call.to("job", job=found.id)


def resume(call: Call) -> Response:
    """Continue a job that was interrupted, cancelled or stopped."""
    jobs = call.dlq.jobs()
    found = jobs.job(call.parts["job"])
    _check(call, found)
    if _not_typed(call, found):
        return _page(call, found, _not_typed(call, found), status=400)
    try:
        call.dlq.jobs().resume_in_background(found.id)
    except StoreUnavailable:
        raise
    except DLQError as exc:  # it is done, or another operator resumed it
        return _page(call, jobs.job(found.id), str(exc), status=409)
    call.web.runner().wake()
    return call.to("job", job=found.id)


def _needed(found: Job) -> Permission:
    """What one must be allowed to do to start, cancel or resume a job."""
    return Permission.DISCARD if found.kind in REMOVALS else Permission.REDRIVE


def _check(call: Call, found: Job) -> None:
    needed = _needed(found)
    if not call.user.may(needed):
        raise RequestError(403, f"expected the permission {needed}. {call.user.why_not}")


def _must_type(found: Job) -> bool:
    many = (found.total or TYPED_ABOVE + 1) > TYPED_ABOVE
    return found.kind in REMOVALS or (found.kind in REDRIVES and many)


def _not_typed(call: Call, found: Job) -> str:
    """Why a form is refused that needs the queue's name and has it not; empty if it may go on."""
    typed, name = call.request.value("typed").strip(), found.queue
    if not _must_type(found) or typed in (name.strip(), printable(name).strip()):
        return ""
    return f"expected the name {name} to be typed; nothing was done"


def _examples(call: Call, found: Job) -> list[dict[str, str]]:
    """Some letters of a plan; those that are gone by now are left out."""
    rows = []
    for letter_id in found.preview.get("examples", ()) if found.state == "planned" else ():
        entry = call.dlq.backend.letters.entry(found.queue, letter_id)
        if entry is not None:
            rows.append(outlined(call, RawEntry(*entry)))
    return rows


def _edit(call: Call, found: Job) -> tuple[str, str]:
    """The arguments before and after a planned edit, as text."""
    if found.kind != "edit" or found.state != "planned":
        return "", ""
    both = suppressed(lambda: call.dlq.operations().edited_arguments(found.id), DLQError)
    if both is None:
        return "", ""
    before, after = (
        json_text(dict(zip(("args", "kwargs"), call.web.redaction.arguments(**one), strict=True)))
        for one in both
    )
    return before, after


def _page(call: Call, found: Job, error: str = "", *, status: int = 200) -> Response:
    examples, (before, after) = _examples(call, found), _edit(call, found)
    found = found.shown(call.web.redaction)
    where = suppressed(lambda: LetterFilter.from_json(found.filter), DLQError)
    shown = "plan.html" if found.state in ("planned", "expired") else "job.html"
    verb = found.kind.capitalize()
    return call.page(
        shown,
        status=status,
        section="jobs",
        title=f"{verb} of {found.queue}: {found.state}",
        job=found,
        verb=verb,
        labels=_LABELS,
        query=query_of(where) if where is not None else {},
        must_type=_must_type(found),
        allowed=call.web.options.forms is not None and call.user.may(_needed(found)),
        error=error,
        examples=examples,
        before=before,
        after=after,
    )
