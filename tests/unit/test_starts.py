"""Starts while the store is away: healthy work goes on, and no message starts without end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from builders import NOW, a_letter, key_of

from celery_dlq.backends.memory import MemoryCounter
from celery_dlq.errors import StoreUnavailable
from celery_dlq.metrics import Counts
from celery_dlq.policies.decisions import Die, Leave, Run
from celery_dlq.policies.exceptions import Action, ExceptionRule
from celery_dlq.policies.policy import Policy
from celery_dlq.record import Delivery, Outcome, Reason
from celery_dlq.worker.lifecycle import DeliveryState, InFlight
from celery_dlq.worker.policy_cache import ResolvedPolicy
from celery_dlq.worker.starts import Starts, UncountedDeliveries

POLICY = Policy(max_deliveries=2)


class AwayCounter(MemoryCounter):
    """Does not answer while it is away."""

    away = True

    def count(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return super().count(*args, **kwargs)


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


def test_a_message_starts_so_often_here_while_the_store_is_away() -> None:
    """As often as its limit says; a start that never happened is taken back."""
    counter = AwayCounter()
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    request = a_redelivered_message()

    def decide() -> object:
        return starts.decide(POLICY, request.dlq_in_flight, request)

    assert isinstance(decide(), Run)
    starts.take_back(request)
    assert [isinstance(decide(), Run) for _ in range(3)] == [True, True, False]
    assert isinstance(decide(), Die)
    counter.away = False
    assert isinstance(decide(), Die)  # the two starts are counted now
    assert starts.uncounted.of(request.dlq_in_flight.key) == 0


def test_uncounted_deliveries_are_bounded() -> None:
    """The oldest are forgotten."""
    uncounted = UncountedDeliveries()
    keys = [key_of(a_letter(task_id=f"id-{n}")) for n in range(3)]
    uncounted._MAX_MESSAGES = 2  # type: ignore[misc]
    for key in keys:
        uncounted.add(key)
        uncounted.add(key)
    uncounted.take_back(keys[2])
    assert [uncounted.of(key) for key in keys] == [0, 2, 1]


def a_message_that_crashed(policy: Policy, counter: MemoryCounter, times: int) -> Any:
    """A request of a message whose worker was lost so often, a minute apart."""
    request = a_redelivered_message()
    key = request.dlq_in_flight.key
    for n in range(times):
        at = NOW - timedelta(minutes=times - n)
        start = Delivery(number=n + 1, started_at=at, worker_hostname="w")
        counter.count(key, start, None)
        counter.ended(key, replace(start, ended_at=at, outcome=Outcome.WORKER_LOST))
    return request


@pytest.mark.parametrize(
    ("policy", "times", "reason"),
    [
        (Policy(max_deliveries=9, max_crashes=3), 2, None),
        (Policy(max_deliveries=9, max_crashes=3), 3, Reason.WORKER_LOST),
        (Policy(max_crashes=3), 3, Reason.WORKER_LOST),
        (Policy(max_deliveries=3, max_crashes=3), 3, Reason.MAX_DELIVERIES_EXCEEDED),
        (Policy(max_crashes=3, crash_window=150.0), 3, None),
        (Policy(max_crashes=2, crash_window=150.0), 3, Reason.WORKER_LOST),
    ],
)
def test_a_message_that_crashed_too_often_does_not_start(
    policy: Policy, times: int, reason: Reason | None
) -> None:
    """Whatever ``max_deliveries`` allows; what dies was not counted once more."""
    counter = MemoryCounter()
    request = a_message_that_crashed(policy, counter, times)
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)

    verdict = starts.decide(policy, request.dlq_in_flight, request)

    assert (verdict.reason if isinstance(verdict, Die) else None) is reason
    assert len(counter.history(request.dlq_in_flight.key)) == times + (reason is None)


def test_a_message_whose_letter_is_elsewhere_does_not_start_again() -> None:
    """Its worker died after storing the letter, before it could say so beside the counts."""
    rule = ExceptionRule(action=Action.DEAD_LETTER, dead_letter_queue="fatal-DLQ")
    policy, counter = Policy(max_deliveries=9, exceptions=(("shop.Fatal", rule),)), MemoryCounter()
    request = a_redelivered_message()
    starts = Starts(counter, lambda: NOW, Counts(), flags_redelivery=True)
    assert isinstance(starts.decide(policy, request.dlq_in_flight, request), Run)
    counter.died(replace(request.dlq_in_flight.key, dead_letter_queue="fatal-DLQ"))
    assert isinstance(starts.decide(policy, request.dlq_in_flight, request), Leave)
