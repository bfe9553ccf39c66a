"""Policies in force, and overrides of them for a while."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.policies.overrides import KEYS
from celery_dlq.policies.policy import duration_seconds
from celery_dlq.web.http import RequestError
from celery_dlq.web.pages.common import confirm, confirmed, suppressed
from celery_dlq.web.templating import duration, plain

if TYPE_CHECKING:
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call


def policies(call: Call) -> Response:
    """Show the policy of every queue and task."""
    return _page(call)


def set_policy(call: Call) -> Response:
    """Override a policy for a while: first show what changes, then do it."""
    value = call.request.value
    queue, key, text = (value(name).strip() for name in ("queue", "key", "value"))
    try:
        span = timedelta(seconds=duration_seconds(value("for").strip() or "1h") or 0)
        made = call.dlq.policy_admin().check_override(queue, span, **{key: text})
    except (DLQError, TypeError, ValueError, OverflowError) as exc:
        return _page(call, error=str(exc))
    if not confirmed(call):
        return confirm(
            call,
            section="policies",
            title=f"Override {key} of {queue}?",
            button=f"Override {key}",
            facts=[
                ("now", _value(call, queue, key)),
                ("then", _shown(made[0].value)),
                ("for", duration(span)),
                ("by", whoami()),
                ("noticed", "by running workers within seconds"),
            ],
            back=call.link("policies"),
        )
    call.dlq.policy_admin().override_policy(queue, span, **{key: text})
    call.web.forget_surroundings()
    return call.to("policies")


def unset_policy(call: Call) -> Response:
    """End an override early: first show what the value is then."""
    queue, key = call.request.value("queue"), call.request.value("key")
    if not key:
        raise RequestError(400, "expected the key of an override, got none")
    if not confirmed(call):
        return confirm(
            call,
            section="policies",
            title=f"End the override of {key} of {queue}?",
            button="End the override",
            facts=[
                ("now", _value(call, queue, key)),
                ("then", "what settings and code say"),
                ("noticed", "by running workers within seconds"),
            ],
            back=call.link("policies"),
        )
    call.dlq.policy_admin().lift_policy(queue, key)
    call.web.forget_surroundings()
    return call.to("policies")


def _value(call: Call, queue: str, key: str) -> str:
    """The value in force, and where it comes from."""
    report = suppressed(lambda: call.dlq.policy_admin().policies(queue), DLQError)
    views = [] if report is None else [view for view in report.views if view.task is None]
    if not views:
        return "unknown"
    found = views[0].to_json()["policy"].get(key) or {"value": None, "source": "default"}
    value = "not set" if found["value"] is None else _shown(found["value"])
    return f"{value} ({found['source']})"


def _shown(value: Any) -> str:
    return "off" if value is False else plain(value)


def _page(call: Call, error: str = "") -> Response:
    admin = call.dlq.policy_admin()
    report = admin.policies()
    return call.page(
        "policies.html",
        status=400 if error else 200,
        section="policies",
        title="Policies",
        views=[view.to_json() for view in report.views],
        warnings=report.warnings,
        overrides=call.dlq.backend.workers.overrides(),
        keys=KEYS,
        shown=_shown,
        error=error,
        typed=call.request.value,
    )


def audit(call: Call) -> Response:
    """Show who changed what, newest first."""
    found = call.dlq.operations().changes(limit=200)
    redaction = call.web.redaction
    shown = [redaction.shown(change, "detail") for change in found]
    return call.page("audit.html", section="audit", title="Audit", changes=shown)
