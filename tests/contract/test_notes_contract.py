"""The contract of every `GroupNotes`, and the operation on it."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action, Event, Events, whoami
from celery_dlq.features.groups.operations import Notes
from celery_dlq.operations.reading import Reading
from celery_dlq.store.notes import GroupNotes, Note
from celery_dlq.store.store import Store

GROUP = "0123456789abcdef"


@pytest.fixture
def notes(parts: Store) -> GroupNotes:
    """Give each store of notes in turn, empty."""
    return parts.notes


def assembled(parts: Store, events: Events) -> Any:
    """What the operation is made of."""
    reading = Reading(parts.letters)
    return SimpleNamespace(backend=parts, reading=lambda: reading, events=events)


def a_note(**changes: Any) -> Note:
    """A note as an operator writes one."""
    values: dict[str, Any] = {"at": NOW, "actor": "ann@desk", "text": "see SHOP-17"}
    return Note(**{**values, **changes})


def test_notes_come_back_newest_first(notes: GroupNotes) -> None:
    """Whole, whatever their text; each group has its own."""
    texts = ["first", "süß \x00 \ud83d\n[second]\r\n| \u2028", "third"]
    written = [
        a_note(text=text, at=NOW + timedelta(seconds=second)) for second, text in enumerate(texts)
    ]
    for note in written:
        notes.add_note(DLQ, GROUP, note)
    notes.add_note(DLQ, "other", a_note())
    assert notes.notes(DLQ, GROUP) == written[::-1]
    assert notes.notes(DLQ, "other") == [a_note()]
    assert notes.notes("mail-DLQ", GROUP) == []


def test_a_note_sent_twice_is_one(notes: GroupNotes) -> None:
    """A client repeats a command whose reply was lost."""
    notes.add_note(DLQ, GROUP, a_note())
    notes.add_note(DLQ, GROUP, a_note())
    assert notes.notes(DLQ, GROUP) == [a_note()]


def test_a_group_keeps_its_newest_notes(notes: GroupNotes) -> None:
    """Fifty of them."""
    for number in range(53):
        notes.add_note(DLQ, GROUP, a_note(text=str(number)))
    assert [note.text for note in notes.notes(DLQ, GROUP)] == [str(n) for n in range(52, 2, -1)]


def test_notes_go_long_after_their_letters(redis_url: str) -> None:
    """When the next note is written; a group that has letters keeps its own."""
    backend = Store(redis_url, timeout_seconds=2.0)
    letter = a_letter(fingerprint="alive")
    backend.letters.dead_letter(letter, key_of(letter))
    for group in ("alive", "gone"):
        backend.notes.add_note(DLQ, group, a_note())
    backend.client.zadd(backend.keys.noted(DLQ), {"alive": 0, "gone": 0})  # long ago
    backend.notes.add_note(DLQ, "new", a_note())
    found = {group: len(backend.notes.notes(DLQ, group)) for group in ("alive", "gone", "new")}
    assert found == {"alive": 1, "gone": 0, "new": 1}
    assert isinstance(backend.notes, GroupNotes)
    backend.close()


def test_a_note_of_a_later_version_is_skipped(redis_url: str) -> None:
    """The others can still be read."""
    backend = Store(redis_url, timeout_seconds=2.0)
    backend.notes.add_note(DLQ, GROUP, a_note())
    key = backend.keys.notes(DLQ)
    backend.client.hset(key, GROUP, b'{"odd": 1}\n' + backend.client.hget(key, GROUP))
    assert backend.notes.notes(DLQ, GROUP) == [a_note()]
    backend.close()


def test_a_note_has_its_author_and_is_in_the_audit(parts: Store) -> None:
    """Also a note on letters that are gone since can be read and answered."""
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append)
    operation = Notes(assembled(parts, events))
    letter = a_letter(fingerprint=GROUP)
    parts.letters.dead_letter(letter, key_of(letter))
    assert operation.notes(DLQ, GROUP) == []
    note = operation.note(DLQ, GROUP, f"  {'x' * 300}\n")
    assert (note.actor, note.text, type(note.at)) == (whoami(), "x" * 300, datetime)
    (change,) = parts.workers.changes(limit=5)
    assert (change.action, change.actor, change.target) == (Action.NOTED, whoami(), DLQ)
    assert (change.detail["fingerprint"], len(change.detail["text"])) == (GROUP, 200)
    assert seen == [change]
    parts.letters.remove(DLQ, [letter.id])
    later = operation.note(DLQ, GROUP, "fixed")
    assert operation.notes(DLQ, GROUP) == [later, note]


def test_what_cannot_be_noted_is_refused(parts: Store) -> None:
    """Nothing of it is in the audit."""
    operation = Notes(assembled(parts, Events()))
    letter = a_letter(fingerprint=GROUP)
    parts.letters.dead_letter(letter, key_of(letter))
    for text in (" \n", "x" * 2001):
        with pytest.raises(DLQError, match="expected a note of 1 to 2,000 characters, got"):
            operation.note(DLQ, GROUP, text)
    with pytest.raises(NotFound, match="expected the name of a dead-letter queue, got 'x-DLQ'"):
        operation.note("x-DLQ", GROUP, "text")
    with pytest.raises(NotFound, match="expected the fingerprint of letters in 'orders-DLQ'"):
        operation.note(DLQ, "no" + GROUP, "text")
    with pytest.raises(NotFound):
        operation.notes(DLQ, "no" + GROUP)
    assert parts.workers.changes(limit=5) == []
