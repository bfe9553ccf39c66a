"""The Request mix-in: the guard's hooks in Celery's handling of a message.

Celery makes one Request class per task (``create_request_cls``) on top of
``Task.Request`` and overrides ``execute_using_pool`` and ``on_success`` there
without calling ``super()``. So a base class cannot override these two; it can
wrap what the subclass defines, from ``__init_subclass__``.

Source: https://github.com/celery/celery/blob/main/celery/worker/request.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import ref

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import (
    InvalidTaskError,
    MaxRetriesExceededError,
    Reject,
    TaskRevokedError,
    WorkerLostError,
)
from celery.states import READY_STATES
from celery.utils.imports import symbol_by_name
from celery.worker.state import task_ready

from celery_dlq.errors import MaxDeliveriesExceeded
from celery_dlq.letters.headers import REDRIVEN_AT_HEADER
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Outcome, Reason
from celery_dlq.policies.decisions import Die, End, LateCopy, PutOff, Run, Verdict
from celery_dlq.worker.dispatched import ENDED, drop_failed, is_closed
from celery_dlq.worker.guard import Guard, sent_by_us
from celery_dlq.worker.shutdown_signals import ended_by_shutdown, is_stopping, nothing_starts
from celery_dlq.writing.failure import (
    UNDESCRIBED,
    Failure,
    dropped_failure,
    failure_of,
    missing_end_failure,
    result_not_stored,
    time_limit_failure,
    unwrapped,
)
from celery_dlq.writing.lifecycle import (
    DEAD,
    DECIDED,
    HANDLING,
    HELD,
    NEXT,
    OVER,
    DeliveryState,
    InFlight,
    is_held,
    leases_of,
)

if TYPE_CHECKING:
    from celery.worker.request import Request as _Base  # has no types
else:
    _Base = object

logger = get_logger("celery_dlq.worker")

_S = DeliveryState


class DeadLetterRequest(_Base):
    """Mixed in front of a task's own ``Request`` class."""

    dlq_guard: Guard  # The worker's guard
    dlq_counted = False
    dlq_starts_here = False
    dlq_state = DeliveryState.NEW
    dlq_in_flight: InFlight | None = None  # The guarded message, from its start on
    dlq_waits_since = 0.0  # Time it was first put off, in monotonic seconds
    dlq_job: Any = None  # What the pool made of it; see `celery_dlq.worker.dispatched.has`

    _dlq_cancelled = False  # by a lost connection or a shutdown
    _dlq_failure: Failure | None = None  # the end that Celery reported, while ENDING
    _dlq_escaped: BaseException | None = None  # in the solo pool, past Celery's handling
    _dlq_let_go: Callable[[], Any] | None = None  # called once the wait for the store is over

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if "execute_using_pool" in own:
            cls.execute_using_pool = _asking(own["execute_using_pool"])
        if "on_success" in own:
            cls.on_success = _forgetting(own["on_success"])

    def dlq_move(self, state: DeliveryState) -> None:
        """Change the state; an illegal transition is logged and counted, and changes nothing.

        See `celery_dlq.writing.lifecycle`.
        """
        before = self.dlq_state
        if state in NEXT[before]:
            self.dlq_state = state
            return
        self.dlq_guard.failed("transition")
        logger.error(
            "Task %s stays %s, it cannot become %s: a bug in celery_dlq, please report it",
            self.id,
            before.value,
            state.value,
            stack_info=True,
        )

    def on_accepted(self, pid: Any, time_accepted: Any) -> Any:
        """A pool process starts the task; in a pool inside this process, the task runs next."""
        if self.dlq_starts_here and self.dlq_state is _S.NEW:
            self._dlq_begin_here(pid)
        elif self.dlq_state is not _S.RUNNING:
            self.dlq_move(_S.RUNNING)
        return super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """The pool reported an exception, a lost child or a hard time limit."""
        if self._already_revoked and self.dlq_state in DEAD:
            return None  # terminated by an operator, and its letter is made
        failure = self.dlq_guard.quietly("end", failure_of, exc_info, tuple(self.task.throws or ()))
        failure = failure or UNDESCRIBED
        return self._dlq_while_ending(failure, super().on_failure, exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001 - Celery's signature
        """A soft or hard time limit was exceeded; only the hard one ends the delivery."""
        left_by = sys.exc_info()[1] if self.dlq_starts_here else None
        if left_by is not None and getattr(left_by, "seconds", timeout) != timeout:
            return self._dlq_left(left_by)  # by gevent's time limit of its own
        failure = None if soft else time_limit_failure(timeout)
        return self._dlq_while_ending(failure, super().on_timeout, soft, timeout)

    def _dlq_left(self, exc: BaseException) -> Any:
        """In this process, a task left by what is no ``Exception``; a prefork pool reports it so.

        What ends a process there is a crash.
        """
        info = lost = ExceptionInfo((type(exc), exc, exc.__traceback__))
        failure = self.dlq_guard.quietly("end", failure_of, info, tuple(self.task.throws or ()))
        if isinstance(exc, (SystemExit, KeyboardInterrupt)):
            error = WorkerLostError(repr(exc))
            lost = ExceptionInfo((WorkerLostError, error, exc.__traceback__))
        return self._dlq_while_ending(failure, super().on_failure, lost)

    def acknowledge(self) -> None:
        """Acknowledge; if the message died, only after its letter is stored."""
        if self.dlq_state is _S.ENDING:
            if not self._dlq_ended(super().acknowledge, super().acknowledge):
                super().acknowledge()
        elif self.dlq_state not in HELD:
            super().acknowledge()
            self.dlq_guard.at_work.over(self)

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - Celery's signature
        """Reject; a death is acknowledged instead, once its letter is stored.

        A rejection would copy the message to the broker's own dead-letter exchange,
        and on SQS it would not remove it.
        """
        leave = partial(super().reject, requeue)
        if self.dlq_state is _S.ENDING:
            settle = super().acknowledge
            if requeue and self.acknowledged:  # early: it dies, and Celery stores no result
                settle = partial(self._dlq_settle, Reject("not requeued", requeue))
            if not self._dlq_ended(settle, leave, requeued=requeue):
                leave()
        elif self.dlq_state not in HELD:
            seen = self.time_start is not None or hasattr(self.message, "dlq_is_dispatched")
            # If not seen, Celery drops it before its start, e.g. for an eta out of range.
            exc = InvalidTaskError("cannot be scheduled")
            if seen or requeue or not self.dlq_refuse(exc, leave):
                leave()

    # -- the one way to end: first the letter is stored, then the message is settled -----

    def _dlq_end(
        self,
        decide: Callable[[], DeliveryState],
        settle: Callable[[], Any],
        leave: Callable[[], Any] | None = None,
    ) -> bool:
        """Let the guard decide and store the letter; then settle the message, now or later.

        False if this is no death: the caller settles the message, as Celery does. An error of ours
        lets it wait; if it is found to be no death later, ``leave`` settles it, or it goes back.
        """
        try:
            state = decide()
        except Exception as exc:  # noqa: BLE001 - an error of ours
            again = partial(self._dlq_end_again, decide, leave)
            state = self.dlq_guard.undecided(self, again, exc)
        if state is _S.DONE:
            self.dlq_move(state)
            return False
        if state is _S.STORED:
            self.dlq_move(state)
            settle()
            return True
        self._dlq_let_go = settle
        # In a thread pool, the store may have answered in the meantime.
        if self.dlq_state in (_S.STORED, _S.DONE):
            self._dlq_let_go_now()
        else:
            self.dlq_move(state)
        return True

    def _dlq_end_again(
        self, decide: Callable[[], DeliveryState], leave: Callable[[], Any] | None
    ) -> None:
        """Decide a message that waits because of an error of ours."""
        state = decide()
        if state is _S.DONE and leave is not None:
            self.dlq_move(state)
            self.__dict__.pop("_dlq_let_go", None)
            leave()
        elif state is not _S.WAITING_FOR_STORE:
            self.dlq_wait_is_over(state)

    def dlq_die(self, verdict: Die, failure: Failure | None = None) -> None:
        """Dead-letter a message that does not run, or was terminated.

        The result becomes a failure, so that callers stop waiting for it; errbacks run,
        and a chord or chain fails as usual in Celery.
        """
        if not self.dlq_starts_here:
            self.dlq_job = ENDED  # the pool never gets it

        def settle() -> None:
            where = self.dlq_guard.dead_letter_queue_of(self)
            self._dlq_settle(refusal_error(f"{self.name}[{self.id}]", verdict, where))

        self._dlq_end(partial(self.dlq_guard.dead_letter, self, verdict, failure), settle)

    def _dlq_settle(self, error: Exception | None = None) -> None:
        """Acknowledge a message that ends here; its task fails, if there is an error.

        An error of the broker lets it come again.
        """
        task_ready(self)
        try:
            if error is not None:
                self._dlq_fail(error)
        except Exception:
            logger.exception("Task %s was dead-lettered, but its result is not stored", self.id)
        try:
            super().acknowledge()
        except Exception:
            logger.exception("Task %s is not executed again, but could not be ended", self.id)

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """Settle the message: its letter is stored, or cannot be stored."""
        self.dlq_move(state)
        self._dlq_let_go_now()

    def _dlq_let_go_now(self) -> None:
        let_go = self.__dict__.pop("_dlq_let_go", None)  # once, whichever thread comes first
        if let_go is None:
            return
        if self.dlq_state is _S.STORED:
            let_go()
        else:  # there is no letter: an error of ours acknowledges nothing
            task_ready(self)
            if is_held(self.message):
                super().reject(requeue=True)

    def _dlq_carry_out(self, verdict: Verdict | None) -> bool:
        """Do what is decided about a message that is about to start; True if it starts."""
        if verdict is None or isinstance(verdict, Run):
            return True
        if isinstance(verdict, PutOff):
            if self.dlq_put_off():
                self.dlq_waits_since = self.dlq_waits_since or time.monotonic()
                (verdict.keep or self.dlq_guard.later.append)(self)
            return False
        if isinstance(verdict, Die):
            self.dlq_die(verdict)
            return False
        if not self.dlq_starts_here:
            self.dlq_job = ENDED
        self.dlq_move(_S.DONE)
        unfinished = self._dlq_unfinished(verdict) if isinstance(verdict, LateCopy) else None
        self._dlq_settle(unfinished)
        return False

    def _dlq_unfinished(self, late: LateCopy) -> Exception | None:
        """The end of the task of a late copy, if the worker died after it stored the letter."""
        in_flight = self.dlq_in_flight
        key = None if in_flight is None else in_flight.key
        logger.warning(
            "Late copy of task %s dropped (publication %s): %s",
            self.id,
            key and key.publication,
            f"its letter {key and key.letter_id} is stored" if late.died else "it was retried",
        )
        if not late.died:
            return None
        try:
            if self.task.backend.get_state(self.id) in READY_STATES:
                return None
        except Exception:  # noqa: BLE001 - no result backend, or it is down
            return None
        verdict = Die(Reason.MAX_DELIVERIES_EXCEEDED, "dead-lettered before")
        where = self.dlq_guard.dead_letter_queue_of(self)
        return refusal_error(f"{self.name}[{self.id}]", verdict, where)

    def dlq_execute(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Count the start and hand the task to the pool; else skip it and release its slot."""
        self.message.dlq_is_dispatched = True
        counted = self.dlq_counted
        if (
            nothing_starts()  # Celery would end it at once
            or ((counted or self.dlq_guard.watching) and self._dlq_is_revoked())
        ):
            raise TaskRevokedError(self.id)
        if counted and is_closed(pool):
            return execute()  # the pool drops it, so it is not counted
        if not self._dlq_may_be_dispatched():
            raise TaskRevokedError(self.id)
        try:
            return self._dlq_give(execute, pool)
        except (NotStartedError, TaskRevokedError) as exc:
            raise TaskRevokedError(self.id) from exc
        except Exception as exc:
            if self.time_start is not None or not self.dlq_not_started(pool, exc):
                raise
            raise TaskRevokedError(self.id) from exc

    def _dlq_give(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Hand the task to the pool, and note what its pool knows it by."""
        self.dlq_job = self._dlq_escaped = job = None
        try:
            job = execute()
        except BaseException as exc:
            if not self.dlq_starts_here:
                self.dlq_put_off()
            if isinstance(exc, Exception):
                self._dlq_escaped = exc
            raise
        finally:
            if self.dlq_starts_here and not pool.is_green:  # a greenlet notes itself
                self.dlq_job = getattr(job, "f", ENDED)  # solo is done with it
        if hasattr(job, "_accepted"):
            self.dlq_job = self._apply_result
        elif job is None and not self.dlq_starts_here and is_closed(pool):
            self.dlq_guard.never_started([self])
        return job

    def _dlq_may_be_dispatched(self) -> bool:
        """Count the start, unless the pool does so in the thread that runs the task."""
        if self.dlq_starts_here:
            # Held here already, in order: threads would mix it up.
            return not self.dlq_guard.watching or self._dlq_may_start(begins=False)
        begun = self._dlq_begins()
        if begun and nothing_starts():  # a signal came while it was counted
            self.dlq_guard.never_started([self])
            return False
        return begun

    def _dlq_begins(self) -> bool:
        return self.dlq_begin() if self.dlq_counted else self._dlq_may_start()

    def _dlq_is_revoked(self) -> bool:
        """Check for revocation, as Celery will again; dead-letter unreadable headers."""
        try:
            limits = self.time_limits
            if not self.dlq_starts_here:  # the pool would fail on one that is not a number
                [float(limit) for limit in limits if limit]
            _hard, _soft = limits
            return self.revoked()
        except Exception as exc:
            # Not NEW: Celery has revoked it, and the result backend, say, did not take that.
            if self.dlq_state is not _S.NEW or not self.dlq_refuse(exc):
                raise
            return True

    def revoked(self) -> bool:
        """Check for expiry and revocation; what was redriven after its revocation is not revoked.

        Celery's check makes the end of a revoked message known, and acknowledges it.
        """
        if REDRIVEN_AT_HEADER in self.request_dict and not self._already_revoked:
            expired = self.expires and self.maybe_expire()
            if not expired and self.dlq_guard.revocations.are_older(self):
                return False
        return bool(super().revoked())

    def dlq_begin(self) -> bool:
        """Count the start; return True if it may happen."""
        if not self._dlq_may_start():
            return False
        verdict: Verdict = Run()
        try:
            verdict = self.dlq_guard.begin(self)
        except Exception:
            self.dlq_guard.failed("start")
            logger.exception("Task %s is not guarded this time, it runs", self.id)
        if not self._dlq_carry_out(verdict):
            return False
        waited = self.dlq_in_flight is not None and not self.dlq_in_flight.first
        if waited and not self._dlq_is_ours():
            self.dlq_guard.uncount(self)
            return False
        if self.dlq_starts_here and is_stopping():  # meanwhile; the pool's thread may just end
            self.dlq_guard.never_started([self])
            return False
        self.dlq_move(_S.RUNNING if self.dlq_starts_here else _S.DISPATCHED)
        return True

    def _dlq_may_start(self, *, begins: bool = True) -> bool:
        """False if another worker owns the message, or an observer keeps it from starting."""
        if not self._dlq_is_ours() or (begins and not self._dlq_is_begun()):
            return False
        return self._dlq_carry_out(self.dlq_guard.stops(self))

    def dlq_end_waiting(self, verdict: Die) -> bool:
        """Dead-letter a message that waits for its ETA; True if that was done."""
        if self.dlq_state is not _S.NEW or not self._dlq_is_ours():
            return False
        self.dlq_die(verdict)
        return True

    def dlq_terminate(self, pool: Any) -> None:
        """Terminate a running task, or one that a prefork pool was given."""
        if self.time_start is None and self._apply_result is None:
            return  # its start will be refused
        if self.dlq_starts_here:
            logger.warning(
                "Task %s runs, and only prefork pools can terminate a task: it is dead-lettered "
                "if it fails or comes back",
                self.id,
            )
        elif self.dlq_state not in OVER:
            logger.warning("Terminating task %s: an operator wants it dead-lettered", self.id)
            super().terminate(pool)

    def _dlq_end_terminated(self) -> bool:
        """Dead-letter a task that was terminated because an operator wants it dead-lettered."""
        verdict = None if self.dlq_state in OVER else self.dlq_guard.death_at_end(self)
        if verdict is None:
            return False
        end = End(outcome=Outcome.WORKER_LOST, text=verdict.description)
        self._already_revoked = True
        self.dlq_move(_S.ENDING)
        self.dlq_die(verdict, Failure(end, None, f"terminated; {verdict.description}", None))
        return True

    def dlq_give_back(self) -> None:
        """Return a message to the head of its queue, if the broker can; it waited, or cannot."""
        put_first = getattr(getattr(self.message.channel, "qos", None), "put_first", None)
        if put_first is not None and put_first(self.message.delivery_tag):
            self.acknowledged = True
        else:
            super().reject(requeue=True)
        self.dlq_move(_S.DONE)  # last: what fails is tried again
        task_ready(self)

    def _dlq_is_ours(self) -> bool:
        """False if another worker owns the message: this one stood still for too long."""
        leases, tag = leases_of(self.message), self.message.delivery_tag
        if is_held(self.message):
            if leases is not None and not leases.is_known(tag):
                self.delivery_info["redelivered"] = True  # so that its count is awaited
            return True
        logger.info("Task %s does not start here: its message went back to its queue", self.id)
        if leases is not None:
            self.dlq_move(_S.DONE)
            self._dlq_settle()  # frees its place in the prefetch window, and nothing else
        else:
            self._dlq_leave()
        return False

    def _dlq_is_begun(self) -> bool:
        """Take the message to work; False if a lost connection gives it back at this moment."""
        leases = leases_of(self.message)
        if leases is not None and not leases.begin(self.message.delivery_tag):
            self._dlq_leave()
            return False
        self.dlq_guard.at_work.add(self)
        return True

    def dlq_put_off(self) -> bool:
        """Let the message wait for another start; False if its lost connection gives it back."""
        self.dlq_guard.at_work.over(self)
        leases = leases_of(self.message)
        if leases is None or leases.put_off(self.message.delivery_tag):
            return True
        self._dlq_leave()
        return False

    def _dlq_leave(self) -> None:
        """Do nothing more with a message that goes back to its queue; it is not this worker's."""
        self.dlq_move(_S.DONE)
        task_ready(self)
        self.acknowledged = True

    def dlq_end_is_missing(self) -> None:
        """Give the message back: its pool has its task no more, and did not say how it ended.

        At once if its starts are limited, or Celery cancelled it; else when its lease ends, or it
        would run on and on. If the result backend did not take the result, the task is healthy:
        it is not charged where a lease keeps it from running on and on.
        """
        in_flight, leases = self.dlq_in_flight, leases_of(self.message)
        policy = None if in_flight is None else in_flight.resolved.policy
        error, job = self._dlq_escaped, self.dlq_job
        if error is None and isinstance(job, Future) and job.done() and not job.cancelled():
            error = job.exception()
        healthy = (
            leases is not None
            and result_not_stored(error, "mark_as_done")  # else the task failed, or was retried
            and self.task.backend.exception_safe_to_retry(error)  # else it may never be stored
        )
        limited = self._already_cancelled or (
            policy is not None and policy.max_deliveries is not None and not healthy
        )
        if not limited and leases is None:
            return  # as with Celery alone, the broker keeps it until the connection ends
        if self.dlq_state in (_S.NEW, _S.DISPATCHED, _S.RUNNING) and not self._already_cancelled:
            failure = missing_end_failure(error)
            if healthy:
                self.dlq_guard.quietly("end", self.dlq_guard.uncount, self)
            else:
                self.dlq_guard.quietly("end", self.dlq_guard.end_is_missing, self, failure)
            logger.error(
                "Celery did not report how task %s ended, and its pool does not run it any more "
                "(%s): its message is delivered again%s",
                self.id,
                failure.exception_message,
                "" if limited else " when its lease ends",
            )
            self.dlq_move(_S.DONE)
        task_ready(self)
        if is_held(self.message):
            if limited or leases is None:
                super().reject(requeue=True)
            else:
                leases.lapse(self.message.delivery_tag)
                super().acknowledge()  # frees its place in the prefetch window, and nothing else
        self.acknowledged = True

    def _dlq_begin_here(self, pid: Any) -> None:
        """Count the start; if it may not happen, leave the pool's thread by an exception."""
        greenlet = sys.modules.get("greenlet")
        current = None if greenlet is None else greenlet.getcurrent()
        if id(current) == pid:  # as pools of greenlets name them
            self.dlq_job = ref(current)
        if is_stopping() or not self._dlq_begins():
            raise _silent_exit()(self.id)
        if not self.dlq_counted:
            self.dlq_move(_S.RUNNING)

    def dlq_refuse(self, exc: Exception, leave: Callable[[], Any] | None = None) -> bool:
        """Dead-letter a message that Celery cannot read and that would stop the worker."""
        failure = dropped_failure(exc, "not a Celery task message")

        def decide() -> DeliveryState:
            return self.dlq_guard.dropped(
                self.message, self.request_dict, Reason.INVALID_MESSAGE, failure, self
            )

        return self._dlq_end(decide, self._dlq_settle, leave)

    def dlq_not_started(self, pool: Any, exc: Exception) -> bool:
        """End a delivery that the pool could not take; the message may be tried again."""
        drop_failed(pool, self.id)
        in_flight = self.dlq_in_flight
        if in_flight is None or in_flight.resolved.policy is None:
            return False
        logger.error("Task %s cannot be given to the pool: %r", self.id, exc)
        text = f"could not be given to the pool: {exc}"
        end = End(outcome=Outcome.FAILED, exception_names=(type(exc).__name__,), text=text)
        failure = replace(dropped_failure(exc, text), end=end)
        again = in_flight.resolved.policy.max_deliveries is not None
        decide = partial(self.dlq_guard.end, self, failure, requeued=again)
        leave = partial(super().reject, requeue=again)
        self.dlq_move(_S.ENDING)
        if not self._dlq_end(decide, partial(self._dlq_settle, exc), leave):
            task_ready(self)
            leave()
        return True

    def _dlq_fail(self, exc: Exception) -> None:
        self.task.backend.mark_as_failure(
            self.id,
            exc,
            request=self._context,
            store_result=self.store_errors,
        )
        try:
            raise exc
        except type(exc):
            info = ExceptionInfo()
        signals.task_failure.send(
            sender=self.task,
            task_id=self.id,
            exception=exc,
            args=self.args,
            kwargs=self.kwargs,
            traceback=None,
            einfo=info,
        )
        self.send_event("task-failed", exception=repr(exc), traceback=info.traceback)

    def _dlq_while_ending(
        self, failure: Failure | None, handle: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let Celery handle an end; its acknowledgement or rejection is the moment of death."""
        if failure is None or self.dlq_state in OVER:
            return handle(*args, **kwargs)
        self.dlq_move(_S.ENDING)
        self._dlq_failure = failure
        handling = HANDLING.set(self.dlq_in_flight is not None)
        try:
            result = handle(*args, **kwargs)
            if self.acknowledged and self.dlq_state is _S.ENDING:
                # Early: only the letter is missing.
                self._dlq_ended(super().acknowledge, super().acknowledge)
        except BaseException:
            # E.g. a MemoryError, which stops the worker, or a result that cannot be stored.
            if self.acknowledged and self.dlq_state is _S.ENDING:
                acknowledge = super().acknowledge
                self.dlq_guard.quietly("end", self._dlq_ended, acknowledge, acknowledge)
            elif self.dlq_state not in OVER:
                self.dlq_guard.quietly("end", self.dlq_guard.crashed, self, failure)
            raise
        else:
            return result
        finally:
            HANDLING.reset(handling)
            self._dlq_failure = None
            if self.dlq_state is _S.ENDING:  # it was not an end
                self.dlq_move(_S.RUNNING)

    def _dlq_ended(
        self, settle: Callable[[], Any], leave: Callable[[], Any], *, requeued: bool = False
    ) -> bool:
        """Handle the end that Celery reported, once; True if the message died of it."""
        failure, self._dlq_failure = self._dlq_failure, None
        if failure is None:
            return True  # another thread is storing the letter right now
        if self._dlq_has_another_owner():
            # Whoever has the message now has completed it, or says how it ends.
            logger.warning(
                "Task %s ended here after its message went to another worker: this end makes no "
                "letter and does not count",
                self.id,
            )
            self.dlq_move(_S.DONE)
            return False
        if (
            requeued
            and failure.end
            and failure.end.outcome is Outcome.WORKER_LOST
            and (is_stopping() or ended_by_shutdown(failure.end.text))
        ):
            # Celery before 5.5 ends the pool first and sees its children as lost.
            self.dlq_guard.quietly("end", self.dlq_guard.interrupted, self)
            self.dlq_move(_S.RELEASED)
            return False
        decide = partial(self.dlq_guard.end, self, failure, requeued=requeued)
        return self._dlq_end(decide, settle, leave)

    def _dlq_has_another_owner(self) -> bool:
        leased = leases_of(self.message) is not None and not self.acknowledged
        return leased and not is_held(self.message)

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        """Celery revokes a task and acknowledges its message; expiry is a death.

        So is a revocation, of what an operator redrove or released.
        """
        if terminated and self._dlq_end_terminated():
            return
        announce = partial(super()._announce_revoked, reason, terminated, signum, expired)
        if self.dlq_state is _S.WAITING_FOR_STORE:
            return  # dead already
        if self.dlq_state is _S.RELEASED and sent_by_us(self):
            return  # it comes back, and is revoked then
        if self.dlq_state not in DECIDED:
            decide = partial(self.dlq_guard.revoked, self)
            if expired:
                decide = partial(self.dlq_guard.expired, self)
            elif terminated:
                decide = partial(decide, terminated=True)
                self._already_revoked = True  # what the pool reports is no other end
                if self.dlq_state is _S.RUNNING:
                    self.dlq_move(_S.ENDING)
            if self._dlq_end(decide, announce, announce):
                return
        announce()

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """An operator ends a running task; a greenlet ends in here, as in `cancel`."""
        before, self._dlq_cancelled = self._dlq_cancelled, self.time_start is not None
        try:
            return super().terminate(pool, signal)
        except NotImplementedError:  # threads cannot be ended
            self._dlq_cancelled = before
            raise

    def cancel(self, *args: Any, **kwargs: Any) -> Any:
        """A lost connection or a shutdown ends a running task; a greenlet ends in here.

        Where the pool cannot, it goes on: in the solo pool, the error would be raised in its midst.
        """
        self._dlq_cancelled = True
        try:
            return super().cancel(*args, **kwargs)
        except NotImplementedError:
            self._dlq_cancelled = False
            logger.warning("Task %s runs to its end: its pool cannot cancel it", self.id)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
        """A cold or soft shutdown, or a lost connection, cancels a running task.

        The broker has its message still, unless that was acknowledged early: then it dies, and its
        result ends. Celery stores a retry that nobody makes.
        """
        announce = super()._announce_cancelled
        if self.dlq_in_flight is None or self.dlq_state in OVER:
            return announce(*args, **kwargs)
        if not self.acknowledged:
            self.dlq_guard.quietly("end", self.dlq_guard.interrupted, self)
            self.dlq_move(_S.RELEASED)
            return announce(*args, **kwargs)
        exc = WorkerLostError("ended by a shutdown; acknowledged before it ran")
        end = End(outcome=Outcome.WORKER_LOST, text=str(exc))
        failure = replace(dropped_failure(exc, ""), end=end)
        announced = self._dlq_while_ending(failure, announce, *args, **kwargs)
        if self.dlq_state in DEAD:
            self.dlq_guard.quietly("end", self._dlq_fail, exc)
        return announced

    # Celery 5.7 acknowledges in these two although the task did not die.

    def _retry_worker_lost(self, *args: Any) -> Any:
        if self.dlq_state is not _S.ENDING:
            return super()._retry_worker_lost(*args)
        self.dlq_move(_S.RUNNING)  # not a death, if the retry can be published
        failure = self._dlq_failure
        retried = super()._retry_worker_lost(*args)
        if retried:
            self.dlq_guard.quietly("end", self.dlq_guard.retried, self, failure)
        self.dlq_move(_S.DONE if retried else _S.ENDING)
        return retried

    def _success_was_stored(self) -> Any:
        meta = super()._success_was_stored()
        if meta and self.dlq_guard.quietly("end", self.dlq_guard.owns_result, self, meta) is False:
            return False  # else Celery would acknowledge a message that did not succeed
        if meta and self.dlq_state not in DECIDED:
            self.dlq_guard.succeeded(self)
            self.dlq_move(_S.DONE)
        return meta


def guarded_request_class(task: Any, guard: Guard, *, starts_here: bool = False) -> type:
    """Make the Request class for a task: its own, with the mix-in in front."""
    base = symbol_by_name(task.Request)
    if issubclass(base, DeadLetterRequest):
        base = base.__mro__[base.__mro__.index(DeadLetterRequest) + 1]
    names = {
        "dlq_guard": guard,
        "dlq_counted": guard.may_guard(task),
        "dlq_starts_here": starts_here,
    }
    return type(base.__name__, (DeadLetterRequest, base), names)


_RESULTS: dict[Reason, type[Exception]] = {
    Reason.MAX_RETRIES_EXCEEDED: MaxRetriesExceededError,
    Reason.OPERATOR: TaskRevokedError,
}


def refusal_error(task: str, verdict: Die, dead_letter_queue: str) -> Exception:
    """Make the result of a message that a limit or an operator keeps from running."""
    kind = _RESULTS.get(verdict.reason, MaxDeliveriesExceeded)
    where = f"is in {dead_letter_queue}" if verdict.kept else "ended"
    return kind(f"{task} {where}: {verdict.description}")


def _asking(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``execute_using_pool``: the guard decides right before the pool gets the task."""

    @wraps(execute)
    def execute_using_pool(self: Any, pool: Any, **kwargs: Any) -> Any:
        return self.dlq_execute(partial(execute, self, pool, **kwargs), pool)

    return execute_using_pool


class NotStartedError(BaseException):
    """Leaves a pool's thread before the task starts; only this module catches it."""


def _silent_exit() -> type[BaseException]:
    """Choose the exception that ends a thread or a greenlet without a traceback."""
    greenlet = sys.modules.get("greenlet")
    silent = () if greenlet is None else (greenlet.GreenletExit,)
    return type("NotStartedError", (NotStartedError, *silent), {})


def _forgetting(on_success: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``on_success``: forget the counts of a message whose task succeeded.

    A greenlet that a cancellation kills reports a success, of its own form: that is none. Nor is
    what pools of this process report of a task that was left by what is no ``Exception``.

    Source: ``_make_killable_target`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/gevent.py and ``apply_target`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/base.py
    """

    @wraps(on_success)
    def wrapper(self: Any, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        if isinstance(failed__retval__runtime, ExceptionInfo):
            lost = unwrapped(failed__retval__runtime.exception)
            return self._dlq_left(lost.__context__ or lost)
        failed = failed__retval__runtime[0]
        if self._dlq_cancelled and self.dlq_starts_here and failed is False:
            return None
        ours = not failed and self.dlq_in_flight is not None and self.dlq_state not in DECIDED
        if ours:
            self.dlq_move(_S.DONE)  # first: a success is acknowledged also after a shutdown
        result = on_success(self, failed__retval__runtime, **kwargs)
        if ours:
            self.dlq_guard.returned(self)
        return result

    return wrapper
