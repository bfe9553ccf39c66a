"""The pages of an app: their table, and the way of a call to its page.

What a front (Starlette, Django) checks itself comes first: the host, who asks, and where a form
comes from. Then the permission, and the page, in a thread of its own for a limited time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as LateError
from http import HTTPStatus

from celery_dlq.errors import (
    BrokerUnavailable,
    CorruptLetter,
    DLQError,
    MissingExtra,
    NotFound,
    StoreUnavailable,
)
from celery_dlq.events import acting_as
from celery_dlq.letters.printable import get_logger, one_line
from celery_dlq.registry import features
from celery_dlq.store.connect import is_refusal
from celery_dlq.web.http import NOBODY, Call, Page, Permission, RequestError, Route, get, post
from celery_dlq.web.pages import changes, letters, policies, queues
from celery_dlq.web.templating import STATIC_TYPES

logger = get_logger("celery_dlq.web")

SECURITY_HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    # Not "no-referrer": then the Origin of a form is "null".
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
)

_STATUS: tuple[tuple[type[DLQError], int], ...] = (
    (NotFound, 404),
    (StoreUnavailable, 503),
    (BrokerUnavailable, 503),
    (CorruptLetter, 422),
    (MissingExtra, 501),
)
_REFUSED = "The store refuses this"
_TITLES = {500: "This page failed", 503: "The store does not answer"}


def poll(call: Call) -> Page:
    """Give the numbers that change while somebody looks."""
    return Page(content_type="application/json", body=call.site.status.numbers())


def static(call: Call) -> Page:
    """Give a static file; its path changes with its content."""
    name = call.parts["file"]
    if call.site.templates.static.get(name) != call.parts["hash"]:
        raise RequestError(404, f"there is no file {name!r} of this version")
    return Page(
        content_type=STATIC_TYPES[name[name.rfind(".") :]],
        body=call.site.templates.static_files[name],
        headers={"cache-control": "public, max-age=31536000, immutable"},
    )


def health(call: Call) -> Page:
    """Say if pages can be shown; has no data. Read every few seconds, however often it is asked."""
    call.site.status.fleet()
    if json.loads(call.site.status.numbers()).get("away"):
        raise StoreUnavailable("the queues and jobs cannot be read; the log says why")
    return Page(content_type="text/plain; charset=utf-8", body=b"ok\n")


VIEW, REDRIVE, DISCARD = Permission.VIEW, Permission.REDRIVE, Permission.DISCARD
EDIT_POLICIES = Permission.EDIT_POLICIES

_QUEUE, _LETTER = "/queues/{queue}", "/queues/{queue}/letters/{letter}"
ROUTES = (
    get("/", queues.overview, tab="Queues"),
    get(_QUEUE, queues.groups),
    get(f"{_QUEUE}/groups/{{fingerprint}}", queues.group),
    get(f"{_QUEUE}/letters", letters.letters),
    get(_LETTER, letters.letter),
    get(f"{_LETTER}/body", letters.body),
    get(f"{_QUEUE}/export/{{format}}", letters.export, seconds=30.0),
    get(f"{_QUEUE}/redrive", changes.redrive_form),
    post(f"{_QUEUE}/redrive", changes.plan_redrive, REDRIVE, "redrive letters"),
    get(f"{_QUEUE}/discard", changes.discard_form),
    post(f"{_QUEUE}/discard", changes.plan_discard, DISCARD, "discard letters"),
    get(f"{_QUEUE}/discarded", queues.discarded),
    post(f"{_QUEUE}/discarded", queues.restore, REDRIVE, "restore discarded ones"),
    get(f"{_LETTER}/edit", changes.edit_form),
    post(f"{_LETTER}/edit", changes.plan_edit, REDRIVE, "edit letters"),
    get("/jobs", changes.jobs, tab="Jobs"),
    get("/jobs/{job}", changes.job),
    post("/jobs/{job}/start", changes.start, VIEW),
    post("/jobs/{job}/cancel", changes.cancel, VIEW),
    post("/jobs/{job}/resume", changes.resume, VIEW),
    post("/jobs/{job}/restore", changes.restore_job, REDRIVE, "restore discarded ones"),
    get("/policies", policies.policies, tab="Policies"),
    post("/policies", policies.set_policy, EDIT_POLICIES, "override policies"),
    post("/policies/unset", policies.unset_policy, EDIT_POLICIES, "end overrides"),
    get("/audit", policies.audit, tab="Audit"),
    get("/events/poll", poll),
    get("/static/{hash}/{file}", static, None, seconds=0),
    get("/healthz", health, None),
)
"""The pages of the core."""


def all_routes() -> tuple[Route, ...]:
    """The pages of the core and of the features that are plugged in."""
    more = (feature.load(feature.pages) for feature in features() if feature.pages)
    return (*ROUTES, *(route for routes in more for route in routes))


def allowed(permission: Permission) -> str:
    """What a permission lets users do, in words of its routes: for who gives it."""
    does = (one.does for one in all_routes() if one.does and one.permission is permission)
    return ", ".join(dict.fromkeys(does)) or "look at letters, their arguments and the audit"


def handle(
    call: Call, methods: Mapping[str, Route], check: Callable[[], Page | None] = lambda: None
) -> Page:
    """Answer a call of the path that has these methods. Never raises.

    ``check`` is the front's part: it sets the call's user, gives a page instead of the one that
    was asked for, or raises `RequestError`.
    """
    call.route = methods.get("GET" if call.method == "HEAD" else call.method)
    try:
        page = check() or _answer_call(call, methods)
    except Exception as exc:  # noqa: BLE001 - a page of its own
        page = _error_page(call, exc)
    if call.method == "POST":
        call.site.status.forget()
    if call.route is None and methods:
        page.headers["allow"] = ", ".join(methods)
    kept = {"content-type": page.content_type, "cache-control": "no-store", **page.headers}
    page.headers = {**kept, **dict(SECURITY_HEADERS)}
    return page


def _answer_call(call: Call, methods: Mapping[str, Route]) -> Page:
    route = call.route
    if route is None and methods:
        raise RequestError(405, f"expected {' or '.join(methods)} for this path")
    if route is None:
        raise RequestError(404, f"there is no page {call.path!r}")
    if call.site.runs_jobs:
        call.site.runner()  # jobs that another process left waiting go on
    # A refused form shows what it would change: who may not look sends none.
    for needed in (Permission.VIEW, route.permission) if route.permission else ():
        call.check(needed)
    return _call_in_thread(call, route) if route.seconds else route.page(call)


def _call_in_thread(call: Call, route: Route) -> Page:
    """Call the page in a thread of its own, for a limited time."""

    def run() -> Page:
        with acting_as((call.user or NOBODY).name):
            return route.page(call)

    answer = call.site.threads.submit(run)
    try:
        return answer.result(timeout=route.seconds)
    except LateError:
        answer.cancel()  # if it still waits for a thread
        raise StoreUnavailable(
            f"the store did not answer within {route.seconds:.0f} s; it is slow, or away"
        ) from None


def _error_page(call: Call, exc: Exception) -> Page:
    """The page for an error; it is made where requests are answered, so it waits for nothing."""
    call.failed = True
    text = str(exc)
    if isinstance(exc, RequestError):
        status = exc.status
    elif isinstance(exc, DLQError):
        status = next((code for kind, code in _STATUS if isinstance(exc, kind)), 400)
    else:
        logger.error("A page failed: %s %s", call.method, call.path[:200], exc_info=exc)
        status, text = 500, "The log of this process says why."
    if status in (401, 403) and call.method == "POST":  # the form may have secrets: it is left out
        logger.warning(
            "Refused POST %s of %s at %s: %s",
            one_line(call.path[:200]),
            one_line((call.user or NOBODY).name[:100]) or "nobody",
            one_line(call.client[:60]) or "an unknown address",
            one_line(text[:300]),
        )
    refused = isinstance(exc, StoreUnavailable) and is_refusal(exc)
    title = _REFUSED if refused else _TITLES.get(status) or HTTPStatus(status).phrase
    away = status == 503 and not refused  # noqa: PLR2004
    shown = {"title": title, "http_status": status, "text": text, "away": away}
    page = call.page("error.html", status=status, **shown)
    if status == 503:  # noqa: PLR2004
        page.headers["retry-after"] = "5"
    return page
