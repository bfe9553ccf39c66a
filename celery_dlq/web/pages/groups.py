"""Groups by cause: which one, how many, growing or over, new since when, what was tried?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dlq.errors import NotFound
from celery_dlq.store.records import GroupState
from celery_dlq.web.http import Call, Page
from celery_dlq.web.pages.parts import Row, columns_of_day, frames_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.store.records import GroupOrder

PAGE = 100


def groups(call: Call) -> Page:
    """Show the groups of a queue."""
    queue = call.parts["queue"]
    by: GroupOrder = "letters" if call.value("by") == "letters" else "newest"
    state = call.value("state") or None
    found = call.dlq.groups(queue, limit=PAGE, by=by, state=state)
    if by == "newest":
        found = sorted(found, key=lambda group: (-group.last_hour, -group.letters))
    return call.page(
        "groups.html",
        section="overview",
        title=f"{queue}: groups",
        queue=queue,
        groups=found,
        by=by,
        state=state or "",
        states=[one.value for one in GroupState],
        columns={group.fingerprint: columns_of_day(group) for group in found},
        most=PAGE,
        length=call.dlq.store.length(queue),
    )


def group(call: Call) -> Page:
    """Show one group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.group(queue, fingerprint)
    entry = suppressed(lambda: call.dlq.entry(found.example_id, queue)[1], NotFound)
    example = None if entry is None else Row.of(call, entry).letter
    notes = call.dlq.notes(queue, fingerprint) if "add_note" in call.site.routes else []
    return call.page(
        "group.html",
        section="overview",
        title=f"{queue}: {found.exception_type or found.reason or fingerprint}",
        queue=queue,
        group=found,
        columns=columns_of_day(found),
        example=example,
        exceptions=frames_of(example),
        notes=[call.dlq.redaction.shown(note, "text") for note in notes],
        jobs=_jobs(call, queue, fingerprint),
    )


def _jobs(call: Call, queue: str, fingerprint: str) -> list[Any]:
    """The newest jobs on this group: what was tried, and how its canary ended."""
    return [
        job.shown(call.dlq.redaction)
        for job in call.dlq.jobs()
        if job.queue == queue
        and job.state != "planned"
        and fingerprint.startswith(str(job.filter.get("fingerprint", "-")))
    ][:5]
