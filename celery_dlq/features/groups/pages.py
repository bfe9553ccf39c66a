"""Notes on a group, its owner, its state, what was tried, and who did what about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.events import GroupState
from celery_dlq.features.groups.operations import (
    MAX_OWNER_CHARS,
    MAX_RELEASE_CHARS,
    SET_BY,
    Notes,
    checked_note,
    own_name,
)
from celery_dlq.letters.record import from_micros
from celery_dlq.operations.job import DONE, PLANNED, REDRIVES, STOPPED, Job
from celery_dlq.store.records import Group
from celery_dlq.web.http import Call, Page, Panel, Permission, RequestError, post
from celery_dlq.web.pages import span_of

_MOST_CHANGES, _MOST_JOBS = 20, 5
_MOST_EMPTIED = 20
_JUST_AFTER = timedelta(seconds=1)


class _Field(NamedTuple):
    """What a form asks for beside the state."""

    name: str
    label: str
    most_chars: int
    read: Callable[[Call], Any]


def _until(call: Call) -> datetime | None:
    span = span_of(call)
    return None if span is None else call.dlq.registry.now() + span


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


def facts(call: Call, group: Group) -> Panel:
    """The state of a group, its owner, and the address of its page for other people."""
    path = call.link("group", queue=call.parts["queue"], fingerprint=group.fingerprint)
    mine = bool(group.status.owner) and group.status.owner == own_name()
    overviews = call.dlq.assembly.backend.letters.overviews
    gone = overviews.emptied(call.parts["queue"], from_micros(0), of=group.fingerprint)
    emptied_at = next((at for at, _gone in gone if group.letters), None)
    values = {"address": call.origin + path, "mine": mine, "most_chars": MAX_OWNER_CHARS}
    values["emptied_at"] = emptied_at
    return "group_state.html", values


def notes_and_forms(call: Call, group: Group) -> Panel:
    """The notes on a group, and a form to write one and to set the group's state."""
    notes = call.dlq.notes(call.parts["queue"], group.fingerprint)
    shown = [call.dlq.redaction.shown(note, "text") for note in notes]
    queue, redaction = call.parts["queue"], call.dlq.redaction
    changes = Notes(call.dlq.assembly).changes_of(queue, group.fingerprint, _MOST_CHANGES)
    jobs = (
        job.shown(redaction)
        for job in call.site.status.jobs()
        if job.state != PLANNED and job.is_of_cause(queue, group.fingerprint)
    )
    return "group_notes.html", {
        "notes": shown,
        "jobs": [*islice(jobs, _MOST_JOBS)],
        "form": _form_of(call, group),
        "changes": [redaction.shown(one, "detail") for one in changes],
    }


def in_row(call: Call, groups: Sequence[Group]) -> Panel:
    """The last note on each cause of a list."""
    names = [group.fingerprint for group in groups]
    notes = call.dlq.assembly.backend.notes.newest(call.parts["queue"], names)
    shown = {name: call.dlq.redaction.shown(note, "text") for name, note in notes.items()}
    return "group_row.html", {"notes": shown}


def after_job(call: Call, job: Job) -> Panel:
    """The same form on the page of a redrive of one cause that is done, or was stopped."""
    ended = job.state in (DONE, STOPPED) and job.kind in REDRIVES
    group = call.dlq.assembly.reading().group_of(job) if ended else None
    form = None if group is None else _form_of(call, group)
    return "group_after_job.html", {"group": group, "form": form, "emptied": _emptied(call, job)}


def _emptied(call: Call, job: Job) -> list[Group]:
    """The causes whose last letter left while a job ran."""
    if not job.changed or job.kind in ("release", "restore"):
        return []
    until = None if job.ended_at is None else job.ended_at + _JUST_AFTER
    ended = call.dlq.store.overviews.emptied(job.queue, job.started_at, until)
    return [group for _at, group in islice(ended, _MOST_EMPTIED)]


def _form_of(call: Call, group: Group) -> Mapping[str, Any]:
    """The buttons and the fields of the form, with what is known."""
    states = [(state, way.method.capitalize()) for state, way in SET_BY.items()]
    fields = [(way, _FIELDS[way.option]) for way in SET_BY.values() if way.option in _FIELDS]
    releases = (worker.release for worker in call.site.status.fleet().workers)
    return {
        "states": [one for one in states if {one[0], group.status.state} != {GroupState.OPEN}],
        "fields": [(way.method.capitalize(), field) for way, field in fields],
        "known": {"release": group.release_with_fix(releases)},
    }


def add_note(call: Call) -> Page:
    """Add a note to a group."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    try:
        text = checked_note(call.typed("text"))
    except DLQError as exc:
        raise RequestError(400, str(exc)) from exc
    call.dlq.note(queue, fingerprint, text)
    return call.to("group", queue=queue, fingerprint=fingerprint)


def assign(call: Call) -> Page:
    """Say who takes care of a group: who asks, somebody else, or nobody."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    to = call.value("to")
    if to not in ("me", "nobody", "other"):
        raise RequestError(400, f"expected to to be me, nobody or other, got {to[:80]!r}")
    owner = {"me": own_name(), "nobody": ""}.get(to, call.typed("owner"))
    if len(owner) > MAX_OWNER_CHARS:
        raise RequestError(400, f"expected a name of {MAX_OWNER_CHARS} characters at most")
    call.dlq.assign(queue, fingerprint, owner)
    return call.to("group", queue=queue, fingerprint=fingerprint)


def set_state(call: Call) -> Page:
    """Set the state of a group, such as resolved, with a note if one is given."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    state = call.value("state")
    if state not in SET_BY:
        known = ", ".join(SET_BY)
        raise RequestError(400, f"expected state to be one of {known}, got {state[:80]!r}")
    method, _, option = SET_BY[state]
    field = _FIELDS.get(option)
    given = {} if field is None else {option: field.read(call)}
    getattr(call.dlq, method)(queue, fingerprint, note=call.typed("text"), **given)
    return call.to("group", queue=queue, fingerprint=fingerprint)


_GROUP = "/queues/{queue}/groups/{fingerprint}"
ROUTES = (
    post(f"{_GROUP}/notes", add_note, Permission.REDRIVE, "write notes on causes"),
    post(f"{_GROUP}/owner", assign, Permission.REDRIVE, "say who takes care of them"),
    post(f"{_GROUP}/state", set_state, Permission.REDRIVE, "set their state"),
)
