"""Notes on a group, and its state."""

from __future__ import annotations

from datetime import datetime, timezone

from celery_dlq.cli.table import letters_text
from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.features.groups.operations import checked_note
from celery_dlq.store.records import Group
from celery_dlq.web.http import Call, Page, Panel, Permission, RequestError, post
from celery_dlq.web.pages import confirm, span_of


def state(_call: Call, _group: Group) -> Panel:
    """The state of a group: since when, and by whom."""
    return "group_state.html", {}


def notes_and_forms(call: Call, group: Group) -> Panel:
    """The notes on a group, and forms to write one and to set the group's state."""
    notes = call.dlq.notes(call.parts["queue"], group.fingerprint)
    return "group_notes.html", {
        "notes": [call.dlq.redaction.shown(note, "text") for note in notes],
    }


def add_note(call: Call) -> Page:
    """Add a note to a group: first show it as all will see it."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    try:
        text = checked_note(call.typed("text"))
    except DLQError as exc:
        raise RequestError(400, str(exc)) from exc
    found = call.dlq.group(queue, fingerprint)
    return confirm(
        call,
        lambda: call.dlq.note(queue, fingerprint, text),
        title=f"Add a note to {found.exception_type or found.reason}?",
        button="Add note",
        facts={
            "note": text,
            "by": whoami(),
            "shown with": _shown_with(found, queue),
            "seen by": "all users of these pages; it cannot be changed or removed",
        },
        back=call.link("group", queue=queue, fingerprint=fingerprint),
    )


def _shown_with(found: Group, queue: str) -> str:
    if not found.letters:
        return f"later letters of {queue} of this cause"
    return f"{letters_text(found.letters)} of {queue}, and later ones of this cause"


def set_state(call: Call) -> Page:
    """Resolve, mute or reopen a group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    value = call.value
    if value("state") == "resolved":
        call.dlq.resolve(queue, fingerprint, release=value("release") or None)
    elif value("state") == "muted":
        span = span_of(call)
        until = None if span is None else datetime.now(timezone.utc) + span
        call.dlq.mute(queue, fingerprint, until=until)
    elif value("state") == "open":
        call.dlq.reopen(queue, fingerprint)
    else:
        raise RequestError(
            400, f"expected state to be resolved, muted or open, got {value('state')[:80]!r}"
        )
    return call.to("group", queue=queue, fingerprint=fingerprint)


_GROUP = "/queues/{queue}/groups/{fingerprint}"
ROUTES = (
    post(f"{_GROUP}/notes", add_note, Permission.REDRIVE, "note"),
    post(f"{_GROUP}/state", set_state, Permission.REDRIVE, "resolve, mute and reopen causes"),
)
