"""Notes on a group, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_dlq.cli.table import letters_text
from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.features.groups.operations import MAX_RELEASE_CHARS, SET_BY, checked_note
from celery_dlq.store.records import Group
from celery_dlq.web.http import Call, Page, Panel, Permission, RequestError, post
from celery_dlq.web.pages import confirm, span_of


class _Field(NamedTuple):
    """What a form asks for beside the state."""

    name: str
    label: str
    most_chars: int
    read: Callable[[Call], Any]


def _until(call: Call) -> datetime | None:
    span = span_of(call)
    return None if span is None else datetime.now(timezone.utc) + span


_FIELDS: Mapping[str, _Field] = {
    "release": _Field(
        "release",
        "in the release with the fix; empty if the fix needs no deploy",
        MAX_RELEASE_CHARS,
        lambda call: call.value("release") or None,
    ),
    "until": _Field("for", "for, e.g. 2h; empty until somebody reopens it", 20, _until),
}
"""The fields of the forms, by the options of `SET_BY`; the label follows the form's verb."""


def state(_call: Call, _group: Group) -> Panel:
    """The state of a group: since when, and by whom."""
    return "group_state.html", {}


def notes_and_forms(call: Call, group: Group) -> Panel:
    """The notes on a group, and forms to write one and to set the group's state."""
    notes = call.dlq.notes(call.parts["queue"], group.fingerprint)
    forms = (
        (state, way.method.capitalize(), _FIELDS.get(way.option)) for state, way in SET_BY.items()
    )
    return "group_notes.html", {
        "notes": [call.dlq.redaction.shown(note, "text") for note in notes],
        "forms": list(forms),
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
    """Set the state of a group, such as resolved."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    state = call.value("state")
    if state not in SET_BY:
        known = ", ".join(SET_BY)
        raise RequestError(400, f"expected state to be one of {known}, got {state[:80]!r}")
    method, _, option = SET_BY[state]
    field = _FIELDS.get(option)
    given = {} if field is None else {option: field.read(call)}
    getattr(call.dlq, method)(queue, fingerprint, **given)
    return call.to("group", queue=queue, fingerprint=fingerprint)


_GROUP = "/queues/{queue}/groups/{fingerprint}"
ROUTES = (
    post(f"{_GROUP}/notes", add_note, Permission.REDRIVE, "write notes on causes"),
    post(f"{_GROUP}/state", set_state, Permission.REDRIVE, "set their state"),
)
