"""What is periodic in a worker: one part that fails or takes long starves no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from waiting import poll

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.timing import Backoff
from celery_dlq.worker.housekeeping import Housekeeping, LongTask, Task


class Part:
    """Counts its ticks; away while told so."""

    def __init__(self, *, away: bool = False) -> None:
        self.ticks, self.away = 0, away

    def work(self) -> None:
        self.ticks += 1
        if self.away:
            raise StoreUnavailable("away")


@pytest.fixture
def tasks() -> Iterator[Housekeeping]:
    """The housekeeping of a worker."""
    made = Housekeeping()
    yield made
    made.close()


def ticks(parts: list[Part], number: int) -> list[int]:
    """How often each ticked."""
    tasks = Housekeeping()
    tasks.add(*(Task(name="part", work=part.work) for part in parts))
    for _ in range(number):
        tasks.tick()
    return [part.ticks for part in parts]


def test_a_part_whose_own_place_is_away_does_not_starve_those_before_it() -> None:
    """One master of a cluster is down, say: the heartbeat goes to another and must go on."""
    heartbeat, retention, metrics = Part(), Part(away=True), Part()
    assert ticks([heartbeat, retention, metrics], 100) == [100, 8, 0]


def test_while_the_store_is_away_all_rest_longer_and_longer() -> None:
    """Each attempt may cost a timeout, for which the user's tasks wait."""
    assert ticks([Part(), Part(away=True), Part()], 100)[1:] == [8, 0]
    assert ticks([Part(away=True), Part(), Part()], 100) == [8, 0, 0]


def test_what_answers_again_is_asked_each_second_again(tasks: Housekeeping) -> None:
    """The rests begin with the shortest one once all parts have worked."""
    heartbeat, away, last = Part(), Part(away=True), Part()
    tasks.add(*(Task(name="part", work=part.work) for part in (heartbeat, away, last)))
    for _ in range(8):
        tasks.tick()
    away.away = False
    for _ in range(16):
        tasks.tick()
    seen = away.ticks, last.ticks
    tasks.tick()
    assert (away.ticks, last.ticks) == (seen[0] + 1, seen[1] + 1)
    away.away = True
    tasks.tick()
    tried = away.ticks
    tasks.tick()
    tasks.tick()
    assert away.ticks == tried + 1


def test_long_work_delays_no_heartbeat(tasks: Housekeeping) -> None:
    """A job may take hours; its thread ends when the worker does, and never runs twice at once."""
    heartbeat, begun, ended = Part(), list[str](), threading.Event()

    def work(stopping: object) -> None:
        assert callable(stopping)
        begun.append(threading.current_thread().name)
        poll(stopping)
        ended.set()

    tasks.add(Task(name="heartbeat", work=heartbeat.work), LongTask(name="jobs", work=work))
    for _ in range(50):
        tasks.tick()
    assert heartbeat.ticks == 50
    poll(lambda: bool(begun))
    assert begun == ["dlq-jobs"]
    assert not ended.is_set()
    tasks.close()
    assert ended.is_set()


def test_long_work_that_is_not_due_has_no_thread(tasks: Housekeeping) -> None:
    """What is due is asked in the tick, which must not cost anything."""
    due, done = list[bool](), threading.Event()
    tasks.add(LongTask(name="jobs", is_due=lambda: due, work=lambda _: done.set()))
    tasks.tick()
    assert not done.wait(0.05)
    due.append(True)
    tasks.tick()
    assert done.wait(5)


def test_long_work_that_fails_rests_alone(
    tasks: Housekeeping, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer each time; the others go on."""
    runs, heartbeat = list[int](), Part()

    def work(_: object) -> None:
        runs.append(1)
        raise DLQError("away")

    tasks.add(Task(name="heartbeat", work=heartbeat.work), LongTask(name="copies", work=work))
    (thread,) = tasks.long
    for _ in range(20):
        tasks.tick()
        thread.join(5)
    assert heartbeat.ticks == 20
    assert len(runs) == 5  # and 1, 2, 4 and 8 ticks of rest
    assert "copies is put off: away" in caplog.text


def test_a_pause_is_twice_as_long_as_the_one_before() -> None:
    """Up to a bound, and from the beginning again once it worked."""
    backoff = Backoff(2.0, 7.0)
    assert [backoff.failed() for _ in range(4)] == [2.0, 4.0, 7.0, 7.0]
    assert backoff.failures == 4
    backoff.worked()
    assert (backoff.failures, backoff.failed()) == (0, 2.0)
    assert Backoff(20.0, 7.0).failed() == 7.0
