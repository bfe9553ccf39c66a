"""Overrides: policy keys that an operator changes at run time, for a limited time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from celery_dlq import timing
from celery_dlq.errors import SettingsError
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import iso
from celery_dlq.policies.checks import is_off, suggestion
from celery_dlq.policies.policy import Policy, policy_keys
from celery_dlq.policies.table import PolicyTable, of_whole_queues
from celery_dlq.store.instructions import Override

logger = get_logger("celery_dlq")

MAX_OVERRIDE = timedelta(days=30)


def overridable_keys() -> tuple[str, ...]:
    """The keys that can be overridden: only those that workers apply."""
    return tuple(key for key, found in policy_keys().items() if not found.why_not)


def checked(
    queue: str, key: str, value: Any, span: timedelta, actor: str, now: datetime
) -> Override:
    """Check an override and build it."""
    if key not in overridable_keys():
        found = policy_keys().get(key)
        why = f": {found.why_not}" if found else f"; {suggestion(key, overridable_keys())}"
        raise SettingsError(f"expected a policy key that can be overridden, got {key!r}{why}")
    parsed = Policy.parse({key: _parsed_value(key, value)}, f"the override of {queue!r}")
    since, plain = begins_at(key, now), parsed.to_json()[key]
    return Override(queue=queue, key=key, value=plain, until=since + span, actor=actor, since=since)


def begins_at(key: str, now: datetime) -> datetime:
    """When a change of a key that is made now begins."""
    return now + timing.current.grace if key in of_whole_queues() else now


def applied(table: PolicyTable, overrides: Iterable[Override], now: datetime) -> PolicyTable:
    """The configured policies with the overrides in force at a time."""
    found = list(overrides)
    begun = [each for each in found if each.since <= now]
    return PolicyTable(
        table.queues,
        table.tasks,
        by_queue(each for each in begun if each.value is not None),
        frozenset(each.queue for each in found if each.since > now),
        frozenset(each.queue for each in begun if each.value is None),
    )


def by_queue(overrides: Iterable[Override]) -> dict[str, tuple[Policy, str]]:
    """Merge overrides into one policy per queue, with its actors and end times.

    An override that this version does not understand is skipped with a warning.
    """
    found: dict[str, tuple[Policy, str]] = {}
    for override in overrides:
        try:
            policy = Policy.parse({override.key: override.value}, f"override of {override.queue!r}")
        except SettingsError as exc:
            logger.warning("An override is ignored: %s", exc)
            continue
        before, sources = found.get(override.queue, (Policy(), ""))
        source = f"{override.actor} until {str(iso(override.until))[:16]}Z"
        joined = source if sources in {"", source} else f"{sources}, {source}"
        found[override.queue] = (policy.over(before), joined)
    return found


def _parsed_value(key: str, value: Any) -> Any:
    """Parse text of the command line; other values stay as they are."""
    if value is None or is_off(value):
        return False
    if not isinstance(value, str):
        return value
    if key == "reasons":
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value.lower())
    except (ValueError, RecursionError):
        return value
