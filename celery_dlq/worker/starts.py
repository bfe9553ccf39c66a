"""Starts of execution: each is counted before it happens, or is not to happen.

`celery_dlq.policies.decisions` decides what may run. A first delivery needs no answer of the store.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from weakref import ref

from celery_dlq.backends.base import Clock, Count, CountStatus, DeliveryCounter, MessageKey
from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.metrics import DELIVERIES, DUPLICATES, STORE_ERRORS, UNCOUNTED, Counts
from celery_dlq.policies.decisions import (
    Die,
    Leave,
    PutOff,
    Run,
    Start,
    decide_redelivery,
    decide_start,
)
from celery_dlq.policies.policy import Policy
from celery_dlq.record import Outcome
from celery_dlq.worker.lifecycle import OVER, GuardedRequest, InFlight

logger = get_logger("celery_dlq.worker")

_RUN = Run()

LANE_SECONDS = 30.0
"""Longest wait of a message that may have killed its worker for another one of that kind."""


class UncountedDeliveries:
    """Deliveries that this worker could not count because the store did not answer; bounded."""

    _MOST = 10_000

    def __init__(self) -> None:
        self._counts: OrderedDict[MessageKey, int] = OrderedDict()

    def add(self, key: MessageKey) -> None:
        """One more."""
        self._counts[key] = self._counts.pop(key, 0) + 1
        while len(self._counts) > self._MOST:
            self._counts.popitem(last=False)

    def of(self, key: MessageKey) -> int:
        """How many of this message."""
        return self._counts.get(key, 0) if self._counts else 0

    def take_back(self, key: MessageKey) -> None:
        """One less: it never started."""
        if self._counts.get(key, 0) > 1:
            self._counts[key] -= 1
        else:
            self.forget(key)

    def forget(self, key: MessageKey) -> None:
        """They are counted now, or the message is done."""
        if self._counts:
            self._counts.pop(key, None)


class Starts:
    """Counts the starts of one worker.

    Args:
        counter: Counts deliveries.
        clock: The present, aware UTC.
        counts: Where metrics are counted.
        flags_redelivery: Whether the broker marks redelivered messages.

    Attributes:
        uncounted: Starts that could not be counted.
    """

    def __init__(
        self, counter: DeliveryCounter, clock: Clock, counts: Counts, *, flags_redelivery: bool
    ) -> None:
        self._counter = counter
        self._clock = clock
        self._counts = counts
        self._flags_redelivery = flags_redelivery
        self._lane: ref[GuardedRequest] | None = None
        self._one_at_a_time = Lock()
        self.uncounted = UncountedDeliveries()

    def decide(
        self, policy: Policy, in_flight: InFlight, request: GuardedRequest
    ) -> Run | PutOff | Leave | Die:
        """Count a start, and decide whether it may happen.

        Args:
            policy: What guards the message.
            in_flight: The message.
            request: Celery's request for it.
        """
        verdict: Run | Die = _RUN
        in_flight.charged = in_flight.uncounted = False
        if policy.max_retries is not None:
            verdict = decide_start(policy, Start(retries=in_flight.key.retries))
        if isinstance(verdict, Die):
            return verdict
        if in_flight.first:
            in_flight.charged = self._counter.count_first(in_flight.key, in_flight.delivery)
            if not in_flight.charged:
                self._uncounted(in_flight)
            return verdict
        try:
            with self._one_at_a_time:  # in pools of threads, too, two suspects do not start at once
                verdict_again = self._start_again(policy, in_flight)
                if in_flight.suspect and isinstance(verdict_again, Run):
                    self._lane = ref(request)
        except StoreUnavailable as exc:
            return self._start_uncounted(policy, in_flight, exc)
        return verdict_again

    def _start_uncounted(
        self, policy: Policy, in_flight: InFlight, exc: StoreUnavailable
    ) -> Run | Die:
        """The store is down: healthy work goes on, but no message runs here without end."""
        uncounted = self.uncounted.of(in_flight.key)
        verdict = decide_start(policy, Start(retries=in_flight.key.retries, deliveries=uncounted))
        in_flight.delivery = replace(in_flight.delivery, number=uncounted + 1)
        if isinstance(verdict, Run):
            self._uncounted(in_flight)
            logger.error("Delivery of %s is not counted, it runs: %s", in_flight.key.task_id, exc)
        return verdict

    def _uncounted(self, in_flight: InFlight) -> None:
        in_flight.uncounted = True
        self.uncounted.add(in_flight.key)
        self._counts.count(UNCOUNTED, in_flight.resolved.queue)
        self._counts.count(STORE_ERRORS, "count")

    def _lane_is_free(self) -> bool:
        """Whether no message whose last delivery vanished runs here now.

        One at a time: else a message that kills its worker takes others that came back
        with it down again and again, until they are dead-lettered for it.
        """
        running = self._lane() if self._lane is not None else None
        return running is None or running.acknowledged or running.dlq_state in OVER

    def _start_again(self, policy: Policy, in_flight: InFlight) -> Run | PutOff | Leave | Die:
        """Count a message that was, or may have been, delivered before."""
        now = time.monotonic()
        in_flight.delivery = replace(in_flight.delivery, started_at=self._clock())
        waited = None if in_flight.seen_at is None else now - in_flight.seen_at
        count = self._counter.count(
            in_flight.key,
            in_flight.delivery,
            policy.max_deliveries,
            uncounted=self.uncounted.of(in_flight.key),
            waited_seconds=waited,
            alone=self._lane_is_free() or (waited or 0.0) > LANE_SECONDS,
            unless_dead=self._flags_redelivery,
        )
        verdict = decide_redelivery(policy, in_flight.key.retries, count)
        if isinstance(verdict, PutOff):
            in_flight.seen_at = now if in_flight.seen_at is None else in_flight.seen_at
        else:
            self._note_count(in_flight, count)
        return verdict

    def _note_count(self, in_flight: InFlight, count: Count) -> None:
        """Keep what a count found, and tell the metrics and the log of it."""
        standing, queue, number = count.status, in_flight.resolved.queue, count.number
        if standing in (CountStatus.COUNTED, CountStatus.LIMIT_REACHED):
            self.uncounted.forget(in_flight.key)
        if standing is CountStatus.LIMIT_REACHED:
            number += 1  # the one that does not happen
        in_flight.delivery = replace(in_flight.delivery, number=number)
        in_flight.suspect = count.suspect
        in_flight.charged = standing is CountStatus.COUNTED
        if count.suspect and in_flight.charged:
            self._counts.count(DELIVERIES, queue, Outcome.VANISHED.value)
        if standing in (CountStatus.DEAD, CountStatus.RUNNING):
            self._counts.count(DUPLICATES, queue)
        if standing is CountStatus.RUNNING:
            logger.warning(
                "Task %s is delivered again while delivery %d of it still runs on another worker. "
                "It is not charged. With the Redis broker, set visibility_timeout above your "
                "longest task and delay",
                in_flight.key.task_id,
                count.number,
            )

    def take_back(self, request: GuardedRequest) -> None:
        """Uncount a start that never happened."""
        in_flight = request.dlq_in_flight
        if in_flight is None:
            return
        if in_flight.charged:
            self._counter.ended(in_flight.key, in_flight.delivery, charged=False)
        elif in_flight.uncounted:
            self.uncounted.take_back(in_flight.key)
        in_flight.charged = in_flight.uncounted = False
        if self._lane is not None and self._lane() is request:
            self._lane = None
