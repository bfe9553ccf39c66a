"""Policies in force, and overrides of them for a while."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.policies.overrides import KEYS
from celery_dlq.policies.policy import duration_seconds
from celery_dlq.web.http import RequestError

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
    if value("confirmed") != "yes":
        return _page(
            call,
            asked={
                "queue": queue,
                "key": key,
                "value": text,
                "for": value("for").strip() or "1h",
                "span": span,
                "override": made[0],
                "before": _before(call, queue, key),
            },
        )
    call.dlq.policy_admin().override_policy(queue, span, **{key: text})
    call.web.forget_surroundings()
    return call.to("policies")


def unset_policy(call: Call) -> Response:
    """End an override early."""
    queue, key = call.request.value("queue"), call.request.value("key")
    if not key:
        raise RequestError(400, "expected the key of an override, got none")
    call.dlq.policy_admin().lift_policy(queue, key)
    call.web.forget_surroundings()
    return call.to("policies")


def _before(call: Call, queue: str, key: str) -> Any:
    try:
        report = call.dlq.policy_admin().policies(queue)
    except DLQError:
        return None
    view = next((view for view in report.views if view.task is None), None)
    return None if view is None else view.to_json()["policy"].get(key)


def _page(call: Call, error: str = "", asked: dict[str, Any] | None = None) -> Response:
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
        error=error,
        asked=asked,
        typed=call.request.value,
    )


def audit(call: Call) -> Response:
    """Show who changed what, newest first."""
    found = call.dlq.operations().changes(limit=200)
    redaction = call.web.redaction
    shown = [replace(change, detail=redaction.value(change.detail)) for change in found]
    return call.page("audit.html", section="audit", title="Audit", changes=shown)
