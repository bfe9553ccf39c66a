"""The table of routes, and the pages of an app made from it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.groups import pages as groups
from celery_dlq.features.hold import pages as holds
from celery_dlq.web.http import Permission, RequestError, Response
from celery_dlq.web.pages import (
    changes,
    exports,
    jobs,
    letters,
    login,
    overview,
    policies,
)
from celery_dlq.web.routes import Route, Routes
from celery_dlq.web.templating import STATIC_TYPES
from celery_dlq.web.web import Web, WebOptions

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.web.web import Call

VIEW, REDRIVE, DISCARD, EDIT_POLICIES = (
    Permission.VIEW,
    Permission.REDRIVE,
    Permission.DISCARD,
    Permission.EDIT_POLICIES,
)


def static(call: Call) -> Response:
    """Give a static file; its path changes with its content."""
    name = call.parts["file"]
    if call.web.templates.static.get(name) != call.parts["hash"]:
        raise RequestError(404, f"there is no file {name!r} of this version")
    return Response(
        content_type=STATIC_TYPES[name[name.rfind(".") :]],
        body=(files("celery_dlq.web") / "static" / name).read_bytes(),
        headers=[("cache-control", "public, max-age=31536000, immutable")],
    )


def health(call: Call) -> Response:
    """Say if pages can be shown; has no data. Read every few seconds, however often it is asked."""
    call.web.status.fleet()
    if json.loads(call.web.status.numbers()).get("away"):
        raise StoreUnavailable("the queues and jobs cannot be read; the log says why")
    return Response(content_type="text/plain; charset=utf-8", body=b"ok\n")


def poll(call: Call) -> Response:
    """Give the numbers that change while somebody looks."""
    return Response(content_type="application/json", body=call.web.status.numbers())


def _get(name: str, pattern: str, page: Any, **more: Any) -> Route:
    more = {"permission": VIEW, **more}
    return Route(name=name, method="GET", pattern=pattern, page=page, **more)


def _post(name: str, pattern: str, page: Any, permission: Permission | None, **more: Any) -> Route:
    more = {"seconds": 30.0, **more}
    return Route(
        name=name, method="POST", pattern=pattern, page=page, permission=permission, **more
    )


ROUTES = Routes(
    [
        _get("overview", "/", overview.overview),
        _get("groups", "/queues/{queue}", groups.groups),
        _get("group", "/queues/{queue}/groups/{fingerprint}", groups.group),
        _get("apart", "/queues/{queue}/groups/{fingerprint}/apart", groups.apart, seconds=4.0),
        _post("add_note", "/queues/{queue}/groups/{fingerprint}/notes", groups.add_note, REDRIVE),
        _post("set_state", "/queues/{queue}/groups/{fingerprint}/state", groups.set_state, REDRIVE),
        _get("letters", "/queues/{queue}/letters", letters.letters),
        _get("letter", "/queues/{queue}/letters/{letter}", letters.letter),
        _get("body", "/queues/{queue}/letters/{letter}/body", letters.body),
        _get("export", "/queues/{queue}/export/{format}", exports.export, seconds=600.0),
        _get("redrive_form", "/queues/{queue}/redrive", changes.redrive_form),
        _post("plan_redrive", "/queues/{queue}/redrive", changes.plan_redrive, REDRIVE),
        _get("discard_form", "/queues/{queue}/discard", changes.discard_form),
        _post("plan_discard", "/queues/{queue}/discard", changes.plan_discard, DISCARD),
        _get("discarded", "/queues/{queue}/discarded", changes.discarded),
        _post("restore", "/queues/{queue}/discarded", changes.restore, REDRIVE),
        _get("edit_form", "/queues/{queue}/letters/{letter}/edit", changes.edit_form),
        _post("plan_edit", "/queues/{queue}/letters/{letter}/edit", changes.plan_edit, REDRIVE),
        _get("jobs", "/jobs", jobs.jobs),
        _get("job", "/jobs/{job}", jobs.job),
        _post("start", "/jobs/{job}/start", jobs.start, VIEW),
        _post("cancel", "/jobs/{job}/cancel", jobs.cancel, VIEW),
        _post("resume", "/jobs/{job}/resume", jobs.resume, VIEW),
        _get("holds", "/holds", holds.holds),
        _post("hold", "/holds", holds.hold, REDRIVE),
        _post("end_hold", "/holds/end", holds.end_hold, REDRIVE),
        _get("policies", "/policies", policies.policies),
        _post("set_policy", "/policies", policies.set_policy, EDIT_POLICIES),
        _post("unset_policy", "/policies/unset", policies.unset_policy, EDIT_POLICIES),
        _get("audit", "/audit", policies.audit),
        _get("poll", "/events/poll", poll),
        _get("login", "/login", login.form, permission=None, seconds=0),
        _post("log_in", "/login", login.log_in, permission=None, seconds=10),
        _post("log_out", "/logout", login.log_out, permission=None, seconds=0),
        _get("static", "/static/{hash}/{file}", static, permission=None, seconds=0),
        _get("health", "/healthz", health, permission=None),
    ]
)


def web(assembly: Assembly, options: WebOptions) -> Web:
    """Make the pages of an app."""
    return Web(assembly, ROUTES, options)
