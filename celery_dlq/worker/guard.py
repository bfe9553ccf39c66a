"""The guard: what the worker does for each guarded message, at its start and at its end.

Celery's hooks (`celery_dlq.worker.request`, `celery_dlq.worker.dropped`) call it; it
gathers facts, asks `celery_dlq.policies.decisions`, and carries the verdict out. An error in
here is logged and neither fails a task nor acknowledges one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from threading import Lock
from typing import Any, Protocol
from weakref import ref

from celery.worker import state

from celery_dlq.backends.base import Clock, CountStatus, DeliveryCounter, MessageKey
from celery_dlq.errors import StoreUnavailable
from celery_dlq.headers import REDRIVE_HEADER, REDRIVES_HEADER, REPLACED_TASK_NESTING, whole_number
from celery_dlq.logs import get_logger
from celery_dlq.metrics import (
    DELIVERIES,
    DUPLICATES,
    INTERNAL_ERRORS,
    STORE_ERRORS,
    SUCCEEDED,
    UNCOUNTED,
    Counts,
)
from celery_dlq.policies.decisions import (
    Die,
    Leave,
    Run,
    Start,
    decide_drop,
    decide_end,
    decide_start,
)
from celery_dlq.policies.policy import Policy
from celery_dlq.record import Delivery, Outcome, Reason
from celery_dlq.worker.capture import Message, captured, message_id
from celery_dlq.worker.dispatched import Dispatched
from celery_dlq.worker.failure import Failure
from celery_dlq.worker.letter import Death, bare, letter_of
from celery_dlq.worker.letter_writer import LetterWriter, PendingLetter
from celery_dlq.worker.policy_cache import PolicyCache, ResolvedPolicy

logger = get_logger("celery_dlq.worker")

HISTORY_IN_LETTER = 50

_RUN = Run()
_LONGEST_REST = 30  # ticks
_LONGEST_ID = 64

LANE_SECONDS = 30.0
"""Longest wait of a message that may have killed its worker for another one of that kind."""


HANDLING: ContextVar[bool] = ContextVar("dlq_handling", default=False)
"""Whether Celery now handles the end of a guarded delivery; a letter's history tells of it."""


@dataclass(slots=True)
class InFlight:
    """One guarded message between its start and its end.

    Attributes:
        resolved: What guards it.
        key: Which message it is.
        delivery: Its present delivery.
        first: It was never delivered before.
        charged: The delivery is counted now. Not so before its start, or if the message
            already runs elsewhere.
        uncounted: It could not be counted: the store did not answer.
        seen_at: When it was first put off, in monotonic seconds.
        suspect: Its last delivery vanished: it may have killed its worker.
    """

    resolved: ResolvedPolicy
    key: MessageKey
    delivery: Delivery
    first: bool
    charged: bool = False
    uncounted: bool = False
    seen_at: float | None = None
    suspect: bool = False


class Begin(Enum):
    """What is to be done with a message that is about to be executed."""

    RUN = "run"
    SKIP = "skip"  # it was dead-lettered, or its letter waits
    LATER = "later"  # ask again in a moment: another worker may still run it


class Ending(Enum):
    """What Celery may do with a message whose delivery ended."""

    LEFT = "left"  # nothing died: Celery goes on as ever
    STORED = "stored"  # its letter is stored: acknowledge it
    WAITS = "waits"  # its letter is not stored yet: do not acknowledge it


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


class Chore(Protocol):
    """Something that a worker does in the background; it is asked once a second."""

    def tick(self) -> None:
        """Do the next bit; short, because the worker's event loop waits."""

    def close(self) -> None:
        """The worker stops; never raises."""


class Guard:
    """Guards the messages of one worker.

    Args:
        policy_cache: Tells what guards a message.
        letter_writer: Stores letters.
        counter: Counts deliveries.
        clock: The present, aware UTC.
        hostname: Node name of the worker.
        pid: Process id of the worker's main process.
        flags_redelivery: Whether the broker marks redelivered messages; if not, every
            count is waited for.
        release: Version of the user's code, for the letters.
        counts: Where deliveries are counted, by outcome.
        sampler: Told of messages whose tasks returned, if some are to be sampled.
    """

    def __init__(
        self,
        policy_cache: PolicyCache,
        letter_writer: LetterWriter,
        counter: DeliveryCounter,
        clock: Clock,
        *,
        hostname: str,
        pid: int,
        flags_redelivery: bool,
        release: str | None = None,
        counts: Counts | None = None,
        sampler: Callable[[Any, InFlight], None] | None = None,
    ) -> None:
        self._policies = policy_cache
        self._letter_writer = letter_writer
        self._counter = counter
        self._clock = clock
        self._hostname = hostname
        self._pid = pid
        self._flags_redelivery = flags_redelivery
        self._release = release
        self._counts = Counts() if counts is None else counts
        self._sampler = sampler
        self._uncounted_deliveries = UncountedDeliveries()
        self._dispatched = Dispatched()
        self._lane: ref[Any] | None = None
        self._one_at_a_time = Lock()
        self.chores: list[Chore] = []
        self._rest_ticks, self._next_rest = 0, 1
        self.guards_all = policy_cache.may_guard(None)

    def may_guard(self, task: Any) -> bool:
        """Whether any message of this task could be guarded; ``None``: of every task."""
        return self._policies.may_guard(task)

    def begin(self, request: Any) -> Begin:
        """Count a start of execution, and decide whether it may happen.

        Args:
            request: Celery's request, about to be given to the pool.
        """
        resolved = self._policies.of(request.delivery_info, request.task)
        if resolved.policy is None:
            return Begin.RUN
        in_flight = request.dlq_in_flight
        if in_flight is None:
            in_flight = request.dlq_in_flight = self._track(request, resolved)
        verdict = self._start(resolved.policy, in_flight, request)
        if verdict is None:
            return Begin.LATER
        return (
            Begin.RUN
            if isinstance(verdict, Run)
            else self._end_at_start(request, in_flight, verdict)
        )

    def dispatched(self, request: Any, job: Any, *, dropped: bool) -> None:
        """A pool was given a request that was counted; maybe no process has accepted it yet.

        Args:
            request: Celery's request.
            job: What the pool returned.
            dropped: The pool closed meanwhile, and dropped it.
        """
        if dropped:
            self._take_back([request])
        elif hasattr(job, "_accepted"):
            self._dispatched.add(request, job)
            if request.time_start is not None:  # a pool with threads was quicker
                self._dispatched.accepted(request)

    def accepted(self, request: Any) -> None:
        """A process begins with it."""
        self._dispatched.accepted(request)

    def pool_is_flushed(self, pool: Any) -> None:
        """Celery is about to drop what the pool has not begun: it closes, or the broker is lost."""
        self._take_back(self._dispatched.before_flush(pool))

    def pool_is_gone(self) -> None:
        """Nothing starts any more."""
        self._take_back(self._dispatched.all_lost())

    def look_for_lost(self, pool: Any) -> None:
        """Once a second: jobs whose process died before it took them."""
        self._take_back(self._dispatched.lost(pool))

    def _take_back(self, requests: list[Any]) -> None:
        """Uncount starts that never happened; their messages are delivered anew."""
        for request in requests:
            in_flight = request.dlq_in_flight
            if in_flight.charged:
                self._counter.ended(in_flight.key, in_flight.delivery, charged=False)
            elif in_flight.uncounted:
                self._uncounted_deliveries.take_back(in_flight.key)
            in_flight.charged = in_flight.uncounted = False
            if self._lane is not None and self._lane() is request:
                self._lane = None
            logger.debug("Task %s never started here: it is not charged", request.id)

    def failed(self, operation: str) -> None:
        """Count an error of our own; who calls logs it."""
        self._counts.count(INTERNAL_ERRORS, operation)

    def returned(self, request: Any) -> None:
        """A guarded message's task returned: it succeeded, and may be sampled."""
        self.succeeded(request)
        if self._sampler is not None:
            self._sampler(request, request.dlq_in_flight)

    def succeeded(self, request: Any) -> None:
        """Forget a message whose task succeeded, was ignored or was revoked."""
        in_flight = request.dlq_in_flight
        if in_flight is not None:
            self._dispatched.accepted(request)
            self._forget(in_flight)
            self._uncounted_deliveries.forget(in_flight.key)
            self._counts.count(DELIVERIES, in_flight.resolved.queue, SUCCEEDED)
            if in_flight.key.redrives:
                self._redrive_succeeded(request.request_dict.get(REDRIVE_HEADER))

    def end(
        self, request: Any, failure: Failure, done: Callable[[], None], *, requeued: bool
    ) -> Ending:
        """A delivery ended otherwise than by success, and Celery is about to let go of it.

        Args:
            request: Celery's request.
            failure: How it ended.
            done: Acknowledges the message; called later if the letter must wait.
            requeued: Celery gives the message back to its queue.
        """
        if failure.end is None:
            self.succeeded(request)
            return Ending.LEFT
        self._dispatched.accepted(request)
        resolved = self._policies.of(request.delivery_info, request.task)
        end = replace(failure.end, final=failure.end.final and not requeued)
        verdict = decide_end(resolved.policy, end)
        in_flight = request.dlq_in_flight or self._track(request, resolved)
        self._close_delivery(request, in_flight, failure)
        if isinstance(verdict, Die):
            return self._die(request, in_flight, verdict, failure, done)
        if resolved.policy is not None:
            self._note(in_flight, final=end.final)
        return Ending.LEFT

    def expired(self, request: Any, done: Callable[[], None]) -> Ending:
        """A message is past its expiry and will never run.

        Args:
            request: Celery's request.
            done: Lets Celery mark the task as revoked and acknowledge the message.
        """
        resolved = self._policies.of(request.delivery_info, request.task)
        verdict = decide_drop(
            resolved.policy, Reason.EXPIRED, f"expired at {request.expires} before it could run"
        )
        if isinstance(verdict, Leave):
            return Ending.LEFT
        in_flight = request.dlq_in_flight or self._track(request, resolved)
        return self._die(request, in_flight, verdict, None, done)

    def dropped(
        self,
        message: Any,
        headers: dict[str, Any],
        reason: Reason,
        failure: Failure,
        done: Callable[[], None],
    ) -> Ending:
        """Celery is about to drop a message that never became a request.

        Args:
            message: The kombu message.
            headers: Its headers in the form of protocol 2, as far as they are known.
            reason: Why Celery drops it.
            failure: The error, described.
            done: Lets Celery drop it.
        """
        resolved = self._policies.of(message.delivery_info or {})
        verdict = decide_drop(resolved.policy, reason, failure.exception_message or reason.value)
        if isinstance(verdict, Leave):
            return Ending.LEFT
        kept = captured(message, headers)
        key = MessageKey(
            dead_letter_queue=resolved.dead_letter_queue,
            task_id=kept.task_id,
            retries=kept.retries,
            redrives=kept.redrives,
            nesting=kept.nesting,
        )
        death = self._death(resolved, key, kept, verdict, failure, (), 0)
        return self._write(death, acknowledged=False, done=done)

    def interrupted(self, request: Any) -> None:
        """The worker gives a running message up because it shuts down: recorded, not charged."""
        in_flight = request.dlq_in_flight
        self._dispatched.accepted(request)
        if in_flight is None or in_flight.resolved.policy is None or request.acknowledged:
            return
        in_flight.delivery = replace(
            in_flight.delivery,
            ended_at=self._clock(),
            outcome=Outcome.SHUTDOWN,
            worker_pid=request.worker_pid or in_flight.delivery.worker_pid,
        )
        self._counts.count(DELIVERIES, in_flight.resolved.queue, Outcome.SHUTDOWN.value)
        if in_flight.charged:
            self._counter.ended(in_flight.key, in_flight.delivery, charged=False)
            in_flight.charged = False

    def share_overrides(self) -> None:
        """Let pool processes know of overrides, for `keeps`; before the pool starts."""
        self._policies.share()

    def keeps(self, task: Any, delivery_info: dict[str, Any], failure: Failure) -> bool:
        """Whether this end of a delivery will be a letter; decides nothing, changes nothing."""
        if failure.end is None:
            return False
        self._policies.catch_up()  # this is asked in pool processes too
        verdict = decide_end(self._policies.of(delivery_info, task).policy, failure.end)
        return isinstance(verdict, Die) and verdict.kept

    def crashed(self, request: Any, failure: Failure) -> None:
        """The worker's main process is about to die of this result; leave a note at least."""
        in_flight = request.dlq_in_flight
        if in_flight is not None and failure.end is not None and not request.acknowledged:
            self._close_delivery(request, in_flight, failure)
            self._note(in_flight, final=False)

    def tick(self) -> None:
        """Once a second: a heartbeat, what was put off, and what waits for the store."""
        self._counter.heartbeat(self._running_queues())
        self._counter.flush()
        self._letter_writer.tick()
        self._do_chores()

    def close(self) -> None:
        """A last tick, then let go of connections."""
        self.tick()
        for chore in self.chores:
            chore.close()
        self.chores.clear()
        self._counter.close()

    def _running_queues(self) -> set[str]:
        """The dead-letter queues of the messages that run here, or are about to."""
        requests = [*self._dispatched.requests(), *state.active_requests]
        in_flight = (getattr(request, "dlq_in_flight", None) for request in requests)
        return {one.key.dead_letter_queue for one in in_flight if one is not None}

    def _do_chores(self) -> None:
        """In order, until the store does not answer; then none of them for a while.

        A store that hangs costs a time-out a question, and the tasks wait meanwhile.
        """
        if self._rest_ticks > 0:
            self._rest_ticks -= 1
            return
        for chore in self.chores:
            try:
                chore.tick()
            except StoreUnavailable as exc:
                logger.debug("%s is put off: %s", type(chore).__name__, exc)
                self._rest_ticks = self._next_rest
                self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
                return
            except Exception:
                logger.exception("%s failed", type(chore).__name__)
        self._next_rest = 1

    def _redrive_succeeded(self, redrive_id: object) -> None:
        if isinstance(redrive_id, str) and len(redrive_id) <= _LONGEST_ID:
            self._counter.redrive_succeeded(redrive_id)

    def _track(self, request: Any, resolved: ResolvedPolicy) -> InFlight:
        headers = request.request_dict
        retries = whole_number(headers.get("retries"))
        key = MessageKey(
            dead_letter_queue=resolved.dead_letter_queue,
            # Quick for what every message has: this is what each task pays.
            task_id=request.id if type(request.id) is str else message_id(request.message, headers),
            retries=retries,
            redrives=whole_number(headers.get(REDRIVES_HEADER)),
            nesting=whole_number(headers.get(REPLACED_TASK_NESTING)),
        )
        delivery = Delivery(
            number=1,
            retries=retries,
            started_at=self._clock(),
            worker_hostname=self._hostname,
            worker_pid=self._pid,
        )
        first = self._flags_redelivery and not request.delivery_info.get("redelivered")
        return InFlight(resolved, key, delivery, first)

    def _start(self, policy: Policy, in_flight: InFlight, request: Any) -> Run | Die | Leave | None:
        """The verdict on a start; ``None`` if it is too early for one."""
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
        uncounted = self._uncounted_deliveries.of(in_flight.key)
        verdict = decide_start(policy, Start(retries=in_flight.key.retries, deliveries=uncounted))
        in_flight.delivery = replace(in_flight.delivery, number=uncounted + 1)
        if isinstance(verdict, Run):
            self._uncounted(in_flight)
            logger.error("Delivery of %s is not counted, it runs: %s", in_flight.key.task_id, exc)
        return verdict

    def _uncounted(self, in_flight: InFlight) -> None:
        in_flight.uncounted = True
        self._uncounted_deliveries.add(in_flight.key)
        self._counts.count(UNCOUNTED, in_flight.resolved.queue)
        self._counts.count(STORE_ERRORS, "count")

    def _lane_is_free(self) -> bool:
        """Whether no message whose last delivery vanished runs here now.

        One at a time: else a message that kills its worker takes others that came back
        with it down again and again, until they are dead-lettered for it.
        """
        running = self._lane() if self._lane is not None else None
        return running is None or running.acknowledged or running.dlq_is_over

    def _start_again(self, policy: Policy, in_flight: InFlight) -> Run | Die | Leave | None:
        """Count a message that was, or may have been, delivered before."""
        now = time.monotonic()
        in_flight.delivery = replace(in_flight.delivery, started_at=self._clock())
        waited = None if in_flight.seen_at is None else now - in_flight.seen_at
        count = self._counter.count(
            in_flight.key,
            in_flight.delivery,
            policy.max_deliveries,
            uncounted=self._uncounted_deliveries.of(in_flight.key),
            waited_seconds=waited,
            alone=self._lane_is_free() or (waited or 0.0) > LANE_SECONDS,
            unless_dead=self._flags_redelivery,
        )
        if count.status in (CountStatus.COUNTED, CountStatus.LIMIT_REACHED):
            self._uncounted_deliveries.forget(in_flight.key)
        if count.status in (CountStatus.UNCERTAIN, CountStatus.SUSPECT):
            in_flight.seen_at = now if in_flight.seen_at is None else in_flight.seen_at
            return None
        in_flight.delivery = replace(in_flight.delivery, number=count.number)
        in_flight.suspect = count.suspect
        in_flight.charged = count.status is CountStatus.COUNTED
        if count.suspect and count.status is CountStatus.COUNTED:
            self._counts.count(DELIVERIES, in_flight.resolved.queue, Outcome.VANISHED.value)
        if count.status in (CountStatus.DEAD, CountStatus.RUNNING):
            self._counts.count(DUPLICATES, in_flight.resolved.queue)
        if count.status is CountStatus.DEAD:
            return Leave()
        if count.status is CountStatus.RUNNING:
            logger.warning(
                "Task %s is delivered again while delivery %d of it still runs on another worker. "
                "It is not charged. With the Redis broker, set visibility_timeout above your "
                "longest task and delay",
                in_flight.key.task_id,
                count.number,
            )
        if count.status is not CountStatus.LIMIT_REACHED:
            return Run()
        in_flight.delivery = replace(in_flight.delivery, number=count.number + 1)
        start = Start(retries=in_flight.key.retries, deliveries=count.number)
        return decide_start(policy, start)

    def _end_at_start(self, request: Any, in_flight: InFlight, verdict: Die | Leave) -> Begin:
        def done() -> None:
            if isinstance(verdict, Leave):
                logger.info("A late copy of task %s is dropped: its letter is stored", request.id)
                request.dlq_settle_copy(in_flight.key.dead_letter_queue)
            else:
                request.dlq_settle(verdict, in_flight.key.dead_letter_queue)

        if isinstance(verdict, Die):
            ending = self._die(request, in_flight, verdict, None, done)
            if ending is Ending.LEFT:
                logger.critical(
                    "Task %s is executed once more: %s, but no letter can be made",
                    request.id,
                    verdict.description,
                )
                return Begin.RUN
            if ending is Ending.WAITS:
                return Begin.SKIP
        try:
            done()
        except Exception:
            # The broker or the result backend, say. The message comes back, and is not run now.
            logger.exception("Task %s is not executed again, but could not be ended", request.id)
        return Begin.SKIP

    def _forget(self, in_flight: InFlight) -> None:
        """The message is done; what else runs under its task id keeps its count."""
        self._counter.succeeded(in_flight.key, in_flight.delivery, first=in_flight.first)

    def _die(
        self,
        request: Any,
        in_flight: InFlight,
        verdict: Die,
        failure: Failure | None,
        done: Callable[[], None],
    ) -> Ending:
        if not verdict.kept:
            logger.warning(
                "Task %s died and is not kept: %s (%s)",
                request.id,
                verdict.reason,
                verdict.description,
            )
            self._forget(in_flight)
            return Ending.STORED
        history = self._history(in_flight, with_current=failure is not None)
        if failure is None and history and history[-1].outcome is Outcome.VANISHED:
            self._counts.count(DELIVERIES, in_flight.resolved.queue, Outcome.VANISHED.value)
        message = captured(request.message, request.request_dict)
        number = in_flight.delivery.number
        death = self._death(
            in_flight.resolved,
            in_flight.key,
            message,
            verdict,
            failure,
            history,
            number if failure else number - 1,
            pid=in_flight.delivery.worker_pid,
        )
        return self._write(death, acknowledged=bool(request.acknowledged), done=done)

    def _death(
        self,
        resolved: ResolvedPolicy,
        key: MessageKey,
        message: Message,
        verdict: Die,
        failure: Failure | None,
        history: tuple[Delivery, ...],
        deliveries: int,
        pid: int | None = None,
    ) -> Death:
        return Death(
            resolved=resolved,
            key=key,
            message=message,
            verdict=verdict,
            failure=failure,
            history=history,
            deliveries=deliveries,
            now=self._clock(),
            hostname=self._hostname,
            pid=pid or self._pid,
            release=self._release,
        )

    def _write(self, death: Death, *, acknowledged: bool, done: Callable[[], None]) -> Ending:
        """Store the letter; after an error of our own a plainer one; at last leave it to Celery."""
        try:
            try:
                letter = letter_of(death)
            except Exception:
                self._counts.count(INTERNAL_ERRORS, "letter")
                logger.exception("Task %s died; its letter says less now", death.key.task_id)
                letter = letter_of(bare(death))
            pending = PendingLetter(letter, death.key, acknowledged, done)
            return Ending.STORED if self._letter_writer.write(pending) else Ending.WAITS
        except Exception:
            self._counts.count(INTERNAL_ERRORS, "letter")
            logger.critical(
                "Task %s died and is left to Celery, without a letter",
                death.key.task_id,
                exc_info=True,
            )
            return Ending.LEFT

    def _close_delivery(self, request: Any, in_flight: InFlight, failure: Failure) -> None:
        assert failure.end is not None  # noqa: S101 - the callers looked
        if in_flight.resolved.policy is not None:
            self._counts.count(DELIVERIES, in_flight.resolved.queue, failure.end.outcome.value)
        in_flight.delivery = replace(
            in_flight.delivery,
            ended_at=self._clock(),
            outcome=failure.end.outcome,
            worker_pid=request.worker_pid or in_flight.delivery.worker_pid,
            exception_type=failure.exception_type,
            exception_message=failure.exception_message,
        )

    def _note(self, in_flight: InFlight, *, final: bool) -> None:
        """Record the end of a delivery whose message did not become a letter."""
        if final:  # expected, or a death that the policy does not keep
            self._forget(in_flight)
        elif in_flight.charged:
            self._counter.ended(in_flight.key, in_flight.delivery)

    def _history(self, in_flight: InFlight, *, with_current: bool) -> tuple[Delivery, ...]:
        """All deliveries so far; the store is asked only if there were any before this one."""
        earlier: tuple[Delivery, ...] = ()
        if not (in_flight.first and in_flight.key.retries == 0):
            try:
                earlier = self._counter.history(in_flight.key)
            except StoreUnavailable as exc:
                logger.warning("History of %s is not at hand: %s", in_flight.key.task_id, exc)
        key = in_flight.key
        current = (key.retries, in_flight.delivery.number)
        past = [
            _closed(d, key)
            for d in earlier
            if d.outcome is Outcome.SHUTDOWN or (d.retries, d.number) != current
        ]
        whole = [*past, *([in_flight.delivery] if with_current else [])]
        if len(whole) > HISTORY_IN_LETTER:
            whole = [whole[0], *whole[1 - HISTORY_IN_LETTER :]]
        return tuple(whole)


def _closed(delivery: Delivery, key: MessageKey) -> Delivery:
    """An earlier delivery, with an outcome even if nobody recorded one.

    A message that was retried cannot have vanished: its retry is what we hold. The
    note of it may still be on its way when the retry ends first.
    """
    if delivery.outcome is not None:
        return delivery
    retried = delivery.retries < key.retries
    return replace(delivery, outcome=Outcome.RETRIED if retried else Outcome.VANISHED)
