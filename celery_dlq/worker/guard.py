"""The guard: counts and dead-letters guarded messages at their start and at their end.

Celery's hooks (`celery_dlq.worker.request`, `celery_dlq.worker.dropped`) call it; it
gathers facts, lets `celery_dlq.policies.decisions` decide, and carries out the verdict. An error
in this module is logged; it neither fails a task nor acknowledges a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo

from celery_dlq.features.circuit_breaker.observer import CircuitWatch
from celery_dlq.features.dead_letter.observer import Demands
from celery_dlq.features.exceptions.observer import ExceptionRules
from celery_dlq.features.hold.holding import Holding
from celery_dlq.features.redaction.masking import MARKER, NO_REDACTION, Redaction
from celery_dlq.letters.headers import (
    HOLD_HEADER,
    REDRIVE_HEADER,
    REDRIVES_HEADER,
    REPLACED_TASK_NESTING,
    whole_number,
)
from celery_dlq.letters.record import DeadLetter, Delivery, Outcome, Reason
from celery_dlq.logs import get_logger
from celery_dlq.metrics import (
    DELIVERIES,
    INTERNAL_ERRORS,
    SUCCEEDED,
    Counts,
)
from celery_dlq.policies.decisions import (
    Die,
    Leave,
    PutOff,
    Run,
    decide_drop,
    decide_end,
)
from celery_dlq.policies.resolved import Executions, PolicyCache, ResolvedPolicy
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.records import Clock, MessageKey
from celery_dlq.worker.dispatched import AtWork
from celery_dlq.worker.periodic import PeriodicTasks
from celery_dlq.worker.starts import Starts
from celery_dlq.writing.capture import Message, captured, message_id
from celery_dlq.writing.failure import Failure, failure_of
from celery_dlq.writing.history import history_of, last_number
from celery_dlq.writing.letter import Death, bare, letter_of
from celery_dlq.writing.lifecycle import (
    DeliveryState,
    GuardedRequest,
    InFlight,
    PooledRequest,
    WaitsForStore,
)
from celery_dlq.writing.writer import LetterWriter, PendingLetter

if TYPE_CHECKING:
    from celery_dlq.worker.jobs import WorkerJobs

logger = get_logger("celery_dlq.worker")

_RUN = Run()
_MAX_REDRIVE_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decision not to execute a message."""

    # `Die` at a limit; `Leave` for a late copy of a message whose letter is stored
    verdict: Die | Leave
    dead_letter_queue: str  # The queue of its letter
    state: DeliveryState  # `STORED`, `WAITING_FOR_STORE` or, for a late copy, `DONE`


class Guard:
    """Guards the messages of one worker."""

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
        sampler: Callable[[GuardedRequest, InFlight], None] | None = None,
        redaction: Redaction = NO_REDACTION,
        holding: Holding,
        circuits: CircuitWatch,
        demands: Demands,
    ) -> None:
        self._policies = policy_cache
        self.exceptions = ExceptionRules(policy_cache)
        self._letter_writer = letter_writer
        self._counter = counter
        self._clock = clock
        self._hostname = hostname
        self._pid = pid
        self._flags_redelivery = flags_redelivery
        self._release = release
        self.counts = self._counts = Counts() if counts is None else counts
        self._sampler = sampler
        self._redaction = redaction
        self.holding = holding
        self._circuits = circuits
        self.demands = demands
        self.at_work = AtWork()
        self._starts = Starts(
            counter, clock, self._counts, flags_redelivery=flags_redelivery, running=self._running
        )
        self.periodic_tasks = PeriodicTasks()
        self.jobs: WorkerJobs | None = None
        self.queues: tuple[str, ...] | None = None  # those consumed now; not known before a tick
        self.guards_all = policy_cache.may_guard(None)

    def may_guard(self, task: Any) -> bool:
        """True if a message of this task could be guarded; with ``None``, of any task."""
        return self._policies.may_guard(task)

    def begin(self, request: GuardedRequest) -> Run | PutOff | Refusal:
        """Count a start of execution and decide whether it may happen."""
        resolved = self._policies.of(request.delivery_info, request.task)
        if resolved.policy is None:
            return _RUN
        in_flight = request.dlq_in_flight
        if in_flight is None:
            in_flight = request.dlq_in_flight = self._track(request, resolved)
        verdict = self._starts.decide(resolved.policy, in_flight, request)
        if isinstance(verdict, (Run, PutOff)):
            return verdict
        return self._refused(request, in_flight, verdict)

    def pool_flushes(self, pool: Any, flush: Callable[[], None]) -> None:
        """Let Celery drop what no process was given: the pool closes, or the connection is lost."""
        jobs = self._flushing(lambda: self.at_work.keep(pool))
        try:
            flush()
        finally:
            self._flushing(lambda: self.never_started(self.at_work.kept(pool, jobs or [])))

    def _flushing(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception:
            self.failed("flush")
            logger.exception("Tasks that never started may be charged")

    def pool_is_gone(self) -> None:
        """Uncount all that never started: the pool is gone."""
        self.never_started(self.at_work.all_dispatched())

    def never_started(self, requests: list[PooledRequest]) -> None:
        """Uncount starts that never happened; the broker redelivers their messages."""
        for request in requests:
            if request.dlq_state is DeliveryState.DISPATCHED:
                request.dlq_move(DeliveryState.NEW)
            self.uncount(request)
            request.dlq_put_off()
            logger.debug("Task %s never started here: it is not charged", request.id)

    def uncount(self, request: GuardedRequest) -> None:
        """Take back the count of a start that did not happen."""
        self._starts.take_back(request)

    def look_for_missing_ends(self, pool: Any) -> None:
        """Give back messages whose end Celery never reports; called once a second."""
        for request in self.at_work.missed(pool):
            request.dlq_end_is_missing()

    def end_is_missing(self, request: GuardedRequest, failure: Failure) -> None:
        """Record a delivery that ended nobody knows how; its message is delivered again."""
        if request.dlq_state is DeliveryState.DISPATCHED:
            self.uncount(request)
            return
        self.end(request, failure, requeued=True)
        resolved = self._policies.of(request.delivery_info, request.task)
        if resolved.policy is None:  # else it is counted already
            outcome = Outcome.VANISHED.value
            self._counts.count(DELIVERIES, resolved.queue, outcome, request.task.name)

    def failed(self, operation: str) -> None:
        """Count an internal error; the caller logs it."""
        self._counts.count(INTERNAL_ERRORS, operation)

    def returned(self, request: GuardedRequest) -> None:
        """Forget a message whose task returned, and sample it perhaps."""
        self.succeeded(request)
        in_flight = request.dlq_in_flight
        if in_flight is not None and in_flight.resolved.executions is not None:
            in_flight.resolved.executions.succeeded += 1
            self._ended(request, in_flight.resolved, succeeded=True)
        if self.demands.known:
            self.demands.met(request.id)
        if self._sampler is not None and request.dlq_in_flight is not None:
            self._sampler(request, request.dlq_in_flight)

    def succeeded(self, request: GuardedRequest) -> None:
        """Forget a message whose task succeeded, was ignored or was revoked."""
        in_flight = request.dlq_in_flight
        if in_flight is not None:
            # `_forget`, inlined: every task pays for this.
            self._counter.succeeded(in_flight.key, in_flight.delivery, first=in_flight.first)
            self._starts.known.forget(in_flight.key)
            self._counts.count(DELIVERIES, in_flight.resolved.queue, SUCCEEDED, request.task.name)
            if in_flight.key.redrives:
                self._redrive_succeeded(request.request_dict.get(REDRIVE_HEADER))

    def end(self, request: GuardedRequest, failure: Failure, *, requeued: bool) -> DeliveryState:
        """Decide a delivery that ended without success and that Celery is about to settle."""
        if failure.end is None:
            self.succeeded(request)
            return DeliveryState.DONE
        resolved = self._policies.of(request.delivery_info, request.task)
        end = replace(failure.end, final=failure.end.final and not requeued)
        if end.outcome is Outcome.REQUEUED and request.acknowledged:
            text = f"not requeued: acknowledged before it ran; {end.text}".removesuffix("; ")
            end = replace(end, final=True, text=text)
        verdict = decide_end(resolved.policy, end)
        demand = self.demands.of(request) if self.demands.known and end.final else None
        if demand is not None:
            verdict = Die(Reason.OPERATOR, demand.text)
        in_flight = request.dlq_in_flight or self._track(request, resolved)
        self._close_delivery(request, in_flight, failure)
        if isinstance(verdict, Die):
            return self._die(request, in_flight, verdict, failure)
        self._ended(request, resolved, succeeded=False)
        if resolved.policy is not None:
            self._note(in_flight, final=end.final)
        return DeliveryState.DONE

    def demanded(self, request: GuardedRequest, failure: Failure | None = None) -> Refusal | None:
        """Dead-letter a message because an operator wants it, before its start or while it runs."""
        demand = self.demands.of(request)
        if demand is None:
            return None
        resolved = self._policies.of(request.delivery_info, request.task)
        in_flight = request.dlq_in_flight or self._track(request, resolved)
        if failure is not None:
            self._close_delivery(request, in_flight, failure)
        elif not in_flight.first:
            number = last_number(self._counter, in_flight.key) + 1
            in_flight.delivery = replace(in_flight.delivery, number=number)
        verdict = Die(Reason.OPERATOR, demand.text)
        state = self._die(request, in_flight, verdict, failure)
        if state is DeliveryState.DONE:
            return None
        return Refusal(verdict, in_flight.key.dead_letter_queue, state)

    def expired(self, request: GuardedRequest) -> DeliveryState:
        """Decide a message that is past its expiry and will never run; returns as `end` does."""
        resolved = self._policies.of(request.delivery_info, request.task)
        verdict = decide_drop(
            resolved.policy, Reason.EXPIRED, f"expired at {request.expires} before it could run"
        )
        if isinstance(verdict, Leave):
            return DeliveryState.DONE
        in_flight = request.dlq_in_flight or self._track(request, resolved)
        return self._die(request, in_flight, verdict, None)

    def dropped(
        self,
        message: Any,
        headers: dict[str, Any],
        reason: Reason,
        failure: Failure,
        waits: WaitsForStore,
    ) -> DeliveryState:
        """Decide a message that Celery is about to drop unexecuted; returns as `end` does."""
        resolved = self._policies.of(message.delivery_info or {})
        verdict = decide_drop(resolved.policy, reason, failure.exception_message or reason.value)
        if isinstance(verdict, Leave):
            return DeliveryState.DONE
        kept = captured(message, headers)
        key = MessageKey(
            dead_letter_queue=resolved.dead_letter_queue,
            task_id=kept.task_id,
            retries=kept.retries,
            redrives=kept.redrives,
            nesting=kept.nesting,
        )
        death = self._death(resolved, key, kept, verdict, failure, (), 0)
        return self._write(death, acknowledged=False, waits=waits)

    def interrupted(self, request: GuardedRequest) -> None:
        """Record a delivery that a shutdown ends, and do not charge it."""
        in_flight = request.dlq_in_flight
        if in_flight is None or in_flight.resolved.policy is None or request.acknowledged:
            return
        in_flight.delivery = replace(
            in_flight.delivery,
            ended_at=self._clock(),
            outcome=Outcome.SHUTDOWN,
            worker_pid=request.worker_pid or in_flight.delivery.worker_pid,
        )
        self._count(request, in_flight, Outcome.SHUTDOWN)
        self._starts.uncharge(in_flight)

    def keeps(self, task: Any, delivery_info: dict[str, Any], exc_info: Any) -> bool:
        """True if an exception will end in a letter; changes nothing.

        Also called in pool processes, which know the configured policies but no override.
        """
        info = ExceptionInfo(exc_info)
        self.exceptions.mark(info, task, delivery_info, info.type)
        failure = failure_of(info, tuple(task.throws or ()))
        if failure.end is None:
            return False
        verdict = decide_end(self._policies.of(delivery_info, task).policy, failure.end)
        return isinstance(verdict, Die) and verdict.kept

    def crashed(self, request: GuardedRequest, failure: Failure) -> None:
        """Record the end of a delivery whose result stops the worker's main process."""
        in_flight = request.dlq_in_flight
        if in_flight is not None and failure.end is not None and not request.acknowledged:
            self._close_delivery(request, in_flight, failure)
            self._note(in_flight, final=False)

    def tick(self) -> None:
        """Send a heartbeat, buffered counts and waiting letters; called once a second."""
        self._counter.heartbeat(self._running_queues())
        self._counter.flush()
        self._letter_writer.tick()
        self.periodic_tasks.tick()

    def close(self) -> None:
        """Tick a last time, then close connections."""
        self.tick()
        self._letter_writer.close()
        self.periodic_tasks.close()
        self._counter.close()

    def _running_queues(self) -> set[str]:
        """The dead-letter queues of messages that run, or are about to run, on this worker."""
        return {one.key.dead_letter_queue for one in self._running()}

    def _running(self) -> list[InFlight]:
        """The messages that run, or are about to run, on this worker."""
        found = (request.dlq_in_flight for request in self.at_work.requests())
        return [one for one in found if one is not None]

    def _redrive_succeeded(self, redrive_id: object) -> None:
        if isinstance(redrive_id, str) and len(redrive_id) <= _MAX_REDRIVE_ID_CHARS:
            self._counter.redrive_succeeded(redrive_id)

    def _track(self, request: GuardedRequest, resolved: ResolvedPolicy) -> InFlight:
        headers = request.request_dict
        retries = whole_number(headers.get("retries"))
        key = MessageKey(
            dead_letter_queue=resolved.dead_letter_queue,
            # The fast path for the usual id: every task pays for this.
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
            release=self._release,
        )
        again = request.delivery_info.get("redelivered") or HOLD_HEADER in headers
        return InFlight(resolved, key, delivery, self._flags_redelivery and not again)

    def _refused(
        self, request: GuardedRequest, in_flight: InFlight, verdict: Die | Leave
    ) -> Run | Refusal:
        dead_letter_queue = in_flight.key.dead_letter_queue
        if isinstance(verdict, Leave):
            logger.info("Late copy of task %s dropped: its letter is stored", request.id)
            return Refusal(verdict, dead_letter_queue, DeliveryState.DONE)
        state = self._die(request, in_flight, verdict, None)
        if state is DeliveryState.DONE:
            logger.critical(
                "Task %s is executed once more: %s, but no letter can be made",
                request.id,
                verdict.description,
            )
            return _RUN
        return Refusal(verdict, dead_letter_queue, state)

    def _forget(self, in_flight: InFlight) -> None:
        """Forget a message that is done; others with its task id keep their counts."""
        self._counter.succeeded(in_flight.key, in_flight.delivery, first=in_flight.first)
        self._starts.known.forget(in_flight.key)

    def _die(
        self, request: GuardedRequest, in_flight: InFlight, verdict: Die, failure: Failure | None
    ) -> DeliveryState:
        """Store the letter, if the policy keeps one; the request then settles the message."""
        if not verdict.kept:
            logger.warning(
                "Task %s died and is not kept: %s (%s)",
                request.id,
                verdict.reason,
                MARKER if self._redaction else verdict.description,
            )
            self._forget(in_flight)
            return DeliveryState.STORED
        history = history_of(self._counter, in_flight, with_current=failure is not None)
        if failure is None and history and history[-1].outcome is Outcome.VANISHED:
            self._count(request, in_flight, Outcome.VANISHED)
        message = captured(request.message, request.request_dict)
        number = in_flight.delivery.number
        resolved = self._policies.of_death(in_flight.resolved, verdict.rule)
        key = replace(in_flight.key, dead_letter_queue=resolved.dead_letter_queue)
        death = self._death(
            resolved,
            key,
            message,
            verdict,
            failure,
            history,
            number if failure else number - 1,
            pid=in_flight.delivery.worker_pid,
        )
        state = self._write(death, acknowledged=bool(request.acknowledged), waits=request)
        if state is DeliveryState.STORED:
            self._starts.known.forget(in_flight.key)
            if key != in_flight.key:
                self._counter.died(in_flight.key)  # storing the letter did that beside the letter
        if verdict.reason is Reason.OPERATOR and state is DeliveryState.STORED:
            self.demands.met(request.id)
        return state

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
            # A message that was never delivered dies of this worker's code.
            release=history[-1].release if history else self._release,
            redaction=self._redaction,
        )

    def _ended(self, request: GuardedRequest, resolved: ResolvedPolicy, *, succeeded: bool) -> None:
        """Let a circuit breaker see the end of what may be a probe."""
        if self.holding.holds and resolved.executions is not None:
            marker = request.request_dict.get(HOLD_HEADER)
            if marker is not None:
                self._circuits.ended(resolved.executions, marker, succeeded=succeeded)

    def _write(self, death: Death, *, acknowledged: bool, waits: WaitsForStore) -> DeliveryState:
        """Store the letter; after an internal error a plainer one; else leave it to Celery."""
        try:
            try:
                letter = letter_of(death)
            except Exception:
                self._counts.count(INTERNAL_ERRORS, "letter")
                logger.exception("Task %s died; its letter lacks details", death.key.task_id)
                letter = letter_of(bare(death))
            state = self._letter_writer.write(PendingLetter(letter, death.key, acknowledged, waits))
        except Exception:
            self._counts.count(INTERNAL_ERRORS, "letter")
            logger.critical(
                "Task %s died and is left to Celery, without a letter",
                death.key.task_id,
                exc_info=True,
            )
            return DeliveryState.DONE
        if death.resolved.executions is not None and state is DeliveryState.STORED:
            self._count_death(death.resolved.executions, letter)
        return state

    def _count_death(self, executions: Executions, letter: DeadLetter) -> None:
        try:
            self._circuits.died(executions, letter)
        except Exception:
            self._counts.count(INTERNAL_ERRORS, "circuit_breaker")
            logger.exception("The death of task %s is not counted", letter.task_id)

    def _close_delivery(
        self, request: GuardedRequest, in_flight: InFlight, failure: Failure
    ) -> None:
        assert failure.end is not None  # noqa: S101 - the callers checked
        if in_flight.resolved.policy is not None:
            self._count(request, in_flight, failure.end.outcome)
        in_flight.delivery = replace(
            in_flight.delivery,
            ended_at=self._clock(),
            outcome=failure.end.outcome,
            worker_pid=request.worker_pid or in_flight.delivery.worker_pid,
            exception_type=failure.exception_type,
            exception_message=failure.exception_message,
        )

    def _count(self, request: GuardedRequest, in_flight: InFlight, outcome: Outcome) -> None:
        self._counts.count(DELIVERIES, in_flight.resolved.queue, outcome.value, request.task.name)

    def _note(self, in_flight: InFlight, *, final: bool) -> None:
        """Record the end of a delivery whose message did not become a letter."""
        if final:  # an expected error, or a death that the policy does not keep
            self._forget(in_flight)
        else:
            self._starts.ended(in_flight)
