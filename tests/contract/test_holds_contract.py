"""The contract of every `HoldStore`, and of the store of held messages beside it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, a_delivery, a_letter, key_of

from celery_dlq.store.backend import RedisBackend
from celery_dlq.store.base import Backend, Hold, Stored

HOLD = "hold-0a1b2c3d"


def a_hold(**changes: Any) -> Hold:
    """A hold as an operator makes one."""
    values: dict[str, Any] = {
        "id": HOLD,
        "task": "shop.charge",
        "where": ("kwargs.tenant=42",),
        "created_at": NOW,
        "reason": 'süß \x00 \ud83d "{}',
        "actor": "ann@desk",
    }
    return Hold(**{**values, **changes})


def put(parts: Backend, hold_id: str = HOLD) -> None:
    """Hold a message."""
    letter = a_letter(dead_letter_queue=hold_id)
    assert parts.held.dead_letter(letter, key_of(letter)) is Stored.NEW


def test_holds_come_back_whole_and_oldest_first(parts: Backend) -> None:
    """Those that have ended, too."""
    later = a_hold(id="hold-b", created_at=NOW + timedelta(seconds=1), where=())
    ended = a_hold(id="hold-c", created_at=NOW - timedelta(days=1), until=NOW, job="job")
    for hold in (later, ended, a_hold()):
        assert parts.holds.replace(None, hold)
    assert parts.holds.all() == [ended, a_hold(), later]


def test_only_who_knows_a_hold_changes_it(parts: Backend) -> None:
    """Of two processes that open, change or end a hold, one does."""
    first, second = a_hold(), a_hold(reason="another")
    assert parts.holds.replace(None, first)
    assert not parts.holds.replace(None, second)
    assert not parts.holds.replace(second, a_hold(until=NOW))
    ended = replace(first, until=NOW)
    assert parts.holds.replace(first, ended)
    assert not parts.holds.replace(first, None)
    assert parts.holds.all() == [ended]
    assert parts.holds.replace(ended, None)
    assert not parts.holds.replace(ended, None)
    assert parts.holds.all() == []


def test_every_change_of_a_hold_is_one_that_workers_notice(parts: Backend) -> None:
    """By the revision that their heartbeat returns."""
    revisions = [parts.workers.heartbeat("w")[1]]
    for known, hold in ((None, a_hold()), (a_hold(), a_hold(until=NOW)), (a_hold(until=NOW), None)):
        assert parts.holds.replace(known, hold)
        revisions.append(parts.workers.heartbeat("w")[1])
    assert revisions == sorted(set(revisions))
    parts.holds.replace(a_hold(), None)
    assert parts.workers.heartbeat("w")[1] == revisions[-1]
    assert parts.workers.overrides() == []


def test_a_hold_with_messages_is_not_removed(parts: Backend) -> None:
    """Nobody would find them; once it is empty, nothing is left of it."""
    parts.holds.replace(None, a_hold())
    put(parts)
    assert not parts.holds.replace(a_hold(), None)
    (found,) = parts.held.letters(HOLD, newest_first=False)
    assert parts.held.remove(HOLD, [found.letter.id]) == 1
    assert parts.holds.replace(a_hold(), None)
    if isinstance(parts, RedisBackend):
        assert parts.held.names() == []
        assert not parts.client.exists(f"dlq:held:{{{HOLD}}}:letters")


def test_held_messages_are_no_letters(parts: Backend) -> None:
    """They are in no dead-letter queue, and the counts of their messages stay."""
    letter = a_letter(dead_letter_queue="orders-DLQ")
    key = key_of(letter)
    parts.counter.count_first(key, a_delivery())
    parts.counter.flush()
    before = parts.counter.history(key)
    assert before
    held = replace(letter, dead_letter_queue=HOLD)
    assert parts.held.dead_letter(held, replace(key, dead_letter_queue=HOLD)) is Stored.NEW
    assert (
        parts.held.dead_letter(held, replace(key, dead_letter_queue=HOLD)) is Stored.ALREADY_THERE
    )
    assert parts.counter.history(key) == before
    assert parts.letters.names() == []
    assert [(queue.name, queue.letters) for queue in parts.held.queues()] == [(HOLD, 1)]


@pytest.mark.parametrize("text", [b"{}", b"no json", b'{"id": 1, "created_at": "x"}'])
def test_a_hold_that_cannot_be_read_is_skipped(redis_url: str, text: bytes) -> None:
    """It is from a later version; the others hold."""
    parts = RedisBackend(redis_url, timeout_seconds=2.0)
    parts.client.hset(parts.keys.holds(), "hold-x", text)
    parts.holds.replace(None, a_hold())
    assert parts.holds.all() == [a_hold()]
    parts.close()


def test_keys_of_a_later_version_survive_a_look(redis_url: str) -> None:
    """And who changes the hold does so although they are there."""
    parts = RedisBackend(redis_url, timeout_seconds=2.0)
    parts.holds.replace(None, a_hold())
    text = parts.client.hget(parts.keys.holds(), HOLD)
    parts.client.hset(parts.keys.holds(), HOLD, text[:-1] + b',"new":1}')
    assert parts.holds.all() == [a_hold()]
    assert parts.holds.replace(a_hold(), a_hold(until=NOW))
    parts.close()
