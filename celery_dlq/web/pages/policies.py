"""Policies in force, and overrides of them for a while."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.policies.overrides import overridable_keys
from celery_dlq.policies.table import RETENTION, PolicyTable, of_whole_queues
from celery_dlq.web.http import Call, Page, Permission, RequestError
from celery_dlq.web.pages import confirm, span_of, suppressed
from celery_dlq.web.templating import duration, plain


def policies(call: Call) -> Page:
    """Show the policy of every queue and task."""
    return _policies_page(call)


def set_policy(call: Call) -> Page:
    """Override a policy for a while: first show what changes, then do it."""
    queue, key, text = map(call.typed, ("queue", "key", "value"))
    values: dict[str, Any] = {key: text}
    try:
        span = span_of(call) or timedelta(hours=1)
        made = call.dlq.check_override(queue, span, **values)
    except (DLQError, TypeError, ValueError, OverflowError) as exc:
        return _policies_page(call, error=str(exc))
    facts = {"then": _shown_value(made[0].value), "for": duration(span), "by": whoami()}
    return _changed(
        call,
        lambda: call.dlq.override_policy(queue, span, **values),
        title=f"Override {key} of {queue}?",
        button=f"Override {key}",
        facts=facts,
        after=call.dlq.policies_after(made),
    )


def unset_policy(call: Call) -> Page:
    """End an override early: first show what the value is then."""
    queue, key = call.typed("queue"), call.typed("key")
    if not key:
        raise RequestError(400, "expected the key of an override, got none")
    return _changed(
        call,
        lambda: call.dlq.lift_policy(queue, key),
        title=f"End the override of {key} of {queue}?",
        button="End the override",
        facts={"then": "the value of settings and code"},
        after=call.dlq.policies_after(lifted=[(queue, key)]),
    )


def _changed(
    call: Call,
    change: Callable[[], object],
    *,
    title: str,
    button: str,
    facts: dict[str, str],
    after: PolicyTable,
) -> Page:
    queue, key = call.typed("queue"), call.typed("key")
    call.check(_needed_permission(key))
    return confirm(
        call,
        change,
        title=title,
        button=button,
        facts={
            "now": _value_in_force(call, queue, key),
            **facts,
            **_change_effect(call, queue, key, after),
        },
        back=call.link("policies"),
    )


def _needed_permission(key: str) -> Permission:
    """What a user must be allowed to do with letters whose policy they change."""
    if key in RETENTION:
        return Permission.DISCARD
    return Permission.REDRIVE if key in of_whole_queues() else Permission.EDIT_POLICIES


def _change_effect(call: Call, queue: str, key: str, after: PolicyTable) -> dict[str, str]:
    """When a change begins, and what it does to the letters that are there."""
    if key not in of_whole_queues():
        return {"noticed": "by running workers within seconds"}
    effect = call.dlq.policy_effect(queue, frozenset({key}), after)
    return {
        "letters": str(effect) or "none is removed or redriven now",
        "begins": "in one minute; until then the letters stay, and you can take it back",
        "afterwards": "you can restore removed letters for 24 hours",
    }


def _value_in_force(call: Call, queue: str, key: str) -> str:
    """The value in force, and where it comes from."""
    report = suppressed(lambda: call.dlq.policies(queue), DLQError)
    views = [] if report is None else [view for view in report.views if view.task is None]
    if not views:
        return "unknown"
    found = views[0].to_json()["policy"].get(key) or {"value": None, "source": "default"}
    value = "not set" if found["value"] is None else _shown_value(found["value"])
    return f"{value} ({found['source']})"


def _shown_value(value: Any) -> str:
    return "off" if value is False else plain(value)


def _policies_page(call: Call, error: str = "") -> Page:
    report = call.dlq.policies()
    return call.page(
        "policies.html",
        status=400 if error else 200,
        title="Policies",
        views=[view.to_json() for view in report.views],
        warnings=report.warnings,
        overrides=[one for one in call.dlq.overrides() if one.value is not None],
        may_change=lambda key: call.may(_needed_permission(key)),
        keys=overridable_keys(),
        shown=_shown_value,
        error=error,
    )


def audit(call: Call) -> Page:
    """Show who changed what, newest first."""
    shown = [call.dlq.redaction.shown(one, "detail") for one in call.dlq.changes(limit=200)]
    return call.page("audit.html", title="Audit", changes=shown)
