"""The contract of `RevokedTasks`: when tasks were revoked, by the clock of Redis."""

from __future__ import annotations

import pytest

from celery_dlq.letters.record import to_micros
from celery_dlq.store import revoked
from celery_dlq.store.store import Store


def test_the_last_revocation_counts(parts: Store) -> None:
    """Noted twice, as after a lost reply, or by two workers, is noted once."""
    tasks, now = parts.revoked, to_micros(parts.instructions.now())
    tasks.note_tasks({"id:a": 60.0, "id:b": 5.0, "id:\udcff": 0.0})
    tasks.note_tasks({"id:a": 60.0, "id:b": 30.0})
    assert tasks.last_revoked_at(["id:a"]) == pytest.approx(now - 60e6, abs=5e6)
    assert tasks.last_revoked_at(["id:a", "id:b", "id:c"]) == pytest.approx(now - 5e6, abs=5e6)
    assert tasks.last_revoked_at(["id:\udcff"]) == pytest.approx(now, abs=5e6)
    assert tasks.last_revoked_at(["id:c"]) == 0


def test_they_are_bounded_and_expire(parts: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is older than the counts of messages is forgotten, then the oldest."""
    monkeypatch.setattr(revoked, "MOST_REVOKED", 600)
    tasks = parts.revoked
    tasks.note_tasks({"id:old": parts.count_ttl + 1})
    tasks.note_tasks({f"id:{n}": 1000.0 - n for n in range(700)})
    assert [tasks.last_revoked_at([f"id:{n}"]) > 0 for n in ("old", 0, 99, 100, 699)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert 0 < parts.client.pttl(parts.keys.revoked()) <= parts.count_ttl * 1000
