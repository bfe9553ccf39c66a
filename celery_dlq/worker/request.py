"""Celery's hooks in a guarded request: what each does, in the two kinds of pools.

A pool of *child processes* (prefork, and any pool that is not known) runs a task elsewhere: this
process counts the start, then gives the pool the task, and hears of it by callbacks. A pool *in
this process* (solo, threads, gevent, eventlet) calls back where the task runs, right before it
does: there the start is counted, and an exception keeps the task from starting.

| Celery calls | when | child processes | in this process |
|---|---|---|---|
| `execute_using_pool` | the pool is to get the task | count the start, give the task | give it |
| `on_accepted` | the task starts | it runs | count the start, or leave the thread |
| `on_success` | it returned | forget its counts | not if its greenlet was killed |
| `on_failure` | it failed, its process was lost | decide; first the letter | the same |
| `on_timeout` | its time limit is over | decide; first the letter | not a limit of its own |
| `acknowledge`, `reject` | Celery settles the message | first the letter | the same |
| `revoked`, `_announce_revoked` | it is revoked or expired | first the letter | the same |
| `terminate` | an operator ends the task | as Celery | note a killed greenlet |
| `cancel` | a shutdown, a lost connection | as Celery | note a killed greenlet |
| `_announce_cancelled` | it was cancelled | not charged | the same |
| `_retry_worker_lost` | its process was lost (5.7) | no death, if retried | the same |
| `_success_was_stored` | its process was lost (5.7) | no death, if it is its own | the same |

What no hook of Celery's tells: that a pool lost the task (`dlq_end_is_missing`), that an operator
ends one that waits or runs (`dlq_end_waiting`, `dlq_terminate`), that the store is back
(`dlq_wait_is_over`). How a message is settled is in `celery_dlq.worker.settling`.

Celery makes one Request class per task (``create_request_cls``) on top of ``Task.Request`` and
overrides ``execute_using_pool`` and ``on_success`` there without calling ``super()``. So a base
class cannot override these two; it can wrap what the subclass defines, from ``__init_subclass__``.

Source: https://github.com/celery/celery/blob/main/celery/worker/request.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from weakref import ref

from billiard.einfo import ExceptionInfo
from billiard.pool import ApplyResult
from celery.exceptions import InvalidTaskError, Reject, TaskRevokedError, WorkerLostError
from celery.states import READY_STATES
from celery.utils.imports import symbol_by_name

from celery_dlq.letters.headers import REDRIVEN_AT_HEADER
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Outcome, Reason
from celery_dlq.policies.decisions import Die, End, LateCopy, PutOff, Run, Verdict
from celery_dlq.worker.dispatched import ENDED, is_closed, starts_here
from celery_dlq.worker.guard import Guard, sent_by_us
from celery_dlq.worker.settling import SettlingRequest
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
    OVER,
    DeliveryState,
    leases_of,
)

logger = get_logger("celery_dlq.worker")

_S = DeliveryState


class DeadLetterRequest(SettlingRequest):
    """Mixed in front of a task's own ``Request`` class; what pools of both kinds have in common."""

    dlq_starts_here: bool  # True if the pool runs the task in this process
    dlq_counted = False  # True if a policy may guard the task
    dlq_waits_since = 0.0  # Time it was first put off, in monotonic seconds
    dlq_job: Any = None  # What the pool made of it; see `asked_for_tasks`

    _dlq_is_announced = False  # as revoked or terminated
    _dlq_is_cancelled = False  # by Celery, for a shutdown or a lost connection
    _dlq_failure: Failure | None = None  # the end that Celery reported, while ENDING

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if "execute_using_pool" in own:
            cls.execute_using_pool = _through("dlq_execute", own["execute_using_pool"])
        if "on_success" in own:
            cls.on_success = _through("dlq_on_success", own["on_success"])

    # -- the start --------------------------------------------------------------------

    def dlq_execute(self, execute: Callable[..., Any], pool: Any, **kwargs: Any) -> Any:
        """Give the pool the task, if it may start; else skip it and release its slot."""
        self.message.dlq_is_dispatched = True
        if (
            nothing_starts()  # Celery would end it at once
            or ((self.dlq_counted or self.dlq_guard.is_watching) and self._dlq_is_revoked())
        ):
            raise TaskRevokedError(self.id)
        execute = partial(execute, self, pool, **kwargs)
        if self.dlq_counted and is_closed(pool):
            return execute()  # the pool drops it, so it is not counted
        if not self._dlq_may_be_given():
            raise TaskRevokedError(self.id)
        try:
            return self._dlq_give(execute, pool)
        except TaskRevokedError:
            raise
        except Exception as exc:
            if self.time_start is not None or not self._dlq_pool_refused(pool, exc):
                raise
            raise TaskRevokedError(self.id) from exc

    def _dlq_may_be_given(self) -> bool:
        """False if the task does not start now."""
        raise NotImplementedError

    def _dlq_give(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Give the pool the task, and note what the pool knows it by."""
        raise NotImplementedError

    def _dlq_is_revoked(self) -> bool:
        """Check for revocation, as Celery will again; dead-letter unreadable headers."""
        try:
            if [*self.time_limits] != [None, None]:
                self._dlq_check_time_limits()
            return self.revoked()
        except Exception as exc:
            # Not NEW: Celery has revoked it, and the result backend, say, did not take that.
            if self.dlq_state is not _S.NEW or not self._dlq_refuse(exc):
                raise
            return True

    def _dlq_check_time_limits(self) -> None:
        """Raise an error if Celery or the pool cannot read them."""
        _hard, _soft = self.time_limits

    def revoked(self) -> bool:
        """Check for expiry and revocation; what was redriven after its revocation is not revoked.

        Celery's check makes the end of a revoked message known, and acknowledges it.
        """
        if REDRIVEN_AT_HEADER in self.request_dict and not self._dlq_is_announced:
            expired = self.expires and self.maybe_expire()
            if not expired and self.dlq_guard.revocations.are_older(self):
                return False
        return bool(super().revoked())

    def _dlq_count_start(self) -> bool:
        """Count the start, if a policy guards the message; return True if it may happen."""
        if not self._dlq_is_ours() or not self._dlq_take_to_work():
            return False
        verdict = self.dlq_guard.verdict_before_start(self)
        if verdict is not None and not self._dlq_carry_out(verdict):
            return False
        if not self.dlq_counted:
            return True
        try:
            verdict = self.dlq_guard.count_start(self)
        except Exception:
            self.dlq_guard.count_internal_error("start")
            logger.exception("Task %s is not guarded this time, it runs", self.id)
        if not (verdict is None or self._dlq_carry_out(verdict)):
            return False
        waited = self.dlq_in_flight is not None and not self.dlq_in_flight.first
        if waited and not self._dlq_is_ours():
            self.dlq_guard.uncount(self)
            return False
        return True

    def _dlq_carry_out(self, verdict: Verdict | None) -> bool:
        """Do what is decided about a message that is about to start; True if it starts."""
        if verdict is None or isinstance(verdict, Run):
            return True
        if isinstance(verdict, PutOff):
            if self.dlq_put_off():
                self.dlq_waits_since = self.dlq_waits_since or time.monotonic()
                (verdict.keep or self.dlq_guard.later.append)(self)
            return False
        self._dlq_forget_job()
        if isinstance(verdict, Die):
            self._dlq_dead_letter(verdict)
            return False
        self.dlq_move(_S.DONE)
        error = self._dlq_end_of_late_copy(verdict) if isinstance(verdict, LateCopy) else None
        self._dlq_settle(error)
        return False

    def _dlq_forget_job(self) -> None:
        """Note that the pool does not get the task, or has ended it."""

    def _dlq_end_of_late_copy(self, late: LateCopy) -> Exception | None:
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
        return self._dlq_refusal(Die(Reason.MAX_DELIVERIES_EXCEEDED, "dead-lettered before"))

    def on_accepted(self, pid: Any, time_accepted: Any) -> Any:
        """The task starts."""
        if self.dlq_state is not _S.RUNNING:
            self.dlq_move(_S.RUNNING)
        return super().on_accepted(pid, time_accepted)

    # -- the end ------------------------------------------------------------------------

    def dlq_on_success(
        self, on_success: Callable[..., Any], failed__retval__runtime: Any, **kwargs: Any
    ) -> Any:
        """Forget the counts of a message whose task succeeded.

        What ``apply_target`` of Celery's pools reports of a task that was left by what is no
        ``Exception`` is no success.

        Source: https://github.com/celery/celery/blob/main/celery/concurrency/base.py
        """
        if isinstance(failed__retval__runtime, ExceptionInfo):
            lost = unwrapped(failed__retval__runtime.exception)
            return self._dlq_end_left_by(lost.__context__ or lost)
        succeeded = not failed__retval__runtime[0]
        ours = succeeded and self.dlq_in_flight is not None and self.dlq_state not in DECIDED
        if ours:
            self.dlq_move(_S.DONE)  # first: a success is acknowledged also after a shutdown
        result = on_success(self, failed__retval__runtime, **kwargs)
        if ours:
            self.dlq_guard.record_returned(self)
        return result

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """The pool reported an exception, a lost child or a hard time limit."""
        if self._dlq_is_announced and self.dlq_state in DEAD:
            return None  # terminated by an operator, and its letter is made
        failure = self._dlq_describe(exc_info) or UNDESCRIBED
        return self._dlq_while_ending(failure, super().on_failure, exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001 - Celery's signature
        """A soft or hard time limit was exceeded; only the hard one ends the delivery."""
        failure = None if soft else time_limit_failure(timeout)
        return self._dlq_while_ending(failure, super().on_timeout, soft, timeout)

    def _dlq_end_left_by(self, exc: BaseException) -> Any:
        """In this process, a task left by what is no ``Exception``; a prefork pool reports it so.

        What ends a process there is a crash.
        """
        info = lost = ExceptionInfo((type(exc), exc, exc.__traceback__))
        failure = self._dlq_describe(info)
        if isinstance(exc, (SystemExit, KeyboardInterrupt)):
            error = WorkerLostError(repr(exc))
            lost = ExceptionInfo((WorkerLostError, error, exc.__traceback__))
        return self._dlq_while_ending(failure, super().on_failure, lost)

    def _dlq_describe(self, exc_info: Any) -> Failure | None:
        throws = tuple(self.task.throws or ())
        failure: Failure | None = self.dlq_guard.run_guarded("end", failure_of, exc_info, throws)
        return failure

    def acknowledge(self) -> None:
        """Acknowledge; if the message died, only after its letter is stored."""
        if self.dlq_state is _S.ENDING:
            if not self._dlq_decide_end(super().acknowledge, super().acknowledge):
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
            if not self._dlq_decide_end(settle, leave, requeued=requeue):
                leave()
        elif self.dlq_state not in HELD:
            seen = self.time_start is not None or hasattr(self.message, "dlq_is_dispatched")
            # If not seen, Celery drops it before its start, e.g. for an eta out of range.
            exc = InvalidTaskError("cannot be scheduled")
            if seen or requeue or not self._dlq_refuse(exc, leave):
                leave()

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
                self._dlq_decide_end(super().acknowledge, super().acknowledge)
        except BaseException:
            # E.g. a MemoryError, which stops the worker, or a result that cannot be stored.
            if self.acknowledged and self.dlq_state is _S.ENDING:
                acknowledge = super().acknowledge
                self.dlq_guard.run_guarded("end", self._dlq_decide_end, acknowledge, acknowledge)
            elif self.dlq_state not in OVER:
                self.dlq_guard.run_guarded("end", self.dlq_guard.record_crash, self, failure)
            raise
        else:
            return result
        finally:
            HANDLING.reset(handling)
            self._dlq_failure = None
            if self.dlq_state is _S.ENDING:  # it was not an end
                self.dlq_move(_S.RUNNING)

    def _dlq_decide_end(
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
            self.dlq_guard.run_guarded("end", self.dlq_guard.record_interrupted, self)
            self.dlq_move(_S.RELEASED)
            return False
        decide = partial(self.dlq_guard.decide_end, self, failure, requeued=requeued)
        return self._dlq_store_then_settle(decide, settle, leave)

    # Celery 5.7 acknowledges in these two although the task did not die.

    def _retry_worker_lost(self, *args: Any) -> Any:
        if self.dlq_state is not _S.ENDING:
            return super()._retry_worker_lost(*args)
        self.dlq_move(_S.RUNNING)  # not a death, if the retry can be published
        failure = self._dlq_failure
        retried = super()._retry_worker_lost(*args)
        if retried:
            self.dlq_guard.run_guarded("end", self.dlq_guard.record_retry, self, failure)
        self.dlq_move(_S.DONE if retried else _S.ENDING)
        return retried

    def _success_was_stored(self) -> Any:
        meta = super()._success_was_stored()
        if (
            meta
            and self.dlq_guard.run_guarded("end", self.dlq_guard.owns_result, self, meta) is False
        ):
            return False  # else Celery would acknowledge a message that did not succeed
        if meta and self.dlq_state not in DECIDED:
            self.dlq_guard.record_success(self)
            self.dlq_move(_S.DONE)
        return meta

    def dlq_end_is_missing(self) -> None:
        """Give the message back: its pool has its task no more, and did not say how it ended.

        At once if its starts are limited, or Celery cancelled it; else when its lease ends, or it
        would run on and on. If the result backend did not take the result, the task is healthy:
        it is not charged where a lease keeps it from running on and on.
        """
        in_flight, leases = self.dlq_in_flight, leases_of(self.message)
        policy = None if in_flight is None else in_flight.resolved.policy
        error = self._dlq_error_of_thread()
        healthy = (
            leases is not None
            and result_not_stored(error, "mark_as_done")  # else the task failed, or was retried
            and self.task.backend.exception_safe_to_retry(error)  # else it may never be stored
        )
        limited = self._dlq_is_cancelled or (
            policy is not None and policy.max_deliveries is not None and not healthy
        )
        if not limited and leases is None:
            return  # as with Celery alone, the broker keeps it until the connection ends
        if self.dlq_state in (_S.NEW, _S.DISPATCHED, _S.RUNNING) and not self._dlq_is_cancelled:
            failure = missing_end_failure(error)
            if healthy:
                self.dlq_guard.run_guarded("end", self.dlq_guard.uncount, self)
            else:
                self.dlq_guard.run_guarded("end", self.dlq_guard.end_is_missing, self, failure)
            logger.error(
                "Celery did not report how task %s ended, and its pool does not run it any more "
                "(%s): its message is delivered again%s",
                self.id,
                failure.exception_message,
                "" if limited else " when its lease ends",
            )
            self.dlq_move(_S.DONE)
        self._dlq_give_back_or_lapse(at_once=limited)

    def _dlq_error_of_thread(self) -> BaseException | None:
        """The error that ended a task's thread, past Celery's callbacks."""
        return None

    # -- revoked, cancelled or terminated -------------------------------------------------

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        """Celery revokes a task and acknowledges its message; expiry is a death.

        So is a revocation, of what an operator redrove or released.
        """
        self._dlq_is_announced = True  # what the pool reports is no other end
        if terminated and self._dlq_end_terminated():
            return
        announce = partial(super()._announce_revoked, reason, terminated, signum, expired)
        if self.dlq_state is _S.WAITING_FOR_STORE:
            return  # dead already
        if self.dlq_state is _S.RELEASED and sent_by_us(self):
            return  # it comes back, and is revoked then
        if self.dlq_state not in DECIDED:
            decide = partial(self.dlq_guard.decide_revoked, self)
            if expired:
                decide = partial(self.dlq_guard.decide_expired, self)
            elif terminated:
                decide = partial(decide, terminated=True)
                if self.dlq_state is _S.RUNNING:
                    self.dlq_move(_S.ENDING)
            if self._dlq_store_then_settle(decide, announce, announce):
                return
        announce()

    def cancel(self, *args: Any, **kwargs: Any) -> Any:
        """A lost connection or a shutdown ends a running task.

        Where the pool cannot, it goes on: in the solo pool, the error would be raised in its midst.
        """
        try:
            return super().cancel(*args, **kwargs)
        except NotImplementedError:
            logger.warning("Task %s runs to its end: its pool cannot cancel it", self.id)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
        """A cold or soft shutdown, or a lost connection, cancels a running task.

        The broker has its message still, unless that was acknowledged early: then it dies, and its
        result ends. Celery stores a retry that nobody makes.
        """
        self._dlq_is_cancelled = True
        announce = super()._announce_cancelled
        if self.dlq_in_flight is None or self.dlq_state in OVER:
            return announce(*args, **kwargs)
        if not self.acknowledged:
            self.dlq_guard.run_guarded("end", self.dlq_guard.record_interrupted, self)
            self.dlq_move(_S.RELEASED)
            return announce(*args, **kwargs)
        exc = WorkerLostError("ended by a shutdown; acknowledged before it ran")
        end = End(outcome=Outcome.WORKER_LOST, text=str(exc))
        failure = replace(dropped_failure(exc, ""), end=end)
        announced = self._dlq_while_ending(failure, announce, *args, **kwargs)
        if self.dlq_state in DEAD:
            self.dlq_guard.run_guarded("end", self._dlq_mark_as_failed, exc)
        return announced

    def dlq_end_waiting(self, verdict: Die) -> bool:
        """Dead-letter a message that waits for its ETA; True if that was done."""
        if self.dlq_state is not _S.NEW or not self._dlq_is_ours():
            return False
        self._dlq_forget_job()
        self._dlq_dead_letter(verdict)
        return True

    def dlq_terminate(self, pool: Any) -> None:
        """Terminate a task that the pool has; the start of another one will be refused."""
        raise NotImplementedError

    def _dlq_end_terminated(self) -> bool:
        """Dead-letter a task that was terminated because an operator wants it dead-lettered."""
        verdict = None if self.dlq_state in OVER else self.dlq_guard.death_at_end(self)
        if verdict is None:
            return False
        end = End(outcome=Outcome.WORKER_LOST, text=verdict.description)
        self.dlq_move(_S.ENDING)
        self._dlq_forget_job()
        failure = Failure(end, None, f"terminated; {verdict.description}", None)
        self._dlq_dead_letter(verdict, failure)
        return True


class ChildProcessRequest(DeadLetterRequest):
    """For pools that start tasks in processes of their own."""

    dlq_starts_here = False

    def _dlq_may_be_given(self) -> bool:
        """Count the start: the pool's processes cannot."""
        if not self._dlq_count_start():
            return False
        if self.dlq_counted:
            self.dlq_move(_S.DISPATCHED)
        if nothing_starts():  # a signal came while it was counted
            self.dlq_guard.uncount_never_started([self])
            return False
        return True

    def _dlq_give(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Give the pool the task, and note its job; it never started if the pool dropped it."""
        self.dlq_job = None
        try:
            job = execute()
        except BaseException:
            self.dlq_put_off()
            raise
        if isinstance(job, ApplyResult):
            self.dlq_job = ref(job)
        elif job is None and is_closed(pool):
            self.dlq_guard.uncount_never_started([self])
        return job

    def _dlq_check_time_limits(self) -> None:
        """The pool would fail on one that is not a number."""
        super()._dlq_check_time_limits()
        [float(limit) for limit in self.time_limits if limit]

    def _dlq_forget_job(self) -> None:
        self.dlq_job = ENDED  # in this process, the task's thread notes its own end

    def dlq_terminate(self, pool: Any) -> None:
        """Terminate a running task, or one that the pool was given."""
        given = self.time_start is not None or self.dlq_job not in (None, ENDED)
        if given and self.dlq_state not in OVER:
            logger.warning("Terminating task %s: an operator wants it dead-lettered", self.id)
            super().terminate(pool)


def kind_of_request(pool_class: Any) -> type[DeadLetterRequest]:
    """Choose the mix-in by the kind of a worker's pool."""
    if not starts_here(pool_class):
        return ChildProcessRequest
    from celery_dlq.worker.in_process import InProcessRequest  # noqa: PLC0415 - not in prefork pools

    return InProcessRequest


def guarded_request_class(
    task: Any, guard: Guard, kind: type[DeadLetterRequest] = ChildProcessRequest
) -> type:
    """Make the Request class for a task: its own, with the mix-in in front."""
    base = symbol_by_name(task.Request)
    if issubclass(base, SettlingRequest):
        base = base.__mro__[base.__mro__.index(SettlingRequest) + 1]
    names = {"dlq_guard": guard, "dlq_counted": guard.may_guard(task)}
    return type(base.__name__, (kind, base), names)


def _through(ours: str, celerys: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that Celery's subclass defines: ours decides when it is called."""

    @wraps(celerys)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, ours)(celerys, *args, **kwargs)

    return hook
