"""The guard: decides what happens to guarded messages at their start and at their end.

The life of a message in a worker, as Celery's hooks (`celery_dlq.worker.request`) tell it:

1. It is received. Celery may drop it at once, unread: `decide_dropped` makes its letter first.
2. Celery is about to start it. `verdict_before_start` asks the observers: an operator may want it
   dead, a hold may take it.
3. `count_start` counts the start and decides by the policy (`celery_dlq.worker.starts`). A `Run`
   runs; a `PutOff` comes again in a second, after a crash later (`celery_dlq.worker.delayed`); a
   `Die` goes to 6; a copy of a dead message is acknowledged.
4. The pool runs it, or drops it unseen: `uncount_never_started` takes the count back. A shutdown
   that gives it back is recorded and not charged (`record_interrupted`).
5. It ends. `record_returned`: its counts are deleted. `decide_end`: the policy decides whether this
   is a death; if not, the end is recorded, and Celery retries, requeues or forgets the message.
6. It dies. `dead_letter` reads its history, makes the letter and stores it; the store deletes the
   counts in the same step. Only then the request acknowledges the message. While the store is away,
   the letter waits in memory and the message at the broker, or both wait on disk.
7. The observers see the end (`Observer.after_end`): a circuit breaker counts, a sample is taken.

An error in this module is logged; it neither fails a task nor acknowledges a message. On the way
from a death to its letter it is treated as a store that is away: the message waits (`undecided`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from billiard.einfo import ExceptionInfo

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.headers import (
    HOLD_HEADER,
    REDRIVE_HEADER,
    REDRIVES_HEADER,
    whole_number,
)
from celery_dlq.letters.json_codec import instant, with_zone
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Delivery, Outcome, Reason
from celery_dlq.policies.decisions import Die, End, PutOff, Run, Verdict, decide_drop, decide_end
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.metrics import DELIVERIES, INTERNAL_ERRORS, SUCCEEDED
from celery_dlq.worker.dispatched import AtWork, has_crashed
from celery_dlq.worker.housekeeping import Housekeeping
from celery_dlq.worker.life import LifeKeeper
from celery_dlq.worker.observer import FAILED, Ended, Observer, WorkerParts
from celery_dlq.worker.observer import SUCCEEDED as RETURNED
from celery_dlq.worker.revoked import Revocations
from celery_dlq.worker.starts import Starts
from celery_dlq.writing.capture import Message, message_key_of
from celery_dlq.writing.failure import Failure, failure_of
from celery_dlq.writing.letter import history_of, last_number
from celery_dlq.writing.lifecycle import (
    DeliveryState,
    GuardedRequest,
    InFlight,
    WaitsForStore,
)
from celery_dlq.writing.writer import LetterWriter, PendingLetter, Waiting

if TYPE_CHECKING:
    from celery_dlq.worker.delayed import Delayed

logger = get_logger("celery_dlq.worker")

_RUN = Run()
_MAX_REDRIVE_ID_CHARS = 64


def sent_by_us(request: GuardedRequest) -> str:
    """Describe the revocation of a message that an operator sent; empty of any other one."""
    headers = request.request_dict
    if whole_number(headers.get(REDRIVES_HEADER)):
        return "revoked after it was redriven"
    return "revoked; it was released from a hold" if HOLD_HEADER in headers else ""


class Guard:
    """Guards the messages of one worker."""

    def __init__(
        self,
        parts: WorkerParts,
        writer: LetterWriter,
        *,
        flags_redelivery: bool,
    ) -> None:
        self.parts = parts
        self.counts = parts.counts
        self.observers = tuple(parts.made.values())
        self.at_work = AtWork()
        # Requests that the next tick hands to the pool again: a redelivered message may still run
        # on a live worker, or its worker may just have died. Bounded by the prefetch count, as they
        # are not acknowledged. A deque: thread pools add while the timer takes.
        self.later: deque[Any] = deque()
        self.delayed: Delayed | None = None  # until a message waits after a crash
        self._making = threading.Lock()
        self._tick_rests = False  # from the end of a connection to the next one
        self.housekeeping = Housekeeping()
        self.queues: tuple[str, ...] | None = None  # those consumed now; not known before a tick
        self.told: Callable[[], bool] = bool  # that no instruction has changed
        self.guards_all = parts.policies.may_guard(None)
        self._policies = parts.policies
        self.counter = parts.backend.counter
        self.revocations = Revocations(parts.backend.revoked)
        self.life = LifeKeeper(parts.backend, self._queues_at_work, self._note_crashes)
        self._crashed: WeakSet[GuardedRequest] = WeakSet()
        self._writer = writer
        self._flags_redelivery = flags_redelivery
        self._starts = Starts(
            self.counter,
            parts.clock,
            parts.counts,
            flags_redelivery=flags_redelivery,
            driver_type=str(parts.app.connection_for_read().transport.driver_type),
            running=self._running,
        )
        self._hooked = {
            hook: [
                one
                for one in self.observers
                if getattr(type(one), hook) is not getattr(Observer, hook)
            ]
            for hook in ("before_start", "before_end", "after_end")
        }
        for one in self.observers:
            one.on_guard_made(self.will_dead_letter)

    def may_guard(self, task: Any) -> bool:
        """True if a message of this task could be guarded; with ``None``, of any task."""
        return self._policies.may_guard(task)

    def dead_letter_queue_of(self, request: GuardedRequest) -> str:
        """The dead-letter queue of a message."""
        return self._policies.resolve(request.delivery_info, request.task).dead_letter_queue

    # -- the start ----------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """True if an observer may keep messages from starting now."""
        return any(one.watching for one in self._hooked["before_start"])

    def verdict_before_start(self, request: GuardedRequest) -> Verdict | None:
        """What keeps a message from starting, before it is counted."""
        found: Verdict | None = self._first_verdict("before_start", request)
        return found

    def _first_verdict(self, hook: str, request: GuardedRequest) -> Any:
        for one in self._hooked[hook]:
            if one.watching:
                verdict = self.run_guarded(one.name, getattr(one, hook), request)
                if verdict is not None:
                    return verdict
        return None

    def count_start(self, request: GuardedRequest) -> Verdict:
        """Count a start of execution and decide whether it may happen."""
        resolved = self._policies.resolve(request.delivery_info, request.task)
        if resolved.policy is None:
            return _RUN
        in_flight = self._in_flight(request, resolved)
        verdict = self._starts.decide(resolved.policy, in_flight, request)
        if isinstance(verdict, PutOff) and verdict.seconds:
            return replace(verdict, keep=partial(self._delayed().delay, verdict.seconds))
        return verdict

    def _delayed(self) -> Delayed:
        """What keeps the messages that wait after a crash, made for the first of them."""
        from celery_dlq.worker.delayed import Delayed  # noqa: PLC0415 - few policies let any wait

        with self._making:  # pools of threads start messages in several
            self.delayed = self.delayed or Delayed(start_again)
            return self.delayed

    def _forget_delayed(self) -> None:
        if self.delayed is not None:
            self.run_guarded("delayed", self.delayed.forget_all)

    def _in_flight(
        self, request: GuardedRequest, resolved: ResolvedPolicy | None = None
    ) -> InFlight:
        """What is known of a message: from its first start on, or from its end."""
        if request.dlq_in_flight is not None:
            return request.dlq_in_flight
        if resolved is None:
            resolved = self._policies.resolve(request.delivery_info, request.task)
        key = message_key_of(request.message, request.request_dict, resolved.dead_letter_queue)
        delivery = Delivery(
            number=1,
            retries=key.retries,
            started_at=self.parts.clock(),
            worker_hostname=self.parts.hostname,
            worker_pid=self.parts.pid,
            release=self.parts.settings.release,
        )
        again = request.delivery_info.get("redelivered") or HOLD_HEADER in request.request_dict
        in_flight = InFlight(resolved, key, delivery, self._flags_redelivery and not again)
        if resolved.policy is not None:
            request.dlq_in_flight = in_flight
        return in_flight

    # -- what never started ---------------------------------------------------------

    def flush_pool(self, pool: Any, flush: Callable[[], None]) -> None:
        """Let Celery drop what no process was given: the pool closes, or the connection is lost."""
        self.later.clear()
        self._forget_delayed()
        jobs = self.run_guarded("flush", self.at_work.keep_jobs, pool)
        try:
            flush()
        finally:
            dropped = self.run_guarded("flush", self.at_work.give_back_jobs, pool, jobs)
            self.run_guarded("flush", self.uncount_never_started, dropped or [])

    def uncount_never_started(self, requests: list[Any]) -> None:
        """Uncount starts that never happened; the broker redelivers their messages."""
        for request in requests:
            if request.dlq_state is DeliveryState.DISPATCHED:
                request.dlq_move(DeliveryState.NEW)
            self.uncount(request)
            request.dlq_put_off()
            logger.debug("Task %s never started here: its delivery does not count", request.id)

    def uncount(self, request: GuardedRequest) -> None:
        """Take back the count of a start that did not happen."""
        self._starts.take_back(request)

    def look_for_missing_ends(self, pool: Any) -> None:
        """Give back messages whose end Celery never reports; called once a second."""
        for request in self.at_work.take_missed(pool):
            request.dlq_end_is_missing()

    def end_is_missing(self, request: GuardedRequest, failure: Failure) -> None:
        """Record a delivery that ended nobody knows how; its message is delivered again."""
        if request.dlq_state is DeliveryState.DISPATCHED:
            self.uncount(request)
            return
        self.decide_end(request, failure, requeued=True)
        resolved = self._policies.resolve(request.delivery_info, request.task)
        if resolved.policy is None:  # else it is counted already
            outcome = Outcome.VANISHED.value
            self.counts.count(DELIVERIES, resolved.queue, outcome, request.task.name)

    # -- the end ------------------------------------------------------------------

    def record_returned(self, request: GuardedRequest) -> None:
        """Forget a message whose task returned."""
        self.record_success(request)
        self._tell_ended(request, request.dlq_in_flight, RETURNED)

    def record_success(self, request: GuardedRequest) -> None:
        """Forget a message whose task succeeded, was ignored or was revoked."""
        in_flight = request.dlq_in_flight
        if in_flight is not None:
            self._forget_message(in_flight)
            self.counts.count(DELIVERIES, in_flight.resolved.queue, SUCCEEDED, request.task.name)
            redrive_id = (
                request.request_dict.get(REDRIVE_HEADER) if in_flight.key.redrives else None
            )
            if isinstance(redrive_id, str) and len(redrive_id) <= _MAX_REDRIVE_ID_CHARS:
                self.counter.redrive_succeeded(redrive_id)
            if self._tick_rests:
                self.run_guarded("flush", self.counter.flush)

    def decide_end(
        self, request: GuardedRequest, failure: Failure, *, requeued: bool
    ) -> DeliveryState:
        """Decide a delivery that ended without success and that Celery is about to settle."""
        if failure.end is None:
            self.record_success(request)
            return DeliveryState.DONE
        end = replace(failure.end, final=False) if requeued else failure.end
        if end.outcome is Outcome.REQUEUED and request.acknowledged:
            text = f"not requeued: acknowledged before it ran; {end.text}".removesuffix("; ")
            end = replace(end, final=True, text=text)
        resolved = self._policies.resolve(request.delivery_info, request.task)
        verdict = (self.death_at_end(request) if end.final else None) or decide_end(
            resolved.policy, end
        )
        if isinstance(verdict, Die):
            return self.dead_letter(request, verdict, failure)
        in_flight = self._in_flight(request)
        self._close_delivery(request, in_flight, end.outcome, failure)
        self._tell_ended(request, in_flight, FAILED)
        if resolved.policy is not None:
            if end.final:  # an expected error, or a death that the policy does not keep
                self._forget_message(in_flight)
            else:
                self._starts.record_end(in_flight)
        return DeliveryState.DONE

    def death_at_end(self, request: GuardedRequest) -> Die | None:
        """What an observer makes of the end of a delivery."""
        found: Die | None = self._first_verdict("before_end", request)
        return found

    def decide_expired(self, request: GuardedRequest) -> DeliveryState:
        """Decide a message that is past its expiry and will never run, as `decide_end` does."""
        resolved = self._policies.resolve(request.delivery_info, request.task)
        text = f"expired at {request.expires} before it could run"
        verdict = decide_drop(resolved.policy, Reason.EXPIRED, text)
        if verdict is None:
            return DeliveryState.DONE
        return self.dead_letter(request, verdict)

    def decide_revoked(self, request: GuardedRequest, *, terminated: bool = False) -> DeliveryState:
        """Decide a message that an operator revoked; returns as `decide_end` does.

        Celery drops it, and so do we. But what we sent becomes a letter: a report counts it.
        """
        text = sent_by_us(request)
        if not text:
            self.record_success(request)
            return DeliveryState.DONE
        failure = None
        if terminated:
            end = End(outcome=Outcome.WORKER_LOST, text=text)
            failure = Failure(end, exception_message=f"terminated; {text}")
        return self.dead_letter(request, Die(Reason.OPERATOR, text), failure)

    def decide_dropped(
        self,
        message: Any,
        headers: dict[str, Any],
        reason: Reason,
        failure: Failure,
        waits: WaitsForStore,
    ) -> DeliveryState:
        """Decide a message that Celery is about to drop unexecuted, as `decide_end` does."""
        resolved = self._policies.resolve(message.delivery_info or {})
        verdict = decide_drop(resolved.policy, reason, failure.exception_message or reason.value)
        if verdict is None:
            return DeliveryState.DONE
        kept = Message.of(message, headers)
        letter = self.parts.make(kept, resolved, verdict, failure=failure)
        pending = PendingLetter(
            letter, kept.identity.in_queue(letter.dead_letter_queue), waits=waits
        )
        return self._writer.store_or_wait(pending)

    def record_interrupted(self, request: GuardedRequest) -> None:
        """Record a delivery that a shutdown ends, and do not charge it."""
        in_flight = request.dlq_in_flight
        if in_flight is None or request.acknowledged:
            return
        self._close_delivery(request, in_flight, Outcome.SHUTDOWN)
        self._starts.uncharge(in_flight)

    def owns_result(self, request: GuardedRequest, result: Mapping[str, Any]) -> bool:
        """False if a stored result is of another message, which may have the same task id."""
        in_flight = request.dlq_in_flight
        if in_flight is None:
            return True
        if not is_stored_by(in_flight, result, self.parts.clock()):
            return False
        try:
            return not self.counter.shares_id(in_flight.key)
        except StoreUnavailable:  # as with Celery alone
            return True

    def record_retry(self, request: GuardedRequest, failure: Failure | None) -> None:
        """Record a delivery after whose crash Celery has published a retry."""
        in_flight = request.dlq_in_flight
        if in_flight is not None:
            self._close_delivery(request, in_flight, Outcome.RETRIED, failure)
            self._starts.record_end(in_flight)

    def record_crash(self, request: GuardedRequest, failure: Failure) -> None:
        """Record the end of a delivery whose result stops the worker's main process."""
        in_flight = request.dlq_in_flight
        if in_flight is not None and failure.end is not None and not request.acknowledged:
            self._close_delivery(request, in_flight, failure.end.outcome, failure)
            self._starts.record_end(in_flight)

    def will_dead_letter(self, task: Any, delivery_info: dict[str, Any], exc_info: Any) -> bool:
        """True if an exception will end in a letter; changes nothing.

        Also called in pool processes, which know the configured policies but no override.
        """
        info = ExceptionInfo(exc_info)
        self._call_observers("on_error", info, task, delivery_info)
        failure = failure_of(info, tuple(task.throws or ()))
        if failure.end is None:
            return False
        verdict = decide_end(self._policies.resolve(delivery_info, task).policy, failure.end)
        return isinstance(verdict, Die) and verdict.kept

    # -- the death ----------------------------------------------------------------

    def undecided(
        self, owner: WaitsForStore, again: Callable[[], object], exc: Exception
    ) -> DeliveryState:
        """Let a message wait whose death an error of ours left undecided, until ``again`` works."""
        self.count_internal_error("end")
        headers = owner.message.headers
        named = headers if isinstance(headers, Mapping) else {}
        task = f"{named.get('task')}[{named.get('id')}]"
        acknowledged = bool(getattr(owner, "acknowledged", False))
        waiting = Waiting(task=task, again=again, waits=owner, acknowledged=acknowledged)
        self._writer.keep_waiting(waiting, exc)
        return DeliveryState.WAITING_FOR_STORE

    def dead_letter(
        self, request: GuardedRequest, verdict: Die, failure: Failure | None = None
    ) -> DeliveryState:
        """Store the letter, if the policy keeps one; the request then settles the message.

        ``failure`` is the end of the delivery that led to the death, if one did. Returns
        ``STORED`` or ``WAITING_FOR_STORE``.
        """
        in_flight = self._in_flight(request)
        if failure is not None and failure.end is not None:
            self._close_delivery(request, in_flight, failure.end.outcome, failure)
        if not verdict.kept:
            shown = "" if self.parts.redaction else f" ({verdict.description})"
            logger.warning("Task %s died and is not kept: %s%s", request.id, verdict.reason, shown)
            self._forget_message(in_flight)
            return DeliveryState.STORED
        if failure is None and verdict.reason is Reason.OPERATOR and not in_flight.first:
            number = last_number(self.counter, in_flight.key) + 1  # this start is not counted
            in_flight.delivery = replace(in_flight.delivery, number=number)
        history = history_of(self.counter, in_flight, with_current=failure is not None)
        if failure is None and history and history[-1].outcome is Outcome.VANISHED:
            self._count_outcome(request, in_flight, Outcome.VANISHED)
        resolved = self._policies.of_death(in_flight.resolved, verdict.rule)
        letter = self.parts.make(
            Message.of(request.message, request.request_dict, in_flight.key),
            resolved,
            verdict,
            failure=failure,
            history=history,
            deliveries=in_flight.delivery.number - (failure is None),
            pid=in_flight.delivery.worker_pid,
        )
        key = in_flight.key.in_queue(resolved.dead_letter_queue)
        ran = in_flight.delivery.ended_at if failure is not None else None
        pending = PendingLetter(
            letter,
            key,
            waits=request,
            acknowledged=bool(request.acknowledged),
            ran_seconds=(ran - in_flight.delivery.started_at).total_seconds() if ran else 0.0,
        )
        state = self._writer.store_or_wait(pending)
        if state is DeliveryState.STORED:
            self._starts.forget_message(in_flight.key)
            if key != in_flight.key:
                self.counter.record_death(in_flight.key)  # elsewhere, storing the letter did that
            self._tell_ended(request, in_flight, Ended(succeeded=False, letter=letter))
        return state

    def _tell_ended(
        self, request: GuardedRequest, in_flight: InFlight | None, ended: Ended
    ) -> None:
        if in_flight is not None:
            for one in self._hooked["after_end"]:
                if one.watching:
                    self.run_guarded(one.name, one.after_end, request, in_flight, ended)

    def _forget_message(self, in_flight: InFlight) -> None:
        """Forget a message that is done; others with its task id keep their counts."""
        self.counter.succeeded(in_flight.key, in_flight.delivery, first=in_flight.first)
        self._starts.forget_message(in_flight.key)

    def _close_delivery(
        self,
        request: GuardedRequest,
        in_flight: InFlight,
        outcome: Outcome,
        failure: Failure | None = None,
    ) -> None:
        if in_flight.resolved.policy is not None:
            self._count_outcome(request, in_flight, outcome)
        in_flight.delivery = replace(
            in_flight.delivery,
            ended_at=self.parts.clock(),
            outcome=outcome,
            worker_pid=request.worker_pid or in_flight.delivery.worker_pid,
            exception_type=failure.exception_type if failure else None,
            exception_message=failure.exception_message if failure else None,
        )

    def _count_outcome(
        self, request: GuardedRequest, in_flight: InFlight, outcome: Outcome
    ) -> None:
        self.counts.count(DELIVERIES, in_flight.resolved.queue, outcome.value, request.task.name)

    # -- what is periodic -----------------------------------------------------------

    def tick(self) -> None:
        """Send a heartbeat, buffered counts and waiting letters; called once a second."""
        for act in (
            self._send_heartbeat,
            self.counter.flush,
            self._writer.tick,
            self.housekeeping.tick,
        ):
            self.run_guarded("tick", act)

    def _send_heartbeat(self) -> None:
        self.life.beat_at = time.monotonic()
        self.counter.heartbeat(self._queues_at_work())

    def start_later(self, consumer: Any) -> None:
        """Hand the requests that were put off to the pool again; called once a second."""
        for _ in range(len(self.later)):
            try:
                request = self.later.popleft()
            except IndexError:
                return  # the connection was lost in the meantime
            if request.dlq_waits_since + self._writer.patience() > time.monotonic():
                self.run_guarded("start", start_again, consumer, request)
            else:  # else its broker would close the channel
                logger.info("Task %s goes back to its queue: it waited for its count", request.id)
                self.run_guarded("start", request.dlq_give_back)
        if self.delayed is not None:
            self.run_guarded("start", self.delayed.give_to_timer, consumer)

    def connected(self) -> None:
        """The consumer has a new connection; the broker redelivers what was put off."""
        self._tick_rests = False
        self.later.clear()
        self.run_guarded("start", self.life.start)
        self._forget_delayed()
        self._call_observers("connected")

    def disconnected(self) -> None:
        """The consumer has none, and no tick tells what ends: others soon have the messages."""
        self._tick_rests = True

    def in_loop(self, consumer: Any) -> None:
        """Let observers talk to the broker; called once a second in the consumer's loop."""
        self._call_observers("in_loop", consumer)

    def close(self) -> None:
        """Tick a last time, then close connections."""
        self.life.stopped = True  # not `stop`: its thread may wait for a store that hangs
        self.tick()
        self.housekeeping.close()
        self._call_observers("close")
        self.counter.close()

    def _call_observers(self, hook: str, *args: Any) -> None:
        for one in self.observers:
            self.run_guarded(one.name, getattr(one, hook), *args)

    def _running(self) -> list[InFlight]:
        """The messages that run, or are about to run, on this worker."""
        found = (request.dlq_in_flight for request in self.at_work.requests())
        return [one for one in found if one is not None]

    def _queues_at_work(self) -> set[str]:
        return {one.key.dead_letter_queue for one in self._running()}

    def _note_crashes(self) -> None:
        """Record the ends of processes that the pool does not read while the tick is late.

        The worker shows that it lives. So each copy of a message that killed its process here would
        start, uncharged, as a copy of one that runs.
        """
        for request in self.at_work.requests():
            found = request.dlq_in_flight
            if found is None or not found.charged or request in self._crashed:
                continue
            if has_crashed(request):
                self._crashed.add(request)
                end = {"ended_at": self.parts.clock(), "worker_pid": request.worker_pid}
                delivery = replace(found.delivery, outcome=Outcome.WORKER_LOST, **end)
                self.counter.record_end(found.key, delivery)

    # -- our own errors -------------------------------------------------------------

    def count_internal_error(self, operation: str) -> None:
        """Count an internal error; the caller logs it."""
        self.counts.count(INTERNAL_ERRORS, operation)

    def run_guarded(self, operation: str, act: Callable[..., Any], *args: Any) -> Any:
        """Do something; an error of ours is logged and counted, and the result is ``None``."""
        try:
            return act(*args)
        except Exception:
            self.count_internal_error(operation)
            logger.exception("The dead-letter guard failed (%s); the task goes on", operation)
            return None


def start_again(consumer: Any, request: Any) -> None:
    """Let Celery apply a request as one whose ETA has come; the prefetch count stays."""
    before = consumer.qos.value
    raised = consumer.qos.increment_eventually() > before
    consumer.apply_eta_task(request)  # which lowers it
    if not raised:
        consumer.qos.increment_eventually()


def is_stored_by(in_flight: InFlight, result: Mapping[str, Any], now: datetime) -> bool:
    """True if a result was stored while a delivery ran here; its process has this machine's clock.

    A task id may be used again, and Celery finds the result by the id.
    """
    done: Any = result.get("date_done")
    began = in_flight.delivery.started_at
    try:
        at = instant(done) if isinstance(done, str) else with_zone(done)
        if not at.microsecond:  # which may keep whole seconds
            began = began.replace(microsecond=0)
        return bool(began <= at <= now)
    except (AttributeError, TypeError, ValueError):  # unknown: as with Celery alone
        return True
