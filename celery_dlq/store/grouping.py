"""The order of groups, and counts over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from celery_dlq.store.records import Group, GroupOrder

_MINUTE, _RECENT, _HOUR = 60, 300, 3600  # seconds
_HOURS, _MINUTES = 24, 60


def in_order(groups: Iterable[Group], by: GroupOrder) -> list[Group]:
    """Sort groups."""
    if by == "newest":
        return sorted(groups, key=lambda group: (group.last_seen_at, group.fingerprint))[::-1]
    return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))


def by_hour(letters: Mapping[int, int], now: datetime) -> tuple[int, ...]:
    """Return the course of a group, from its letters by the number of the hour since 1970."""
    last = int(now.timestamp()) // _HOUR
    return tuple(letters.get(hour, 0) for hour in range(last - _HOURS + 1, last + 1))


def in_last_hour(letters: Mapping[int, int], now: datetime) -> int:
    """Return the letters of the last hour, from the letters by the number of the five minutes."""
    last = int(now.timestamp()) // _RECENT
    spans = range(last - _HOUR // _RECENT + 1, last + 1)
    return sum(letters.get(span, 0) for span in spans)


def by_minute(letters: Mapping[tuple[str, int], int], now: datetime) -> dict[str, tuple[int, ...]]:
    """Return arrivals, from the letters by reason and number of the minute since 1970."""
    last = int(now.timestamp()) // _MINUTE
    minutes = range(last - _MINUTES + 1, last + 1)
    reasons = sorted({reason for reason, minute in letters if minute in minutes})
    return {
        reason: tuple(letters.get((reason, minute), 0) for minute in minutes) for reason in reasons
    }
