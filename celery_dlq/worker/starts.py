"""Starts of execution, counted before they happen.

A first delivery is counted without waiting for the store's answer, and runs. For any other one the
facts are gathered (its count, and what it did before), and `decide_start` decides, once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from threading import Lock
from typing import Any
from weakref import ref

from kombu.utils.functional import LRUCache

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.policies.decisions import (
    CRASHES,
    PutOff,
    Run,
    Start,
    Verdict,
    decide_start,
    exceeds_retries,
    starts_again_at,
)
from celery_dlq.policies.policy import MAX_CRASH_DELAY_SECONDS, CrashLimit, Policy
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.metrics import (
    DELIVERIES,
    DUPLICATES,
    INTERNAL_ERRORS,
    STORE_ERRORS,
    UNCOUNTED,
    Counts,
)
from celery_dlq.store.worker_records import Clock, Count, CountStatus, MessageKey
from celery_dlq.writing.lifecycle import OVER, GuardedRequest, InFlight

logger = get_logger("celery_dlq.worker")

_RUN = Run()

MAX_SUSPECT_WAIT_SECONDS = 30.0
"""Longest wait of one suspect (its last delivery vanished) for another that runs here."""


_MAX_KNOWN = 10_000

OUTAGE_WAIT_SECONDS = 10.0
"""How long a message that was delivered before waits in an outage of the store, to be counted."""


REPEATS = {
    "redis": "A live worker keeps its messages with dlq_reliable_fetch; without it, "
    "visibility_timeout must be longer than your longest task and delay: see "
    "docs/how-to/long-tasks.md",
    "sqs": "A live worker keeps its messages with dlq_reliable_fetch, for 12 hours at most; "
    "without it, the queue's visibility timeout must be longer than your longest task and delay: "
    "see docs/how-to/sqs.md#how-long-a-message-belongs-to-its-worker",
    "amqp": "RabbitMQ gives a message to another worker when the connection of the first one is "
    "closed: see docs/how-to/rabbitmq.md#what-a-closed-connection-repeats",
}
"""Why a message comes again while it runs, by broker, and the page that says more."""


class Starts:
    """Counts the starts of one worker."""

    def __init__(
        self,
        counter: DeliveryCounter,
        clock: Clock,
        counts: Counts,
        *,
        flags_redelivery: bool,
        driver_type: str = "",
        running: Callable[[], Iterable[InFlight]] = tuple,
    ) -> None:
        self._counter = counter
        self._clock = clock
        self._counts = counts
        self._flags_redelivery = flags_redelivery
        self._driver_type = driver_type
        self._running = running
        self._suspect: ref[GuardedRequest] | None = None
        self._one_at_a_time = Lock()
        self._away_since = self._failed_at = -OUTAGE_WAIT_SECONDS  # in monotonic seconds
        # How often messages that may come back were delivered, as far as this worker knows: what an
        # outage of the store leaves to decide by
        self._known: Any = LRUCache(limit=_MAX_KNOWN)  # type: ignore[no-untyped-call]

    def decide(self, policy: Policy, in_flight: InFlight, request: GuardedRequest) -> Verdict:
        """Count a start and decide whether it may happen."""
        in_flight.charged = False
        exceeds = exceeds_retries(policy, in_flight.key.retries)
        if in_flight.first and not exceeds:  # it has no past by which to decide
            in_flight.charged = True  # if not counted now, it is when its end is recorded
            if not self._counter.count_first(in_flight.key, in_flight.delivery):
                self._note_uncounted(in_flight)
            return _RUN
        start = Start(retries=in_flight.key.retries)
        # Thread pools must not start two suspects at once either.
        with nullcontext() if exceeds else self._one_at_a_time:
            if not exceeds:
                try:
                    start = self._count_again(policy, in_flight, request)
                except Exception:
                    self._counts.count(INTERNAL_ERRORS, "start")
                    logger.exception("Delivery of %s is not counted", in_flight.key.task_id)
                    start = self._unknown(in_flight)
            verdict = decide_start(policy, start)
            if isinstance(verdict, PutOff) and verdict.seconds:
                in_flight.seen_at = None  # afterwards, what runs elsewhere is looked at anew
                in_flight.due_at = time.monotonic() + verdict.seconds
            if isinstance(verdict, Run) and start.status is not None and in_flight.suspect:
                self._suspect = ref(request)
        if isinstance(verdict, Run) and start.status is None:
            in_flight.charged = True
            self._note_uncounted(in_flight)
            logger.error("Delivery of %s is not counted, it runs", in_flight.key.task_id)
        return verdict

    def _note_uncounted(self, in_flight: InFlight) -> None:
        """Note a start that runs though the store did not count it."""
        self._known[in_flight.key] = self._known.get(in_flight.key, 0) + 1
        self._counts.count(UNCOUNTED, in_flight.resolved.queue)
        self._counts.count(STORE_ERRORS, "count")

    def _count_again(self, policy: Policy, in_flight: InFlight, request: GuardedRequest) -> Start:
        """Count a message that was, or may have been, delivered before; the facts about it."""
        now = time.monotonic()
        key, retries = in_flight.key, in_flight.key.retries
        in_flight.delivery = replace(in_flight.delivery, started_at=self._clock())
        waited = None if in_flight.seen_at is None else now - in_flight.seen_at
        # Amazon SQS may not mark a second delivery, but it marks no first one.
        again = self._flags_redelivery or bool(request.delivery_info.get("redelivered"))
        alone = self._no_suspect_runs() or (waited or 0.0) > MAX_SUSPECT_WAIT_SECONDS
        try:
            # A letter in a queue that `exceptions` names is on another hash slot than its counts,
            # so the worker may have been killed in between.
            if again and any(
                self._counter.is_dead(key.in_queue(name))
                for name in policy.other_dead_letter_queues
            ):
                return Start(retries=retries, status=CountStatus.DEAD)
            start, limit = self._crashes(policy, in_flight, delays=again)
            count = self._counter.count_delivery(
                key,
                in_flight.delivery,
                limit,
                known=self._known.get(key, 0),
                here=any(
                    one.charged and one is not in_flight and one.key == key
                    for one in self._running()
                ),
                waited_seconds=waited,
                alone=alone,
                unless_late=again,
            )
        except StoreUnavailable as exc:
            logger.debug("Delivery of %s is not counted: %s", key.task_id, exc)
            return self._unknown(in_flight)
        self._failed_at = -OUTAGE_WAIT_SECONDS
        if count.status in (CountStatus.UNCERTAIN, CountStatus.SUSPECT):
            in_flight.seen_at = now if in_flight.seen_at is None else in_flight.seen_at
        else:
            self._apply_count(in_flight, count, request.task.name)
        return replace(start, status=count.status, deliveries=count.number)

    def _crashes(
        self, policy: Policy, in_flight: InFlight, *, delays: bool
    ) -> tuple[Start, int | None]:
        """The crashes that count and what is left of the wait; and the limit of this count."""
        retries = in_flight.key.retries
        delays = delays and bool(policy.crash_delay)
        if not policy.max_crashes and not delays:
            return Start(retries=retries), policy.max_deliveries
        history = self._counter.history(in_flight.key)
        crashes, limit = crashes_of(policy, retries, history, in_flight.delivery.started_at)
        wait = self._wait_after_crash(policy, in_flight, history) if delays and history else 0.0
        if wait:  # the count then only tells if the last delivery still runs
            limit = min(limit or sys.maxsize, _started(history, retries))
        return Start(retries=retries, crashes=crashes, wait_seconds=wait), limit

    def _wait_after_crash(
        self, policy: Policy, in_flight: InFlight, history: tuple[Delivery, ...]
    ) -> float:
        """The seconds that a message has to wait until it may start again.

        It waits once: clocks of workers differ, and a worker whose record of the end was lost may
        live on. Of a delivery that vanished, the last sign of its worker is the end.
        """
        if in_flight.due_at is not None:
            return max(0.0, in_flight.due_at - time.monotonic())
        last, retries = history[-1], in_flight.key.retries
        if last.outcome is None and last.retries == retries:
            sign = self._counter.last_sign(in_flight.key, last) or last.started_at
            history = (*history[:-1], replace(last, ended_at=sign))
        due = starts_again_at(policy, retries, history)
        left = 0.0 if due is None else (due - self._clock()).total_seconds()
        return min(max(0.0, left), MAX_CRASH_DELAY_SECONDS)

    def _unknown(self, in_flight: InFlight) -> Start:
        """The facts while an outage of the store hides them, or an error of ours.

        It may be poison at its limit, which must not start again.
        """
        retries = in_flight.key.retries
        if not self._outage_is_old():
            # The reply was lost, perhaps, and not the count; the next one is another.
            with suppress(Exception):
                self._counter.record_end(in_flight.key, in_flight.delivery, charged=False)
            return Start(retries=retries, status=CountStatus.UNCERTAIN)
        known = self._known.get(in_flight.key, 0)
        in_flight.delivery = replace(in_flight.delivery, number=known + 1)
        return Start(retries=retries, deliveries=known)

    def _outage_is_old(self) -> bool:
        """Note that the store did not count; True if it has not for some time."""
        now = time.monotonic()
        if now - self._failed_at > OUTAGE_WAIT_SECONDS:
            self._away_since = now
        self._failed_at = now
        return now - self._away_since > OUTAGE_WAIT_SECONDS

    def _no_suspect_runs(self) -> bool:
        """True if no suspect (a message whose last delivery vanished) runs on this worker.

        Suspects run one at a time: else a message that kills its worker takes down the others
        that were redelivered with it, again and again, until they are dead-lettered for it.
        """
        running = self._suspect() if self._suspect is not None else None
        return running is None or running.acknowledged or running.dlq_state in OVER

    def _apply_count(self, in_flight: InFlight, count: Count, task: str) -> None:
        """Apply the result of a count to the message, the metrics and the log."""
        status, queue, number = count.status, in_flight.resolved.queue, count.number
        if status is CountStatus.COUNTED:
            self._known[in_flight.key] = number
        if status is CountStatus.LIMIT_REACHED:
            number += 1  # the delivery that is refused
        in_flight.delivery = replace(in_flight.delivery, number=number)
        in_flight.suspect = count.suspect
        in_flight.charged = status is CountStatus.COUNTED
        if count.suspect and in_flight.charged:
            self._counts.count(DELIVERIES, queue, Outcome.VANISHED.value, task)
        if status in (CountStatus.DEAD, CountStatus.RETRIED, CountStatus.RUNNING):
            self._counts.count(DUPLICATES, queue)
        if status is CountStatus.RUNNING:
            logger.warning(
                "Task %s is delivered again while delivery %d of it still runs, here or on another "
                "worker. This delivery does not count. %s",
                in_flight.key.task_id,
                count.number,
                REPEATS.get(self._driver_type, "See docs/how-to/long-tasks.md"),
            )

    def forget_message(self, key: MessageKey) -> None:
        """Forget a message that is done."""
        if self._known:
            self._known.pop(key, None)

    def take_back(self, request: GuardedRequest) -> None:
        """Uncount a start that never happened."""
        in_flight = request.dlq_in_flight
        if in_flight is None:
            return
        self.uncharge(in_flight)
        if self._suspect is not None and self._suspect() is request:
            self._suspect = None

    def uncharge(self, in_flight: InFlight) -> None:
        """Uncount a delivery that a shutdown ended, or that never started."""
        key, number = in_flight.key, in_flight.delivery.number
        if in_flight.charged:
            self._counter.record_end(key, in_flight.delivery, charged=False)
            if self._known.get(key, 0) == number:
                self._known[key] = number - 1
        in_flight.charged = False

    def record_end(self, in_flight: InFlight) -> None:
        """Record the end of a delivery; its message may come back, if it was not retried."""
        key, delivery = in_flight.key, in_flight.delivery
        if in_flight.charged:
            self._counter.record_end(key, delivery)
            if delivery.outcome is not Outcome.RETRIED:
                self._known[key] = max(self._known.get(key, 0), delivery.number)
        in_flight.charged = False  # it is over: a later delivery is another one


def crashes_of(
    policy: Policy, retries: int, history: Iterable[Delivery], now: datetime
) -> tuple[tuple[Outcome, ...], int | None]:
    """The crashes of a message that count, oldest first, and the limit of its deliveries.

    That limit is reached if there were as many crashes as ``max_crashes`` allows. A delivery
    without a recorded end counts as vanished; when is not known, so the latest moment that is
    possible counts: the start of the next delivery.
    """
    limit = CrashLimit.of(policy.max_crashes)
    if limit is None:
        return (), policy.max_deliveries
    found: list[Outcome] = []
    until, mine = now, [each for each in history if each.retries == retries]
    for delivery in reversed(mine):
        outcome, at = delivery.outcome or Outcome.VANISHED, delivery.ended_at or until
        within = limit.within is None or (now - at).total_seconds() <= limit.within
        if outcome in CRASHES and within:
            found.append(outcome)
        until = delivery.started_at
    crashes = tuple(reversed(found))
    if len(crashes) < limit.times:
        return crashes, policy.max_deliveries
    # The last one may still run on a live worker: only the count can tell.
    reached = _started(mine, retries)
    return crashes, min(reached, policy.max_deliveries or reached)


def _started(history: Iterable[Delivery], retries: int) -> int:
    """The number of the last delivery that counts; there is one."""
    mine = (each for each in history if each.retries == retries)
    return max(each.number for each in mine if each.outcome is not Outcome.SHUTDOWN)
