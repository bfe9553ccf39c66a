"""Groups of letters, for stores that keep no tally; counts over time, for all stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.base import Group, GroupOrder

_MINUTE, _RECENT, _HOUR = 60, 300, 3600  # seconds
_HOURS, _MINUTES = 24, 60
_MAX_RELEASES = 5


def groups_of(
    letters: Iterable[tuple[DeadLetter, datetime | None]],
    now: datetime,
    most: int | None,
    by: GroupOrder,
) -> list[Group]:
    """Group letters by their fingerprints."""
    groups: dict[str, Group] = {}
    hours: dict[str, Counter[int]] = {}
    recent: dict[str, Counter[int]] = {}
    for letter, stored in letters:
        groups[letter.fingerprint] = _grown(groups.get(letter.fingerprint), letter)
        seconds = 0 if stored is None else int(stored.timestamp())
        hours.setdefault(letter.fingerprint, Counter())[seconds // _HOUR] += 1
        recent.setdefault(letter.fingerprint, Counter())[seconds // _RECENT] += 1
    found = [
        replace(
            group,
            course=by_hour(hours[fingerprint], now),
            last_hour=in_last_hour(recent[fingerprint], now),
        )
        for fingerprint, group in groups.items()
    ]
    return in_order(found, by)[:most]


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


def _grown(group: Group | None, letter: DeadLetter) -> Group:
    newest = Group(
        fingerprint=letter.fingerprint,
        letters=1,
        task_name=letter.task_name,
        reason=letter.reason.value,
        exception_type=letter.exception_type,
        first_seen_at=letter.dead_lettered_at,
        last_seen_at=letter.dead_lettered_at,
        example_id=letter.id,
        releases=(letter.release,) if letter.release else (),
    )
    if group is None:
        return newest
    return replace(
        newest,
        letters=group.letters + 1,
        first_seen_at=group.first_seen_at,
        releases=_with_release(group.releases, letter.release),
    )


def _with_release(releases: Sequence[str], release: str | None) -> Sequence[str]:
    """Return the releases, newest first; the first one stays."""
    if not release:
        return releases
    kept = (release, *(other for other in releases if other != release))
    return kept if len(kept) <= _MAX_RELEASES else (*kept[: _MAX_RELEASES - 1], kept[-1])
