"""The contract of holds among the instructions, and of the store of held messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, a_delivery, a_letter, key_of

from celery_dlq.store.holds import Hold
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import Stored

HOLD = "hold-0a1b2c3d"


def a_hold(**changes: Any) -> Hold:
    """A hold as an operator makes one."""
    values: dict[str, Any] = {
        "id": HOLD,
        "task": "shop.charge",
        "where": ("kwargs.tenant=42",),
        "since": NOW,
        "reason": 'süß \x00 \ud83d "{}',
        "actor": "ann@desk",
    }
    return Hold(**{**values, **changes})


def put(parts: Store, hold_id: str = HOLD) -> None:
    """Hold a message."""
    letter = a_letter(dead_letter_queue=hold_id)
    assert parts.held.dead_letter(letter, key_of(letter)) is Stored.NEW


def test_holds_come_back_whole_and_oldest_first(parts: Store) -> None:
    """Those that have ended, too."""
    later = a_hold(id="hold-b", since=NOW + timedelta(seconds=1), where=())
    ended = a_hold(id="hold-c", since=NOW - timedelta(days=1), until=NOW, job="job")
    for hold in (later, ended, a_hold()):
        assert parts.instructions.replace(None, hold)
    assert parts.instructions.of(Hold) == [ended, a_hold(), later]


def test_only_who_knows_a_hold_changes_it(parts: Store) -> None:
    """Of two processes that open, change or end a hold, one does."""
    first, second = a_hold(), a_hold(reason="another")
    assert parts.instructions.replace(None, first)
    assert not parts.instructions.replace(None, second)
    assert not parts.instructions.replace(second, a_hold(until=NOW))
    ended = replace(first, until=NOW)
    assert parts.instructions.replace(first, ended)
    assert not parts.instructions.replace(first, None)
    assert parts.instructions.of(Hold) == [ended]
    assert parts.instructions.replace(ended, None)
    assert not parts.instructions.replace(ended, None)
    assert parts.instructions.of(Hold) == []


def test_every_change_of_a_hold_is_one_that_workers_notice(parts: Store) -> None:
    """By the revision that their heartbeat returns."""
    revisions = [parts.workers.heartbeat("w")[1]]
    for known, hold in ((None, a_hold()), (a_hold(), a_hold(until=NOW)), (a_hold(until=NOW), None)):
        assert parts.instructions.replace(known, hold)
        revisions.append(parts.workers.heartbeat("w")[1])
    assert revisions == sorted(set(revisions))
    parts.instructions.replace(a_hold(), None)
    assert parts.workers.heartbeat("w")[1] == revisions[-1]
    assert parts.instructions.all() == []


def test_a_hold_with_messages_is_not_removed(parts: Store) -> None:
    """Nobody would find them; once it is empty, nothing is left of it."""
    parts.instructions.replace(None, a_hold())
    put(parts)
    assert not parts.instructions.replace(a_hold(), None)
    (found,) = parts.held.letters(HOLD, newest_first=False)
    assert parts.held.remove(HOLD, [found.letter.id]) == 1
    assert parts.instructions.replace(a_hold(), None)
    if isinstance(parts, Store):
        assert parts.held.names() == []
        assert not parts.client.exists(f"dlq:held:{{{HOLD}}}:letters")


def test_held_messages_are_no_letters(parts: Store) -> None:
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
    assert [(queue.name, queue.letters) for queue in parts.held.overviews.queues()] == [(HOLD, 1)]


@pytest.mark.parametrize("text", [b"{}", b"no json", b'{"id": 1, "since": "x"}'])
def test_a_hold_that_cannot_be_read_is_skipped(redis_url: str, text: bytes) -> None:
    """It is from a later version; the others hold."""
    parts = Store(redis_url, timeout_seconds=2.0)
    parts.client.hset(parts.keys.instructions(), "hold:hold-x", text)
    parts.instructions.replace(None, a_hold())
    assert parts.instructions.of(Hold) == [a_hold()]
    parts.close()


def test_keys_of_a_later_version_survive_a_look(redis_url: str) -> None:
    """And who changes the hold does so although they are there."""
    parts = Store(redis_url, timeout_seconds=2.0)
    parts.instructions.replace(None, a_hold())
    text = parts.client.hget(parts.keys.instructions(), f"hold:{HOLD}")
    parts.client.hset(parts.keys.instructions(), f"hold:{HOLD}", text[:-1] + b',"new":1}')
    assert parts.instructions.of(Hold) == [a_hold()]
    assert parts.instructions.replace(a_hold(), a_hold(until=NOW))
    parts.close()
