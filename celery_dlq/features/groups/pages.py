"""Groups by cause: which one, how many, growing or over, new since when, what was tried?"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter, NotFound
from celery_dlq.events import whoami
from celery_dlq.policies.checks import duration_seconds
from celery_dlq.store.records import GroupState
from celery_dlq.web.http import Permission, RequestError
from celery_dlq.web.pages.common import (
    check_text,
    columns_of_day,
    confirm,
    confirmed,
    frames_of,
    suppressed,
)

if TYPE_CHECKING:
    from celery_dlq.store.records import GroupOrder
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

PAGE = 100
MAX_MUTE_SECONDS = 10 * 365 * 86400.0


def groups(call: Call) -> Response:
    """Show the groups of a queue."""
    queue = call.parts["queue"]
    by: GroupOrder = "letters" if call.request.value("by") == "letters" else "newest"
    state = call.request.value("state") or None
    found = call.dlq.reading().groups(queue, limit=PAGE, by=by, state=state)
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
        length=call.dlq.backend.letters.length(queue),
    )


def group(call: Call) -> Response:
    """Show one group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    reading = call.dlq.reading()
    found = reading.group(queue, fingerprint)
    example = suppressed(lambda: reading.get(found.example_id, queue), NotFound, CorruptLetter)
    notes = call.dlq.notes().notes(queue, fingerprint)
    shown = None if example is None else call.web.redaction.letter(example)
    return call.page(
        "group.html",
        section="overview",
        title=f"{queue}: {found.exception_type or found.reason or fingerprint}",
        queue=queue,
        group=found,
        columns=columns_of_day(found),
        example=shown,
        exceptions=frames_of(shown),
        notes=[call.web.redaction.shown(note, "text") for note in notes],
        jobs=_jobs(call, queue, fingerprint),
    )


def apart(call: Call) -> Response:
    """Show what sets a group apart; a page of its own, because it reads 5,000 letters."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.reading().group(queue, fingerprint)
    apart = call.dlq.comparison().differences(queue, fingerprint=fingerprint, deadline_seconds=1.0)
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
    """Add a note to a group: first show it as all will see it."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    text = check_text("the note", call.request.value("text"), 2000)
    if not confirmed(call):
        found = call.dlq.reading().group(queue, fingerprint)
        return confirm(
            call,
            title=f"Add a note to {found.exception_type or found.reason}?",
            button="Add note",
            facts=[
                ("note", text),
                ("by", whoami()),
                ("shown with", f"{found.letters:,} letters of {queue}, and with all that follow"),
                ("seen by", "everybody who may look; nobody can change or remove it"),
            ],
            back=call.link("group", queue=queue, fingerprint=fingerprint),
        )
    call.dlq.notes().note(queue, fingerprint, text)
    return call.to("group", queue=queue, fingerprint=fingerprint)


def set_state(call: Call) -> Response:
    """Resolve, mute or reopen a group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    value, notes = call.request.value, call.dlq.notes()
    if value("state") == "resolved":
        notes.resolve(queue, fingerprint, release=value("release") or None)
    elif value("state") == "muted":
        notes.mute(queue, fingerprint, until=_until(value("for").strip()))
    elif value("state") == "open":
        notes.reopen(queue, fingerprint)
    else:
        raise RequestError(
            400, f"expected state to be resolved, muted or open, got {value('state')[:80]!r}"
        )
    return call.to("group", queue=queue, fingerprint=fingerprint)


def _until(text: str) -> datetime | None:
    """When a mute ends that lasts a time such as ``2h``; ``None`` for an empty text."""
    if not text:
        return None
    seconds = duration_seconds(text)
    if seconds is None or not 0 < seconds <= MAX_MUTE_SECONDS:
        raise RequestError(400, f"expected a time such as 30m, 2h, 7d, got {text[:80]!r}")
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def _jobs(call: Call, queue: str, fingerprint: str) -> list[Any]:
    """The newest jobs on this group: what was tried, and how its canary ended."""
    if not call.user.may(Permission.VIEW):
        return []
    jobs = call.dlq.jobs().jobs()
    return [
        job.shown(call.web.redaction)
        for job in jobs
        if job.queue == queue
        and job.state != "planned"
        and fingerprint.startswith(str(job.filter.get("fingerprint", "-")))
    ][:5]
