"""Policies in force, and overrides of them for a while."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.policies.checks import duration_seconds
from celery_dlq.policies.overrides import keys
from celery_dlq.policies.table import RETENTION, PolicyTable, of_whole_queues
from celery_dlq.store.instructions import Override
from celery_dlq.web.http import Permission, RequestError
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
    values: dict[str, Any] = {key: text}
    try:
        span = timedelta(seconds=duration_seconds(value("for").strip() or "1h") or 0)
        admin = call.dlq.policy_admin()
        made = admin.check_override(queue, span, **values)
    except (DLQError, TypeError, ValueError, OverflowError) as exc:
        return _page(call, error=str(exc))
    _check_may(call, key)
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
                *_effect(call, queue, key, admin.after(made)),
            ],
            back=call.link("policies"),
        )
    admin.override_policy(queue, span, **values)
    call.web.status.forget_fleet()
    return call.to("policies")


def unset_policy(call: Call) -> Response:
    """End an override early: first show what the value is then."""
    queue, key = call.request.value("queue"), call.request.value("key")
    if not key:
        raise RequestError(400, "expected the key of an override, got none")
    _check_may(call, key)
    admin = call.dlq.policy_admin()
    if not confirmed(call):
        return confirm(
            call,
            section="policies",
            title=f"End the override of {key} of {queue}?",
            button="End the override",
            facts=[
                ("now", _value(call, queue, key)),
                ("then", "what settings and code say"),
                *_effect(call, queue, key, admin.after(lifted=[(queue, key)])),
            ],
            back=call.link("policies"),
        )
    admin.lift_policy(queue, key)
    call.web.status.forget_fleet()
    return call.to("policies")


def _needed(key: str) -> Permission:
    """What a user must be allowed to do with letters whose policy they change."""
    if key in RETENTION:
        return Permission.DISCARD
    return Permission.REDRIVE if key == "auto_redrive" else Permission.EDIT_POLICIES


def _check_may(call: Call, key: str) -> None:
    if not call.user.may(_needed(key)):
        raise RequestError(403, f"expected the permission {_needed(key)}. {call.user.why_not}")


def _effect(call: Call, queue: str, key: str, after: PolicyTable) -> list[tuple[str, str]]:
    """When a change begins, and what it does to the letters that are there."""
    if key not in of_whole_queues():
        return [("noticed", "by running workers within seconds")]
    effect = call.dlq.removal().effect(queue, frozenset({key}), after)
    return [
        ("letters", str(effect) or "removes and redrives none of those that are there now"),
        ("begins", "in one minute; until then letters are left alone, and it can be taken back"),
        ("afterwards", "what it removed can be restored for 24 hours"),
    ]


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
        overrides=[
            o for o in call.dlq.backend.instructions.in_force(Override) if o.value is not None
        ],
        may_change=lambda key: call.may(_needed(key)),
        keys=keys(),
        shown=_shown,
        error=error,
        typed=call.request.value,
    )


def audit(call: Call) -> Response:
    """Show who changed what, newest first."""
    found = call.dlq.jobs().changes(limit=200)
    redaction = call.web.redaction
    shown = [redaction.shown(change, "detail") for change in found]
    return call.page("audit.html", section="audit", title="Audit", changes=shown)
