"""Groups by cause: which one, how many, growing or over, new since when, what was tried?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, NotFound, NotSupported
from celery_dlq.web.http import Permission
from celery_dlq.web.pages.common import (
    check_text,
    columns_of_day,
    frames_of,
    masked,
    suppressed,
)

if TYPE_CHECKING:
    from celery_dlq.backends.base import GroupOrder
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

PAGE = 100


def groups(call: Call) -> Response:
    """Show the groups of a queue."""
    queue = call.parts["queue"]
    by: GroupOrder = "letters" if call.request.value("by") == "letters" else "newest"
    found = call.dlq.reading().groups(queue, limit=PAGE, by=by)
    if by == "newest":
        found = sorted(found, key=lambda group: (-group.last_hour, -group.letters))
    return call.page(
        "groups.html",
        section="overview",
        title=f"{queue}: groups",
        queue=queue,
        groups=found,
        by=by,
        columns={group.fingerprint: columns_of_day(group) for group in found},
        most=PAGE,
        length=call.dlq.backend.letters.length(queue),
    )


def group(call: Call) -> Response:
    """Show one group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    reading = call.dlq.reading()
    found = reading.group(queue, fingerprint)
    example = suppressed(lambda: reading.get(found.example_id, queue), NotFound, CorruptLetter)
    notes = suppressed(lambda: call.dlq.notes().notes(queue, fingerprint), NotSupported) or []
    shown = None if example is None else call.web.redaction.letter(example)
    return call.page(
        "group.html",
        section="overview",
        title=f"{queue}: {found.exception_type or found.reason}",
        queue=queue,
        group=found,
        columns=columns_of_day(found),
        example=shown,
        exceptions=frames_of(shown),
        notes=notes,
        jobs=_jobs(call, queue, fingerprint),
    )


def apart(call: Call) -> Response:
    """Show what sets a group apart; a page of its own, because it reads 5,000 letters."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.reading().group(queue, fingerprint)
    apart = call.dlq.comparison().apart(queue, fingerprint=fingerprint, deadline_seconds=1.0)
    findings = []
    for finding in apart.findings:
        selects = {**finding.where, "conditions": finding.condition or ""}
        query = {"fingerprint": fingerprint, **selects} if any(selects.values()) else {}
        findings.append((finding, query))
    return call.page(
        "apart.html",
        section="overview",
        title=f"{queue}: what sets {found.exception_type or found.reason} apart",
        queue=queue,
        group=found,
        apart=apart,
        findings=findings,
    )


def add_note(call: Call) -> Response:
    """Add a note to a group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    text = check_text("the note", call.request.value("text"), 2000)
    call.dlq.notes().note(queue, fingerprint, text)
    return call.to("group", queue=queue, fingerprint=fingerprint)


def _jobs(call: Call, queue: str, fingerprint: str) -> list[Any]:
    """The newest jobs on this group: what was tried, and how its canary ended."""
    if not call.user.may(Permission.VIEW):
        return []
    jobs = call.dlq.operations().jobs()
    return [
        masked(call, job)
        for job in jobs
        if job.queue == queue
        and job.state != "planned"
        and fingerprint.startswith(str(job.filter.get("fingerprint", "-")))
    ][:5]
