"""The contract of every `Outbox`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import DLQ
from waiting import poll

from celery_dlq.features.exchange.publisher import Outbox, OutboxEntry
from celery_dlq.store.store import Store


@pytest.fixture
def outbox(parts: Store) -> Outbox:
    """Give each outbox in turn, empty."""
    return parts.part(Outbox)


def an_entry(number: int = 1) -> OutboxEntry:
    return OutboxEntry(letter_id=f"letter-{number}", exchange="deaths", routing_key="süß")


def due(outbox: Outbox, most: int = 10, lease_seconds: float = 60.0) -> list[OutboxEntry]:
    return outbox.due_entries(DLQ, most=most, lease_seconds=lease_seconds)


def test_an_entry_is_due_once_it_is_added(outbox: Outbox) -> None:
    """It comes back whole, and the same one twice is one."""
    outbox.add_entry(DLQ, an_entry())
    outbox.add_entry(DLQ, an_entry())
    assert outbox.waiting(DLQ) == 1
    assert due(outbox) == [an_entry()]


def test_an_entry_that_is_tried_is_leased(outbox: Outbox) -> None:
    """And is due again when its lease is over, because who tried it may have died."""
    outbox.add_entry(DLQ, an_entry())
    assert due(outbox, lease_seconds=0) == [an_entry()]
    assert due(outbox) == [an_entry()]
    assert due(outbox) == []
    assert outbox.waiting(DLQ) == 1


def test_an_entry_that_is_put_back_is_due_at_once(outbox: Outbox) -> None:
    """The broker refused it; nobody is working on it."""
    outbox.add_entry(DLQ, an_entry())
    due(outbox)
    outbox.add_entry(DLQ, an_entry())
    assert due(outbox) == [an_entry()]


def test_an_entry_that_is_added_for_later_waits(outbox: Outbox) -> None:
    """It knows how often it was tried, and is another one than before."""
    tried = replace(an_entry(), tries=2)
    outbox.add_entry(DLQ, tried, after_seconds=60.0)
    outbox.add_entry(DLQ, an_entry(2), after_seconds=0.001)
    assert poll(lambda: due(outbox)) == [an_entry(2)]
    assert outbox.waiting(DLQ) == 2
    outbox.add_entry(DLQ, tried)
    assert due(outbox) == [tried]
    outbox.remove_entries(DLQ, [an_entry()])
    assert outbox.waiting(DLQ) == 2


def test_rounds_are_bounded_and_reach_all(outbox: Outbox) -> None:
    """A batch has no more than the limit, and each entry once."""
    entries = [an_entry(number) for number in range(7)]
    for entry in entries:
        outbox.add_entry(DLQ, entry)
    rounds = [due(outbox, most=3) for _ in range(4)]
    assert [len(found) for found in rounds] == [3, 3, 1, 0]
    assert {n.letter_id for found in rounds for n in found} == {n.letter_id for n in entries}


def test_what_is_done_is_forgotten(outbox: Outbox) -> None:
    """Only that, and only in its queue."""
    for number in (1, 2):
        outbox.add_entry(DLQ, an_entry(number))
    outbox.add_entry("other-DLQ", an_entry(1))
    outbox.remove_entries(DLQ, [an_entry(1)])
    outbox.remove_entries(DLQ, [])
    assert (outbox.waiting(DLQ), outbox.waiting("other-DLQ")) == (1, 1)
    assert due(outbox) == [an_entry(2)]


def test_an_unknown_queue_has_nothing(outbox: Outbox) -> None:
    """Asking makes nothing."""
    assert outbox.due_entries("nowhere", most=5, lease_seconds=1) == []
    assert outbox.waiting("nowhere") == 0


def test_queues_with_entries_are_known(outbox: Outbox) -> None:
    """The others need not be read one by one."""
    outbox.add_entry(DLQ, an_entry())
    assert outbox.holding(["a-DLQ", DLQ, "b-DLQ"]) == [DLQ]
    outbox.remove_entries(DLQ, [an_entry()])
    assert outbox.holding([DLQ]) == []
