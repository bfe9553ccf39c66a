"""The way of a letter: its outbox entry first, then the letter, then the news of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_letter, key_of

from celery_dlq.backends.memory import MemoryStore
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Events
from celery_dlq.record import DeadLetter
from celery_dlq.worker.letter_writer import LetterWriter, PendingLetter
from celery_dlq.worker.lifecycle import DeliveryState
from celery_dlq.worker.spool import Spool


class Said:
    """Writes down what a letter passes, in order; also whose message it is."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.down: set[str] = set()
        self._store = MemoryStore()

    def note(self, what: str) -> None:
        """One more station."""
        if what in self.down:
            raise StoreUnavailable("away")
        self.said.append(what)

    def add(self, _letter: DeadLetter) -> None:
        self.note("entry")

    def mark(self, letter: DeadLetter) -> DeadLetter:
        self.note("mark")
        return replace(letter, sentry_event_id="1")

    def dead_letter(self, letter: DeadLetter, key: Any) -> Any:
        self.note("letter")
        return self._store.dead_letter(letter, key)

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        self.note(f"settle {state.value}")


def a_writer(said: Said, tmp_path: Path) -> LetterWriter:
    """The letter writer of a worker."""
    events = Events()
    events.subscribe(lambda _event: said.note("event"))
    return LetterWriter(said, Spool(str(tmp_path), "x"), outbox=said, events=events, mark=said.mark)


def written(writer: LetterWriter, said: Said, *, acknowledged: bool = False) -> DeliveryState:
    """Write a letter; return the state of its message."""
    letter = a_letter()
    return writer.write(PendingLetter(letter, key_of(letter), acknowledged, said))


def test_the_outbox_has_an_entry_before_the_letter_is_stored(tmp_path: Path) -> None:
    """Killed between the two, an entry without a letter is dropped in the end."""
    said = Said()
    assert written(a_writer(said, tmp_path), said) is DeliveryState.STORED
    assert said.said == ["mark", "entry", "letter", "event"]


@pytest.mark.parametrize("away", ["entry", "letter"])
def test_a_letter_waits_while_outbox_or_store_do_not_answer(tmp_path: Path, away: str) -> None:
    """Its message is acknowledged once, when the letter is stored."""
    said = Said()
    said.down = {away}
    writer = a_writer(said, tmp_path)
    assert written(writer, said) is DeliveryState.WAITING_FOR_STORE
    writer.tick()
    assert "letter" not in said.said
    said.down.clear()
    said.said.clear()
    writer.tick()
    writer.tick()
    assert said.said == ["mark", "entry", "letter", "event", "settle stored"]


def test_a_letter_of_an_acknowledged_message_goes_through_the_spool(tmp_path: Path) -> None:
    """It is on disk: nothing has to wait for it."""
    said = Said()
    said.down = {"letter"}
    writer = a_writer(said, tmp_path)
    assert written(writer, said, acknowledged=True) is DeliveryState.STORED
    assert writer.spooled == 1
    said.down.clear()
    writer.tick()
    assert (writer.spooled, said.said[-3:]) == (0, ["entry", "letter", "event"])
