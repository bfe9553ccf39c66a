"""The way of a letter: its outbox entry first, then the letter, then the news of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
from builders import a_letter, key_of
from fresh import fresh_store

from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Events, GroupState
from celery_dlq.letters.record import ANY_NAME, REGISTERED, DeadLetter, Reason
from celery_dlq.store.metrics import OTHER, REGRESSED, Counts
from celery_dlq.store.records import GroupStatus
from celery_dlq.store.worker_records import MessageKey, ServerMemory
from celery_dlq.writing import spool
from celery_dlq.writing.lifecycle import DeliveryState
from celery_dlq.writing.memory_limit import MemoryLimit
from celery_dlq.writing.spool import Spool
from celery_dlq.writing.writer import LetterWriter, PendingLetter


class Said:
    """Writes down what a letter passes, in order; also whose message it is."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.down: set[str] = set()
        self.held = True
        self._backend = fresh_store()
        self._store = self._backend.letters

    def note(self, what: str) -> None:
        """One more station."""
        if what in self.down:
            raise StoreUnavailable("away")
        self.said.append(what)

    def change(self, letter: DeadLetter) -> DeadLetter:
        self.note("entry")
        return replace(letter, sentry_event_id="1")

    def dead_letter(self, letter: DeadLetter, key: Any) -> Any:
        self.note("letter")
        return self._store.dead_letter(letter, key)

    def resolve(self, letter: DeadLetter) -> None:
        """Resolve the group of a letter."""
        resolved = GroupStatus(state=GroupState.RESOLVED, at=letter.dead_lettered_at)
        self._backend.notes.set_status(letter.dead_letter_queue, letter.fingerprint, resolved)

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        self.note(f"settle {state.value}")

    @property
    def message(self) -> Any:
        """Its channel has no connection once it went back."""
        return SimpleNamespace(channel=SimpleNamespace(connection=self if self.held else None))


def a_writer(said: Said, tmp_path: Path, **more: Any) -> LetterWriter:
    """The letter writer of a worker."""
    events = Events()
    events.subscribe(lambda _event: said.note("event"))
    return LetterWriter(said, Spool(str(tmp_path), "x"), change=said.change, events=events, **more)


def written(writer: LetterWriter, said: Said, *, acknowledged: bool = False) -> DeliveryState:
    """Write a letter; return the state of its message."""
    letter = a_letter()
    return writer.store_or_wait(
        PendingLetter(letter, key_of(letter), said, acknowledged=acknowledged)
    )


def test_the_outbox_has_an_entry_before_the_letter_is_stored(tmp_path: Path) -> None:
    """Killed between the two, an entry without a letter is dropped in the end."""
    said = Said()
    assert written(a_writer(said, tmp_path), said) is DeliveryState.STORED
    assert said.said == ["entry", "letter", "event"]


def test_the_first_letter_of_a_resolved_group_is_told_apart(tmp_path: Path) -> None:
    """In its event, by a counter and in the log; also if it had to wait for the store."""
    said, counts = Said(), Counts()
    seen: list[Any] = []
    events = Events()
    events.subscribe(seen.append)
    writer = LetterWriter(said, Spool(str(tmp_path), "x"), events=events, counts=counts)
    letters = [a_letter(fingerprint="aa") for _ in range(3)]
    said.resolve(letters[0])
    said.down = {"letter"}
    for letter in letters:
        writer.store_or_wait(PendingLetter(letter, key_of(letter), said))
    said.down.clear()
    writer.tick()
    assert [(event.letter.id, event.regressed) for event in seen] == [
        (letters[0].id, True),
        (letters[1].id, False),
        (letters[2].id, False),
    ]
    store = fresh_store().metrics
    counts.flush(store.add_counts)
    found = {s[1:]: n for s, n in store.read_all().counts.items() if s[0] == REGRESSED.name}
    assert found == {("orders", "orders-DLQ", letters[0].task_name): 1}


def test_each_reason_says_whether_its_task_names_are_the_apps_own() -> None:
    """A worker knows the task, or it does not: one that looks up none has any name."""
    strange = {reason for reason in Reason if ANY_NAME in reason.about}
    assert all((ANY_NAME in reason.about) is not (REGISTERED in reason.about) for reason in Reason)
    known = {
        Reason.ADOPTED,
        Reason.UNKNOWN_TASK,
        Reason.INVALID_MESSAGE,
        Reason.UNDECODABLE_MESSAGE,
    }
    assert known <= strange


def test_a_name_that_anybody_can_publish_is_no_label(tmp_path: Path) -> None:
    """Or a flood of invented tasks would take the place of the app's own."""
    said, counts = Said(), Counts()
    writer = LetterWriter(said, Spool(str(tmp_path), "x"), counts=counts)
    for reason in Reason:
        letter = a_letter(reason=reason, task_id=reason.value)
        writer.store_or_wait(PendingLetter(letter, key_of(letter), said))
    store = fresh_store().metrics
    counts.flush(store.add_counts)
    assert {series[-2:] for series in store.read_all().counts} == {
        (reason.value, OTHER if ANY_NAME in reason.about else letter.task_name) for reason in Reason
    }


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
    assert said.said == ["entry", "letter", "event", "settle stored"]


def test_a_letter_that_waits_is_dropped_if_its_message_goes_back(tmp_path: Path) -> None:
    """It is delivered again: that delivery decides if it dies. Those behind it are stored."""
    said = Said()
    said.down = {"letter"}
    writer = a_writer(said, tmp_path)
    written(writer, said)
    said.down.clear()
    said.said.clear()
    said.held = False
    writer.tick()
    assert (len(writer), said.said) == (0, ["settle done"])


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


class Full:
    """A store's memory: full, or with room."""

    def __init__(self) -> None:
        self.used = 100

    def read(self) -> ServerMemory:
        return ServerMemory(used=self.used, maximum=100_000_000)

    def limit(self) -> MemoryLimit:
        return MemoryLimit(self.read, 0.8)


def a_limited_writer(
    said: Said, full: Full, tmp_path: Path, *, durable: bool
) -> tuple[LetterWriter, MemoryLimit, list[MessageKey]]:
    """A writer, its limit, and the messages whose counts it has deleted."""
    forgotten: list[MessageKey] = []
    limit = full.limit()
    writer = LetterWriter(
        said,
        Spool(str(tmp_path), "x"),
        limit=limit,
        durable_spool=durable,
        forget=forgotten.append,
    )
    full.used = 99_000_000
    limit.tick()
    return writer, limit, forgotten


@pytest.mark.parametrize("acknowledged", [True, False])
def test_without_room_in_the_store_a_letter_waits_in_the_spool(
    tmp_path: Path, *, acknowledged: bool
) -> None:
    """Its message may be acknowledged: the folder was chosen. It is stored when there is room."""
    said, full = Said(), Full()
    writer, limit, _ = a_limited_writer(said, full, tmp_path, durable=True)
    assert written(writer, said, acknowledged=acknowledged) is DeliveryState.STORED
    writer.tick()
    assert (writer.spooled, len(writer), said.said) == (1, 0, [])
    full.used = 85_000_000  # room for new letters, but not for the texts of old ones
    limit.tick()
    writer.tick()
    assert writer.spooled == 1
    full.used = 0
    limit.tick()
    writer.tick()
    assert (writer.spooled, said.said) == (0, ["letter"])


def test_a_message_is_not_acknowledged_for_a_letter_among_temporary_files(tmp_path: Path) -> None:
    """The host may lose these, and the message would be lost with them."""
    said, full = Said(), Full()
    writer, limit, _ = a_limited_writer(said, full, tmp_path, durable=False)
    assert written(writer, said) is DeliveryState.WAITING_FOR_STORE
    writer.tick()
    assert (writer.spooled, len(writer), said.said) == (0, 1, [])
    full.used = 0
    limit.tick()
    writer.tick()
    assert (len(writer), said.said) == (0, ["letter", "settle stored"])


def test_with_store_and_spool_full_a_message_stays_unacknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the spool takes its letter."""
    said, full = Said(), Full()
    writer, _limit, _ = a_limited_writer(said, full, tmp_path, durable=True)
    monkeypatch.setattr(spool, "MAX_FILES", 0)
    assert written(writer, said) is DeliveryState.WAITING_FOR_STORE
    writer.tick()
    assert said.said == []
    monkeypatch.undo()
    writer.tick()
    assert (writer.spooled, len(writer), said.said) == (1, 0, ["settle stored"])


def test_a_store_that_is_down_leaves_the_message_with_the_broker(tmp_path: Path) -> None:
    """An outage ends soon; the broker keeps messages better than a disk."""
    said, full = Said(), Full()
    writer, limit, _ = a_limited_writer(said, full, tmp_path, durable=True)
    full.used = 0
    limit.tick()
    said.down = {"letter"}
    assert written(writer, said) is DeliveryState.WAITING_FOR_STORE
    assert writer.spooled == 0


def test_counts_of_letters_in_the_spool_are_deleted_when_their_messages_are_gone(
    tmp_path: Path,
) -> None:
    """Not before: killed between spool and acknowledgement, the message must still be refused."""
    said, full = Said(), Full()
    writer, _limit, forgotten = a_limited_writer(said, full, tmp_path, durable=True)
    letter, redriven = a_letter(), a_letter(redrives=1)
    for one in (letter, redriven):
        writer.store_or_wait(PendingLetter(one, key_of(one), acknowledged=False, waits=said))
    writer.tick()
    assert forgotten == []
    writer.tick()
    writer.tick()
    assert forgotten == [key_of(letter)]  # a redrive watches the counts of the other


@pytest.mark.parametrize("away", ["entry", "letter"])
def test_a_letter_that_has_waited_for_a_minute_goes_to_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """An exchange that does not confirm its copy is waited for in the same way."""
    said = Said()
    said.down = {away}
    writer = a_writer(said, tmp_path, durable_spool=True)
    written(writer, said)
    writer.tick()
    assert (len(writer), writer.spooled) == (1, 0)
    intervals.change(monkeypatch, spool_after=0.0)
    writer.tick()
    assert (len(writer), writer.spooled, said.said.count("settle stored")) == (0, 1, 1)
    said.down.clear()
    writer.tick()
    assert (writer.spooled, said.said[-3:]) == (0, ["entry", "letter", "event"])


@pytest.mark.parametrize(("ran_seconds", "goes"), [(0.0, False), (1800.0, True), (9000.0, True)])
def test_a_message_goes_back_before_its_broker_closes_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran_seconds: float, goes: bool
) -> None:
    """A third of what is left: a task that ran for long has less."""
    said = Said()
    said.down = {"letter"}
    writer, letter = a_writer(said, tmp_path, gives_back=True), a_letter()
    assert writer.patience() == 600
    writer.store_or_wait(PendingLetter(letter, key_of(letter), said, ran_seconds=ran_seconds))
    writer.tick()
    assert (len(writer) == 0) is goes
    intervals.change(monkeypatch, consumer_timeout=0.0)
    writer.tick()
    assert (len(writer), said.said) == (0, ["entry"] * (2 - goes) + ["settle done"])


@pytest.mark.parametrize("full", [True, False])
def test_without_a_timeout_of_its_broker_a_message_waits_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A lease is renewed; and a full spool takes nothing."""
    intervals.change(monkeypatch, consumer_timeout=0.0, spool_after=0.0)
    monkeypatch.setattr(spool, "MAX_FILES", 0)
    said = Said()
    said.down = {"letter"}
    writer = a_writer(said, tmp_path, durable_spool=full)
    written(writer, said)
    writer.tick()
    assert (len(writer), writer.spooled) == (1, 0)


def test_a_message_that_went_back_is_not_put_into_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next delivery decides."""
    intervals.change(monkeypatch, spool_after=0.0)
    said = Said()
    said.down = {"letter"}
    writer = a_writer(said, tmp_path, durable_spool=True)
    written(writer, said)
    said.held = False
    writer.tick()
    assert (len(writer), writer.spooled, said.said[-1]) == (0, 0, "settle done")
