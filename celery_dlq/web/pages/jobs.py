"""Jobs: plans that wait for a yes, operations that run, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_dlq.errors import BrokerUnavailable, DLQError, StoreUnavailable
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
    return call.page("jobs.html", title="Jobs", jobs=found)


def job(call: Call) -> Page:
    """Show one job, or the plan that it still is."""
    return _page(call, call.dlq.job(call.parts["job"]))


def start(call: Call) -> Page:
    """Start a plan."""
    return _changed(call, call.dlq.start, typed=True)


def cancel(call: Call) -> Page:
    """Cancel a job after its current batch."""
    return _changed(call, call.dlq.cancel)


def resume(call: Call) -> Page:
    """Continue a job that was interrupted, cancelled or stopped."""
    return _changed(call, call.dlq.resume_in_background, typed=True)


def _changed(call: Call, change: Callable[[str], object], *, typed: bool = False) -> Page:
    """Change a job, and let it run; if it is refused, say why on its page."""
    found = call.dlq.job(call.parts["job"])
    call.check(_needed(found))
    if found.state == "expired":
        return _page(call, found, status=409)
    names = (found.queue.strip(), printable(found.queue).strip())
    if typed and _must_type(found) and call.typed("typed") not in names:
        error = f"expected the name {found.queue} to be typed; nothing was done"
        return _page(call, found, error, status=400)
    try:
        change(found.id)
    except (StoreUnavailable, BrokerUnavailable):
        raise
    except DLQError as exc:  # it has ended, others were faster, or all messages would be lost
        return _page(call, call.dlq.job(found.id), str(exc), status=409)
    if typed:
        call.site.runner().wake()
    return call.to("job", job=found.id)


def _needed(found: Job) -> Permission:
    """What one must be allowed to do to start, cancel or resume a job."""
    return Permission.DISCARD if found.kind in REMOVALS else Permission.REDRIVE


def _must_type(found: Job) -> bool:
    many = (found.total or TYPED_ABOVE + 1) > TYPED_ABOVE
    return found.kind in REMOVALS or (found.kind in REDRIVES and many)


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
    both = None
    if found.kind == "edit" and found.state == "planned":
        both = suppressed(lambda: call.dlq.edited_arguments(found.id), DLQError)
    if both is None:
        return "", ""
    before, after = (call.dlq.redaction.arguments(**one) for one in both)
    names = ("args", "kwargs")
    return (
        json_text(dict(zip(names, before, strict=True))),
        json_text(dict(zip(names, after, strict=True))),
    )


def _page(call: Call, found: Job, error: str = "", *, status: int = 200) -> Page:
    examples, (before, after) = _examples(call, found), _edit(call, found)
    found = found.shown(call.dlq.redaction)
    where = suppressed(lambda: LetterFilter.from_json(found.filter), DLQError)
    verb = found.kind.capitalize()
    return call.page(
        "plan.html" if found.state in ("planned", "expired") else "job.html",
        status=status,
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
