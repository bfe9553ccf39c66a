"""Threads of ours: no error ends one, and another takes the place of one that stands still."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import poll

from celery_dlq.store import endless
from celery_dlq.store.endless import repeat_until
from celery_dlq.store.metrics import Counts
from celery_dlq.transport import held
from celery_dlq.transport.held import LeaseThread, WatchedFetch

Act = Callable[[], object]


class Beating(LeaseThread):
    """A keeper that does what the test says."""

    what = "Nothing is kept"

    def __init__(self, act: Act, made: list[Beating]) -> None:
        super().__init__()
        self.act = act
        self.rounds = 0
        self._made = made
        made.append(self)

    def successor(self) -> Beating:
        return Beating(self.act, self._made)

    def patience(self) -> float:
        return 0.05

    def _pause_seconds(self) -> float:
        return 0.001

    def _give_sign_of_life(self) -> None:
        self.rounds += 1
        self.act()

    def disconnect(self) -> None:
        """There is no connection."""


@pytest.fixture
def made() -> Iterator[list[Beating]]:
    """The keepers of a test; their threads are ended."""
    made: list[Beating] = []
    yield made
    for one in made:
        one.act = bool
        one.stopped = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on at once after an error."""
    monkeypatch.setattr(endless, "PAUSE_SECONDS", 0.001)


def raising(exc: BaseException) -> Act:
    """Raise an error each time."""

    def act() -> None:
        raise exc

    return act


@pytest.mark.parametrize("exc", [ValueError("x"), MemoryError(), SystemExit(1)])
def test_no_error_ends_the_thread_that_renews_leases(
    made: list[Beating], exc: BaseException
) -> None:
    """A library's ``sys.exit`` included."""
    keeper = Beating(raising(exc), made)
    keeper.start()
    poll(lambda: keeper.rounds > 3)
    assert keeper.errors > 2
    assert not keeper.ended


def test_an_error_while_an_error_is_handled_does_not_end_it_either(
    made: list[Beating], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log once, and the thread goes on."""
    keeper = Beating(raising(ValueError("x")), made)
    monkeypatch.setattr(keeper, "disconnect", raising(MemoryError()))
    keeper.start()
    poll(lambda: keeper.rounds > 3)
    assert caplog.text.count("Nothing is kept; it goes on") == 1


def test_another_thread_takes_the_place_of_one_that_stands_still(
    made: list[Beating], caplog: pytest.LogCaptureFixture
) -> None:
    """It is found at the second look; the old one ends when it can."""
    stands = threading.Event()
    counts = Counts()
    first = Beating(stands.wait, made)
    fetch = WatchedFetch(first)
    fetch.look_after(counts)  # it was not started
    first.start()
    poll(lambda: first.rounds)
    poll(lambda: fetch.look_after(counts) or len(made) == 2)
    made[1].act = bool
    assert "Nothing is kept: their thread stands still for " in caplog.text
    stands.set()
    poll(lambda: first.ended)
    poll(lambda: made[1].rounds > 3)
    for _ in range(3):
        poll(lambda before=made[1].rounds: made[1].rounds > before)
        fetch.look_after(counts)
    assert len(made) == 2


def test_another_thread_takes_the_place_of_one_that_is_gone(
    made: list[Beating], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows how; it is found at the next look."""
    first = Beating(bool, made)
    with monkeypatch.context() as patch:
        patch.setattr(held, "repeat_until", lambda *_: None)
        first.start()
        poll(lambda: first.ended)
    WatchedFetch(first).look_after(Counts())
    assert "their thread is gone" in caplog.text
    poll(lambda: made[1].rounds > 3)


def test_threads_that_stand_still_are_few(
    made: list[Beating], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would stand still for the same cause."""
    monkeypatch.setattr(held, "MOST_STANDING", 2)
    stands = threading.Event()
    fetch = WatchedFetch(Beating(stands.wait, made))
    made[0].start()
    poll(lambda: fetch.look_after(Counts()) or len(made) == 3)
    poll(lambda: made[2].silent_seconds() > 0.2)
    for _ in range(5):
        fetch.look_after(Counts())
    assert len(made) == 3
    stands.set()


def test_a_loop_ends_when_it_is_told_to() -> None:
    """And not by an error."""
    calls: list[Any] = []

    def act() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    repeat_until(act, lambda: len(calls) == 3, "it")
    assert len(calls) == 3
