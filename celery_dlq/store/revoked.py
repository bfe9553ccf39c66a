"""When tasks were revoked: what workers that share revoked ids do not tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery_dlq.store.keys import spelled
from celery_dlq.store.part import Part
from celery_dlq.store.scripts import MOST_IDS

MOST_REVOKED = 50_000
"""Tasks that are noted; a worker of Celery remembers as many."""


class RevokedTasks(Part):
    """The tasks that operators revoked, by the clock of Redis."""

    def note_tasks(self, ages: Mapping[str, float]) -> None:
        """Note tasks, each with the seconds since it was revoked; twice is as once."""
        names = list(ages)
        for start in range(0, len(names), MOST_IDS):
            some = [
                value
                for name in names[start : start + MOST_IDS]
                for value in (spelled(name), int(ages[name] * 1_000_000))
            ]
            self._run_script("revoked", int(self._store.count_ttl * 1_000_000), MOST_REVOKED, *some)

    def last_revoked_at(self, names: Sequence[str]) -> float:
        """When the last of them was revoked, in microseconds since 1970; 0 if none was."""
        found = self._send_command("ZMSCORE", self._keys.revoked(), *map(spelled, names))
        return max((float(one) for one in found if one is not None), default=0.0)
