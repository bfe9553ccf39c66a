"""Jobs: plans that wait for a yes, operations that run, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, RedriveError, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable
from celery_dlq.operations.job import REDRIVES, REMOVALS
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.web.http import Call, Page, Permission
from celery_dlq.web.pages.parts import Row, json_text, query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.operations.job import Job

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


def jobs(call: Call) -> Page:
    """Show the newest jobs."""
    found = [
        job.shown(call.dlq.redaction)
        for job in call.dlq.jobs()
        if job.state not in ("planned", "expired")
    ][:100]
    return call.page("jobs.html", section="jobs", title="Jobs", jobs=found)


def job(call: Call) -> Page:
    """Show one job, or the plan that it still is."""
    found = call.dlq.job(call.parts["job"])
    return _page(call, found)


def start(call: Call) -> Page:
    """Start a plan."""
    found = call.dlq.job(call.parts["job"])
    call.user.check(_needed(found))
    if found.state == "expired":
        return _page(call, found, status=409)
    if _not_typed(call, found):
        return _page(call, found, _not_typed(call, found), status=400)
    try:
        call.dlq.start(found.id)
    except RedriveError as exc:  # all its messages would be lost
        return _page(call, found, str(exc), status=409)
    call.site.runner().wake()
    return call.to("job", job=found.id)


def cancel(call: Call) -> Page:
    """Cancel a job after its current batch."""
    found = call.dlq.job(call.parts["job"])
    call.user.check(_needed(found))
    try:
        call.dlq.cancel(found.id)
    except StoreUnavailable:
        raise
    except DLQError as exc:  # it has ended meanwhile
        return _page(call, call.dlq.job(found.id), str(exc), status=409)
    return call.to("job", job=found.id)


def resume(call: Call) -> Page:
    """Continue a job that was interrupted, cancelled or stopped."""
    found = call.dlq.job(call.parts["job"])
    call.user.check(_needed(found))
    if _not_typed(call, found):
        return _page(call, found, _not_typed(call, found), status=400)
    try:
        call.dlq.resume_in_background(found.id)
    except StoreUnavailable:
        raise
    except DLQError as exc:  # it is done, or another operator resumed it
        return _page(call, call.dlq.job(found.id), str(exc), status=409)
    call.site.runner().wake()
    return call.to("job", job=found.id)


def _needed(found: Job) -> Permission:
    """What one must be allowed to do to start, cancel or resume a job."""
    return Permission.DISCARD if found.kind in REMOVALS else Permission.REDRIVE


def _must_type(found: Job) -> bool:
    many = (found.total or TYPED_ABOVE + 1) > TYPED_ABOVE
    return found.kind in REMOVALS or (found.kind in REDRIVES and many)


def _not_typed(call: Call, found: Job) -> str:
    """Why a form is refused that needs the queue's name and has it not; empty if it may go on."""
    typed, name = call.value("typed").strip(), found.queue
    if not _must_type(found) or typed in (name.strip(), printable(name).strip()):
        return ""
    return f"expected the name {name} to be typed; nothing was done"


def _examples(call: Call, found: Job) -> list[Row]:
    """Some letters of a plan; those that are gone by now are left out."""
    rows = []
    for letter_id in found.preview.get("examples", ()) if found.state == "planned" else ():
        entry = call.dlq.store.entry(found.queue, letter_id)
        if entry is not None:
            rows.append(Row.of(call, RawEntry(*entry)))
    return rows


def _edit(call: Call, found: Job) -> tuple[str, str]:
    """The arguments before and after a planned edit, as text."""
    if found.kind != "edit" or found.state != "planned":
        return "", ""
    both = suppressed(lambda: call.dlq.edited_arguments(found.id), DLQError)
    if both is None:
        return "", ""
    before, after = (
        json_text(dict(zip(("args", "kwargs"), call.dlq.redaction.arguments(**one), strict=True)))
        for one in both
    )
    return before, after


def _page(call: Call, found: Job, error: str = "", *, status: int = 200) -> Page:
    examples, (before, after) = _examples(call, found), _edit(call, found)
    found = found.shown(call.dlq.redaction)
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
        allowed=call.may(_needed(found)),
        error=error,
        examples=examples,
        before=before,
        after=after,
    )
