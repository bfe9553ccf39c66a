"""Changes of many letters: a form makes a plan, which is a job that waits for a yes on its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, DLQError, NotFound, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable, printable_json
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.job import REDRIVES, REMOVALS
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.operations.retention import KEPT_IN_BIN
from celery_dlq.web.http import Call, Page, Permission, RequestError
from celery_dlq.web.pages import Row, filter_of, gone_page, json_text, query_of, suppressed

if TYPE_CHECKING:
    from celery_dlq.operations.job import Job

COUNTED = 10_000
MOST_SEARCHED = 2_000
"""Letters that are searched, on a job's page, for those that died again."""

MAX_NUMBER = 1e9
TYPED_ABOVE = 1000
"""Letters above which the queue's name must be typed, if none is tried first; also of a discard."""


def redrive_form(call: Call) -> Page:
    """Ask how letters are to be redriven."""
    return _form_page(call, "redrive")


def discard_form(call: Call) -> Page:
    """Ask how letters are to be discarded."""
    return _form_page(call, "discard")


def _form_page(call: Call, kind: str) -> Page:
    queue, where = call.parts["queue"], filter_of(call)
    seconds = timing.current.page
    letters, exact = call.dlq.count(queue, where, most=COUNTED, deadline_seconds=seconds)
    return call.page(
        f"{kind}.html",
        title=f"{kind.capitalize()} letters of {queue}",
        query=query_of(where),
        letters=letters,
        exact=exact,
    )


def plan_redrive(call: Call) -> Page:
    """Make the plan of a redrive."""
    given = {
        "rate": _typed_number(call, "rate"),
        "at_most": _typed_number(call, "at_most", int),
        "limit": _typed_number(call, "limit", int),
        "to_queue": call.typed("to_queue") or None,
        "delay": _typed_number(call, "delay"),
        "new_id": bool(call.value("new_id")),
        "keep_count": bool(call.value("keep_count")),
        "canary": _typed_number(call, "canary", int),
        "max_failures": _typed_number(call, "max_failures", int),
        "canary_wait": _typed_number(call, "canary_wait"),
        "note": call.typed("note"),
    }
    return _planned(call, "redrive", {k: one for k, one in given.items() if one is not None})


def plan_discard(call: Call) -> Page:
    """Make the plan of a discard."""
    return _planned(
        call, "discard", {"limit": _typed_number(call, "limit", int), "note": call.typed("note")}
    )


def _planned(call: Call, kind: str, options: dict[str, Any]) -> Page:
    job = call.dlq.plan(kind, call.parts["queue"], filter_of(call), **options)
    return call.to("job", job=job.id)


def edit_form(call: Call) -> Page:
    """Show a message's arguments to be edited."""
    try:
        return _edit_page(call)
    except NotFound as exc:
        return gone_page(call, exc)


def plan_edit(call: Call) -> Page:
    """Make the plan of an edit."""
    queue, letter_id = call.parts["queue"], call.parts["letter"]
    try:
        job = call.dlq.plan(
            "edit",
            queue,
            LetterFilter(ids=frozenset({letter_id})),
            change=Edit(
                args=typed_json(call, "args", list, "a list"),
                kwargs=typed_json(call, "kwargs", dict, "an object"),
            ),
            to_queue=call.typed("to_queue") or None,
        )
    except NotFound as exc:
        return gone_page(call, exc)
    except (StoreUnavailable, BrokerUnavailable):
        raise
    except DLQError as exc:
        return _edit_page(call, error=str(exc))
    return call.to("job", job=job.id)


def _edit_page(call: Call, error: str = "") -> Page:
    """Show the form, with what was typed if it was refused."""
    queue = call.parts["queue"]
    args, kwargs = call.dlq.arguments(call.parts["letter"], queue)  # masked
    return call.page(
        "edit.html",
        status=400 if error else 200,
        title=f"Edit a letter of {queue}",
        args=printable_json(call.value("args")) or json_text(args),
        kwargs=printable_json(call.value("kwargs")) or json_text(kwargs),
        error=error,
        redacts=bool(call.dlq.redaction),
    )


def _typed_number(call: Call, name: str, kind: type[float] = float) -> float | None:
    """A number that was typed, if any; the operation checks its bounds."""
    text = call.typed(name)
    try:
        number = kind(text) if text else None
    except ValueError:
        number = float("nan")
    if number is not None and not abs(number) < MAX_NUMBER:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(400, f"expected {name} to be {what}, got {text[:80]!r}")
    return number


def typed_json(call: Call, name: str, kind: type, wanted: str) -> Any:
    """A value that was typed as JSON."""
    text = call.value(name)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RequestError(400, f"expected {name} to be {wanted} in JSON: {exc}") from exc
    if not isinstance(value, kind):
        raise RequestError(400, f"expected {name} to be {wanted} in JSON, got {text[:80]!r}")
    return value


def jobs(call: Call) -> Page:
    """Show the newest jobs."""
    known = (job for job in call.dlq.jobs() if job.state not in ("planned", "expired"))
    found = [job.shown(call.dlq.redaction) for job in islice(known, 100)]
    return call.page("jobs.html", title="Jobs", jobs=found)


def job(call: Call) -> Page:
    """Show one job, or the plan that it still is."""
    return _job_page(call, _job_of(call))


def _job_of(call: Call) -> Job:
    return call.dlq.job(call.parts["job"], most_searched=MOST_SEARCHED)


def start(call: Call) -> Page:
    """Start a plan."""
    return _changed(call, partial(call.dlq.start, force=bool(call.value("force"))), typed=True)


def cancel(call: Call) -> Page:
    """Cancel a job after its current batch."""
    return _changed(call, call.dlq.cancel)


def resume(call: Call) -> Page:
    """Continue a job that was interrupted, cancelled or stopped."""
    return _changed(call, call.dlq.resume_in_background, typed=True)


def restore_job(call: Call) -> Page:
    """Plan to take back a discard, by its job."""
    found = _job_of(call)
    try:
        return call.to("job", job=call.dlq.plan_restore(found.id).id)
    except StoreUnavailable:
        raise
    except DLQError as exc:
        return _job_page(call, found, str(exc), status=409)


def _changed(call: Call, change: Callable[[str], object], *, typed: bool = False) -> Page:
    """Change a job, and let it run; if it is refused, say why on its page."""
    found = _job_of(call)
    call.check(_needed_permission(found))
    if found.state == "expired":
        return _job_page(call, found, status=409)
    names = (found.queue.strip(), printable(found.queue).strip())
    if typed and _must_type(found) and call.typed("typed") not in names:
        error = f"expected the name {found.queue} to be typed; nothing was done"
        return _job_page(call, found, error, status=400)
    try:
        change(found.id)
    except (StoreUnavailable, BrokerUnavailable):
        raise
    except DLQError as exc:  # it has ended, others were faster, or all messages would be lost
        return _job_page(call, _job_of(call), str(exc), status=409)
    if typed:
        call.site.runner().look_now()
    return call.to("job", job=found.id)


def _needed_permission(found: Job) -> Permission:
    """What one must be allowed to do to start, cancel or resume a job."""
    if found.kind == "release":
        return Permission.HOLD
    return Permission.DISCARD if found.kind in REMOVALS else Permission.REDRIVE


def _must_type(found: Job) -> bool:
    many = (found.total or TYPED_ABOVE + 1) > TYPED_ABOVE and not found.options.get("canary")
    return found.kind in REMOVALS or (found.kind in REDRIVES and many)


def _examples(call: Call, found: Job) -> list[Row]:
    """Some letters of a plan; those that are gone by now are left out."""
    ids = found.preview.get("examples", ()) if found.state == "planned" else ()
    return [Row.of(call, RawEntry(*entry)) for entry in call.dlq.store.named(found.queue, ids)]


def _edited_arguments(call: Call, found: Job) -> list[str]:
    """The arguments before and after a planned edit, as text; none of other jobs."""
    if found.kind != "edit" or found.state != "planned":
        return []
    both = suppressed(lambda: call.dlq.edited_arguments(found.id), DLQError) or ()
    masked = (call.dlq.redaction.arguments(**one) for one in both)
    return [json_text({"args": args, "kwargs": kwargs}) for args, kwargs in masked]


def _job_page(call: Call, found: Job, error: str = "", *, status: int = 200) -> Page:
    examples, edit = _examples(call, found), _edited_arguments(call, found)
    found = found.shown(call.dlq.redaction)
    where = suppressed(lambda: LetterFilter.from_json(found.filter), DLQError)
    verb = found.kind.capitalize()
    return call.page(
        "plan.html" if found.state in ("planned", "expired") else "job.html",
        status=status,
        title=f"{verb} of {found.queue}: {found.state}",
        job=found,
        verb=verb,
        query=query_of(where) if where is not None else {},
        must_type=_must_type(found),
        allowed=call.may(_needed_permission(found)),
        error=error,
        examples=examples,
        edit=edit,
        restorable=_is_restorable(found),
    )


def _is_restorable(found: Job) -> bool:
    """True for a discard whose letters the bin may have."""
    discards = found.kind == "discard" and not found.options.get("forever")
    recent = datetime.now(timezone.utc) - found.updated_at < KEPT_IN_BIN
    return discards and recent and bool(found.counts.get("removed"))
