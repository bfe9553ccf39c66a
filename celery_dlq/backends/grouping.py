"""Groups of letters, for stores that keep no tally."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from celery_dlq.backends.base import Group
from celery_dlq.record import DeadLetter


def groups_of(letters: Iterable[DeadLetter], most: int | None) -> list[Group]:
    """Group letters by their fingerprints.

    Args:
        letters: In the order of storing; the last letter of a group describes it.
        most: Maximum number of groups; ``None`` for all.

    Returns:
        The groups, largest first.
    """
    groups: dict[str, Group] = {}
    for letter in letters:
        newest = Group(
            fingerprint=letter.fingerprint,
            letters=1,
            task_name=letter.task_name,
            reason=letter.reason.value,
            exception_type=letter.exception_type,
            first_seen_at=letter.dead_lettered_at,
            last_seen_at=letter.dead_lettered_at,
            example_id=letter.id,
        )
        before = groups.get(letter.fingerprint)
        if before is not None:
            newest = replace(newest, letters=before.letters + 1, first_seen_at=before.first_seen_at)
        groups[letter.fingerprint] = newest
    return sorted(groups.values(), key=lambda group: (-group.letters, group.fingerprint))[:most]
