"""The check at a worker's start: what it waits for, what it goes on without, what it says."""

from __future__ import annotations

import logging

import intervals
import pytest

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.store.metrics import STORE_ERRORS, Counts, Series, WorkerGauges
from celery_dlq.worker.heartbeat import StartCheck

AWAY = StoreUnavailable("the store is away")
WRONG = SettingsError("expected another password")


class Store:
    """A store whose checks end as it is told; the last end is for all later ones."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)
        self.checks = 0

    def check(self) -> None:
        """End as told."""
        self.checks += 1
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        if end is not None:
            raise end


def counted(counts: Counts) -> dict[Series, int]:
    """What was counted."""
    found: dict[Series, int] = {}

    class Metrics:
        def add(self, more: object, gauges: WorkerGauges | None = None) -> bool:
            found.update(more)  # type: ignore[call-overload]
            return True

    counts.flush(Metrics().add)
    return found


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals.change(monkeypatch, start_look=0.0)


@pytest.mark.parametrize("wait", [None, 0.0, 10.0])
def test_what_is_wrong_is_not_waited_for(wait: float | None) -> None:
    """A wrong password does not become right while a deploy waits."""
    store = Store(WRONG)
    with pytest.raises(SettingsError):
        StartCheck(store.check, wait, Counts()).run()
    assert store.checks == 1


def test_a_store_that_is_away_is_tried_once_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker starts; an alert and the log say that it counts nothing."""
    store, counts = Store(AWAY), Counts()
    StartCheck(store.check, None, counts).run()
    assert store.checks == 1
    assert counted(counts) == {(STORE_ERRORS.name, "start"): 1}
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert "starts without it" in line.getMessage()
    assert "the store is away" in line.getMessage()


def test_a_worker_that_refuses_waits_first(caplog: pytest.LogCaptureFixture) -> None:
    """Within its time the store may come; after it, the error ends the worker."""
    store = Store(AWAY, AWAY, None)
    StartCheck(store.check, 60.0, Counts()).run()
    assert store.checks == 3
    assert caplog.text.count("Waiting for the dead-letter store") == 2
    with pytest.raises(StoreUnavailable):
        StartCheck(Store(AWAY).check, 0.0, Counts()).run()


def test_a_store_that_was_away_is_checked_again_until_it_passes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then never again: a healthy worker pays nothing."""
    store = Store(AWAY, AWAY, None)
    check = StartCheck(store.check, None, Counts())
    check.run()
    with pytest.raises(StoreUnavailable):
        check.tick()
    for _ in range(10):
        check.tick()
    assert store.checks == 3
    assert caplog.text.count("The dead-letter store is back") == 1


def test_a_store_that_comes_back_wrong_is_named_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker runs already; the line comes less and less often, without a traceback."""
    store = Store(AWAY, WRONG)
    check = StartCheck(store.check, None, Counts())
    check.run()
    said = []
    for _ in range(200):
        check.tick()
        said.append(caplog.text.count("cannot be used: expected another password"))
    first, second = said[99], said[199] - said[99]
    assert (first, second) == (6, 3)  # at most one in 32 ticks in the end
    assert store.checks == 1 + said[-1]
    assert "Traceback" not in caplog.text


def test_a_store_that_was_there_is_not_checked_again() -> None:
    """Later failures are outages."""
    store = Store(None)
    check = StartCheck(store.check, None, Counts())
    check.run()
    check.tick()
    assert store.checks == 1
