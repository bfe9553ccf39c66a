"""Starts while the store is away: healthy work goes on, and no message starts without end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from builders import NOW, a_delivery, a_letter, key_of
from fresh import fresh_store, strict_counter

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.exceptions.policy import ExceptionAction, ExceptionPolicy, ExceptionRule
from celery_dlq.letters.record import Delivery, Outcome, Reason
from celery_dlq.policies.decisions import Die, LateCopy, PutOff, Run
from celery_dlq.policies.policy import CrashLimit, Policy
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.metrics import Counts
from celery_dlq.store.worker_records import Count, CountStatus
from celery_dlq.worker import starts as module
from celery_dlq.worker.starts import REPEATS, Starts, crashes_of
from celery_dlq.writing.lifecycle import DeliveryState, InFlight

ROOT = Path(__file__).parents[2]
POLICY = Policy(max_deliveries=2)
C = TypeVar("C", bound=DeliveryCounter)


class AwayCounter(DeliveryCounter):
    """Does not answer while it is away."""

    away = True

    def count_delivery(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return super().count_delivery(*args, **kwargs)

    def count_first(self, *args: Any) -> bool:
        return not self.away and super().count_first(*args)


def a_counter(kind: type[C] = DeliveryCounter) -> C:  # type: ignore[assignment]
    """A counter for which a delivery that nobody ended is over."""
    store = fresh_store()
    return strict_counter(store.connection, store.keys, kind)


def a_redelivered_message() -> Any:
    """A request whose message was delivered before."""
    resolved = ResolvedPolicy("orders", "orders-DLQ", POLICY, None)
    delivery = Delivery(number=1, started_at=NOW, worker_hostname="w")
    in_flight = InFlight(resolved, key_of(a_letter()), delivery, first=False)
    return SimpleNamespace(
        task=SimpleNamespace(name="shop.charge"),
        dlq_in_flight=in_flight,
        dlq_state=DeliveryState.NEW,
        acknowledged=False,
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, which a test sets."""
    seconds = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_a_message_starts_so_often_here_while_the_store_is_away(now: list[float]) -> None:
    """As often as its limit says; a start that never happened is taken back."""
    counter = a_counter(AwayCounter)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    request = a_redelivered_message()

    def decide() -> object:
        return starts.decide(POLICY, request.dlq_in_flight, request)

    assert isinstance(decide(), PutOff)
    for _ in range(6):
        now[0] += 2
        last = decide()
    assert isinstance(last, Run)
    starts.take_back(request)
    assert [isinstance(decide(), Run) for _ in range(3)] == [True, True, False]
    assert isinstance(decide(), Die)
    counter.away = False
    assert isinstance(decide(), Die)  # the two starts count now


def test_each_outage_is_waited_for_anew(now: list[float]) -> None:
    """A count that was not answered is asked for again before anything runs without it."""
    counter = a_counter(AwayCounter)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    for later in (0.0, 5.0, 5.0):
        now[0] += later
        request = a_redelivered_message()
        counter.away = True
        assert isinstance(starts.decide(POLICY, request.dlq_in_flight, request), PutOff)
        counter.away = False
        assert isinstance(starts.decide(POLICY, request.dlq_in_flight, request), Run)
        starts.take_back(request)


def test_what_a_worker_started_counts_for_it_in_an_outage(now: list[float]) -> None:
    """A delivery that ended here is known here, whether the store has its end or not."""
    counter = a_counter(AwayCounter)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    first = a_redelivered_message()
    first.dlq_in_flight.first = True
    assert isinstance(starts.decide(Policy(max_deliveries=1), first.dlq_in_flight, first), Run)
    starts.record_end(first.dlq_in_flight)
    again = a_redelivered_message()
    again.dlq_in_flight.key = first.dlq_in_flight.key
    for _ in range(7):
        verdict = starts.decide(Policy(max_deliveries=1), again.dlq_in_flight, again)
        now[0] += 2
    assert isinstance(verdict, Die)


class RunningCounter(DeliveryCounter):
    """The message runs elsewhere."""

    def count_delivery(self, *_: Any, **__: Any) -> Any:
        return Count(CountStatus.RUNNING, 1)


@pytest.mark.parametrize("driver", REPEATS)
def test_a_second_delivery_of_a_running_message_names_a_page_of_its_broker(
    driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis and SQS speak of visibility, RabbitMQ of connections; the page has the heading."""
    counter = a_counter(RunningCounter)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True, driver_type=driver)
    request = a_redelivered_message()
    starts.decide(POLICY, request.dlq_in_flight, request)
    (text,) = caplog.messages
    assert ("visibility" in text) == (driver != "amqp")
    page, _, heading = text.rpartition("see ")[2].partition("#")
    text = (ROOT / page).read_text("utf-8")
    slugs = [line.strip("# ").lower().replace(" ", "-") for line in text.splitlines()]
    assert not heading or heading in slugs


def a_message_that_crashed(policy: Policy, counter: DeliveryCounter, times: int) -> Any:
    """A request of a message whose worker was lost so often, a minute apart."""
    request = a_redelivered_message()
    key = request.dlq_in_flight.key
    for n in range(times):
        at = NOW - timedelta(minutes=times - n)
        start = Delivery(number=n + 1, started_at=at, worker_hostname="w")
        counter.count_delivery(key, start, None)
        counter.record_end(key, replace(start, ended_at=at, outcome=Outcome.WORKER_LOST))
    return request


@pytest.mark.parametrize(
    ("policy", "times", "reason"),
    [
        (Policy(max_deliveries=9, max_crashes=3), 2, None),
        (Policy(max_deliveries=9, max_crashes=3), 3, Reason.WORKER_LOST),
        (Policy(max_crashes=3), 3, Reason.WORKER_LOST),
        (Policy(max_deliveries=3, max_crashes=3), 3, Reason.MAX_DELIVERIES_EXCEEDED),
        (Policy(max_crashes=CrashLimit(3, 150.0)), 3, None),
        (Policy(max_crashes=CrashLimit(2, 150.0)), 3, Reason.WORKER_LOST),
    ],
)
def test_a_message_that_crashed_too_often_does_not_start(
    policy: Policy, times: int, reason: Reason | None
) -> None:
    """Whatever ``max_deliveries`` allows; what dies was not counted once more."""
    counter = a_counter()
    request = a_message_that_crashed(policy, counter, times)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)

    verdict = starts.decide(policy, request.dlq_in_flight, request)

    assert (verdict.reason if isinstance(verdict, Die) else None) is reason
    assert len(counter.history(request.dlq_in_flight.key)) == times + (reason is None)


def test_a_message_whose_letter_is_elsewhere_does_not_start_again() -> None:
    """Its worker died after storing the letter, before it could say so beside the counts."""
    rule = ExceptionRule(action=ExceptionAction.DEAD_LETTER, dead_letter_queue="fatal-DLQ")
    policy = Policy(
        max_deliveries=9, features=(("exceptions", ExceptionPolicy((("shop.Fatal", rule),))),)
    )
    counter = a_counter()
    request = a_redelivered_message()
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    assert isinstance(starts.decide(policy, request.dlq_in_flight, request), Run)
    counter.record_death(replace(request.dlq_in_flight.key, dead_letter_queue="fatal-DLQ"))
    assert isinstance(starts.decide(policy, request.dlq_in_flight, request), LateCopy)


def seconds(number: float) -> timedelta:
    """Seconds before now."""
    return timedelta(seconds=number)


def test_crashes_are_lost_processes_lost_workers_and_time_limits() -> None:
    """Of this message, not of its retries; a delivery that was given back is none."""
    history = [
        a_delivery(number=1, outcome=Outcome.WORKER_LOST, retries=1),
        a_delivery(number=1, outcome=Outcome.WORKER_LOST, ended_at=NOW),
        a_delivery(number=2, outcome=Outcome.REQUEUED, ended_at=NOW),
        a_delivery(number=3, outcome=Outcome.TIME_LIMIT, ended_at=NOW),
        a_delivery(number=4, outcome=Outcome.SHUTDOWN, ended_at=NOW),
        a_delivery(number=4),
    ]
    lost = (Outcome.WORKER_LOST, Outcome.TIME_LIMIT, Outcome.VANISHED)
    assert crashes_of(Policy(max_crashes=3), 0, history, NOW) == (lost, 4)


def test_only_crashes_within_the_window_count() -> None:
    """When a worker vanished is not known: at the latest when the message started again."""
    history = [
        a_delivery(number=1, started_at=NOW - seconds(900)),
        a_delivery(
            number=2,
            started_at=NOW - seconds(61),
            ended_at=NOW - seconds(61),
            outcome=Outcome.WORKER_LOST,
        ),
        a_delivery(number=3, started_at=NOW - seconds(59)),
        a_delivery(number=4, started_at=NOW - seconds(50)),
    ]
    policy = Policy(max_deliveries=9, max_crashes=CrashLimit(2, 60.0))
    vanished = Outcome.VANISHED
    assert crashes_of(policy, 0, history[:3], NOW) == ((vanished,), 9)
    assert crashes_of(policy, 0, history, NOW) == ((vanished, vanished), 4)
    longer = replace(policy, max_crashes=CrashLimit(2, 61.0))
    assert len(crashes_of(longer, 0, history, NOW)[0]) == 4


def test_a_message_that_crashed_waits_and_is_not_charged(now: list[float]) -> None:
    """Until its time, however often it is asked for; then it starts, as one delivery more."""
    policy, clock = Policy(max_deliveries=9, crash_delay=90), [NOW]
    counter = a_counter()
    request = a_message_that_crashed(policy, counter, 1)  # a minute ago
    starts = Starts(counter, lambda: clock[0], Counts(), flags_redelivery=True)

    def decide() -> Any:
        return starts.decide(policy, request.dlq_in_flight, request)

    assert decide() == PutOff(30.0)
    now[0] += 20
    clock[0] -= seconds(999)  # of a machine whose clock was set: it waits once
    assert decide() == PutOff(10.0)
    assert len(counter.history(request.dlq_in_flight.key)) == 1
    now[0] += 10
    assert decide() == Run()
    assert request.dlq_in_flight.delivery.number == 2


def test_a_message_that_vanished_waits_from_the_last_sign_of_its_worker() -> None:
    """Whoever asks, and however often its worker is replaced while it waits."""
    policy, request = Policy(crash_delay=60), a_redelivered_message()
    key = request.dlq_in_flight.key
    store = fresh_store()
    dead = strict_counter(store.connection, store.keys)
    started_at = store.workers.now()
    dead.count_delivery(
        key, Delivery(number=1, started_at=started_at, worker_hostname="dead"), None
    )
    for _ in range(2):
        again = a_redelivered_message()
        again.dlq_in_flight.key = key
        counter = strict_counter(store.connection, store.keys)
        later = started_at + seconds(20)
        starts = Starts(counter, lambda at=later: at, Counts(), flags_redelivery=True)  # type: ignore[misc]
        verdict = starts.decide(policy, again.dlq_in_flight, again)
        assert isinstance(verdict, PutOff)
        assert verdict.seconds == pytest.approx(40, abs=2)
    assert len(counter.history(key)) == 1


def test_without_a_delay_nobody_asks_for_the_history() -> None:
    """Of a queue without `crash_delay` and `max_crashes`; nor of a first delivery on SQS."""
    counter = a_counter()
    counter.history = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    request = a_redelivered_message()
    request.delivery_info = {}
    for policy, flags in ((POLICY, True), (Policy(crash_delay=9), False)):
        starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=flags)
        assert isinstance(starts.decide(policy, request.dlq_in_flight, request), Run)
