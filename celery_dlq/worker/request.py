"""The Request mix-in: where the guard takes part in Celery's handling of a message.

Celery makes one Request class per task (``create_request_cls``) on top of
``Task.Request`` and overrides ``execute_using_pool`` and ``on_success`` there
without calling ``super()``. So a base class cannot override these two; it can
wrap what the subclass defines, from ``__init_subclass__``.

Source: https://github.com/celery/celery/blob/main/celery/worker/request.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import InvalidTaskError, MaxRetriesExceededError, TaskRevokedError
from celery.states import READY_STATES
from celery.utils.imports import symbol_by_name
from celery.worker import state
from celery.worker.state import task_ready

from celery_dlq.errors import MaxDeliveriesExceeded
from celery_dlq.logs import get_logger
from celery_dlq.policies.decisions import Die, End
from celery_dlq.record import Outcome, Reason
from celery_dlq.worker.dispatched import drop_failed, is_closed
from celery_dlq.worker.failure import (
    Failure,
    dropped_failure,
    failure_of,
    time_limit_failure,
)
from celery_dlq.worker.guard import HANDLING, Begin, Ending, Guard, InFlight

logger = get_logger("celery_dlq.worker")


class DeadLetterRequest:
    """Mixed in front of a task's own ``Request`` class.

    Attributes:
        dlq_guard: The worker's guard.
        dlq_later: Gives a request to the pool again in a moment.
        dlq_counted: Whether starts are counted: some policy could guard the task.
        dlq_in_flight: The guarded message, from its start on.
        dlq_starts_here: The pool says right before the task, where it runs, that it starts.
    """

    dlq_guard: Guard
    dlq_later: Callable[[Any], None]
    dlq_counted = False
    dlq_in_flight: InFlight | None = None
    dlq_starts_here = False

    _dlq_failure: Failure | None = None  # set while Celery handles an end
    _dlq_ended = False  # this delivery's end was dealt with
    _dlq_waits = False  # its letter is not stored yet: do not acknowledge
    _dlq_given_up = False  # a shutdown gave it up: only success may acknowledge it

    # What Celery's Request provides.
    id: Any
    name: str
    task: Any
    message: Any
    request_dict: Any
    acknowledged: bool
    worker_pid: int | None
    time_start: float | None
    time_limits: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.dlq_counted:
            return
        own = cls.__dict__
        if "execute_using_pool" in own:
            cls.execute_using_pool = _counted(own["execute_using_pool"])  # type: ignore[attr-defined]
        if "on_success" in own:
            cls.on_success = _forgetting(own["on_success"])  # type: ignore[attr-defined]

    def on_accepted(self, pid: Any, time_accepted: Any) -> Any:
        """A pool process begins with it; in a pool of this process the task is next."""
        if self.dlq_starts_here and self.dlq_counted and self.time_start is None:
            self._dlq_begin_here()
        self.dlq_guard.accepted(self)
        return super().on_accepted(pid, time_accepted)  # type: ignore[misc]

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """The pool reported an exception, a lost child or a hard time limit."""
        failure = _guarded(failure_of, exc_info, tuple(self.task.throws or ()))
        return self._dlq_while_ending(failure, super().on_failure, exc_info, *args, **kwargs)  # type: ignore[misc]

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001 - Celery's signature
        """A soft or hard time limit was exceeded; only the hard one ends the delivery."""
        failure = None if soft else time_limit_failure(timeout)
        return self._dlq_while_ending(failure, super().on_timeout, soft, timeout)  # type: ignore[misc]

    def acknowledge(self) -> None:
        """Acknowledge, but never before the letter of a death is stored."""
        if self._dlq_failure is None and not self._dlq_waits:
            return super().acknowledge()  # type: ignore[misc,no-any-return]
        if self._dlq_end() is not Ending.WAITS:
            super().acknowledge()  # type: ignore[misc]
        return None

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - Celery's signature
        """Reject; a death is acknowledged instead, once its letter is stored.

        A rejection would copy the message to a dead-letter exchange of the broker's
        own, and on SQS it would not even remove it.
        """
        if self._dlq_failure is None and not self._dlq_waits:
            # Celery drops it before its start: an eta that no clock can show, say.
            unseen = self.time_start is None and not hasattr(self.message, "dlq_is_dispatched")
            if unseen and not requeue and self.dlq_refuse(InvalidTaskError("cannot be scheduled")):
                return None
            return super().reject(requeue)  # type: ignore[misc,no-any-return]
        ending = self._dlq_end(requeued=requeue)
        if ending is Ending.STORED:
            super().acknowledge()  # type: ignore[misc]
        elif ending is Ending.LEFT:
            super().reject(requeue)  # type: ignore[misc]
        return None

    def dlq_settle(self, verdict: Die, dead_letter_queue: str) -> None:
        """End the task of a message that was dead-lettered without being executed.

        The result becomes a failure, so that nobody waits for it for ever; errbacks
        run and a chord or chain fails as Celery fails it.
        """
        spent = verdict.reason is Reason.MAX_RETRIES_EXCEEDED
        kind = MaxRetriesExceededError if spent else MaxDeliveriesExceeded
        where = f"is in {dead_letter_queue}" if verdict.kept else "ended"
        exc = kind(f"{self.name}[{self.id}] {where}: {verdict.description}")
        task_ready(self)
        try:
            self._dlq_fail(exc)
        except Exception:
            logger.exception("Task %s was dead-lettered, but its result is not stored", self.id)
        finally:
            super().acknowledge()  # type: ignore[misc]

    @property
    def dlq_is_over(self) -> bool:
        """Whether this delivery's end was dealt with."""
        return self._dlq_ended

    def dlq_settle_copy(self, dead_letter_queue: str) -> None:
        """Acknowledge a late copy of a message whose letter is stored.

        Its worker may have died between storing the letter and ending the task; then that
        is made up for.
        """
        verdict = Die(Reason.MAX_DELIVERIES_EXCEEDED, "dead-lettered before")
        if self._dlq_has_a_result():
            task_ready(self)
            super().acknowledge()  # type: ignore[misc]
        else:
            self.dlq_settle(verdict, dead_letter_queue)

    def _dlq_has_a_result(self) -> bool:
        try:
            return self.task.backend.get_state(self.id) in READY_STATES
        except Exception:  # noqa: BLE001 - no backend, or none that answers
            return True

    def dlq_execute(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Count the start, and give the task to the pool; else skip it and release its slot."""
        self.message.dlq_is_dispatched = True
        if self._dlq_is_revoked():
            raise TaskRevokedError(self.id)
        if is_closed(pool):
            return execute()  # it is dropped there, and not counted
        if not self.dlq_starts_here and self.dlq_begin() is not Begin.RUN:
            raise TaskRevokedError(self.id)
        try:
            job = execute()
        except NotStartedError as exc:
            raise TaskRevokedError(self.id) from exc
        except TaskRevokedError:
            raise
        except Exception as exc:
            if self.time_start is not None or not self.dlq_not_started(pool, exc):
                raise
            raise TaskRevokedError(self.id) from exc
        if not self.dlq_starts_here and self.dlq_in_flight is not None:
            self.dlq_guard.dispatched(self, job, dropped=job is None and is_closed(pool))
        return job

    def _dlq_is_revoked(self) -> bool:
        """As Celery will ask once more; and whether its headers can be looked at, at all."""
        try:
            limits = self.time_limits
            if not self.dlq_starts_here:  # the pool would fail at one that is no number
                [float(limit) for limit in limits if limit]
            _hard, _soft = limits
            return bool(super().revoked())  # type: ignore[misc]
        except Exception as exc:
            if not self.dlq_refuse(exc):
                raise
            return True

    def dlq_begin(self) -> Begin:
        """Count the start, and whether it may happen."""
        try:
            begin = self.dlq_guard.begin(self)
        except Exception:
            self.dlq_guard.failed("start")
            logger.exception("Task %s is not guarded this time, it runs", self.id)
            return Begin.RUN
        if begin is Begin.LATER:
            self.dlq_later(self)
        return begin

    def _dlq_begin_here(self) -> None:
        """Count the start; not to start is to leave the pool's thread by an exception."""
        if self.dlq_begin() is not Begin.RUN:
            raise _left_without_a_word()(self.id)

    def dlq_refuse(self, exc: Exception) -> bool:
        """Dead-letter a message that Celery cannot even look at; it would end the worker.

        Returns:
            Whether that was done; else the error is Celery's.
        """
        failure = dropped_failure(exc, "not a Celery task message")

        def done() -> None:
            task_ready(self)
            super(DeadLetterRequest, self).acknowledge()  # type: ignore[misc]

        ending = self._dlq_wait_for(
            lambda: self.dlq_guard.dropped(
                self.message, self.request_dict, Reason.INVALID_MESSAGE, failure, done
            )
        )
        if ending is Ending.STORED:
            done()
        return ending is not Ending.LEFT

    def dlq_not_started(self, pool: Any, exc: Exception) -> bool:
        """The pool could not take it: a delivery that ended badly, and may be tried again.

        Returns:
            Whether it was dealt with; else the error is Celery's.
        """
        drop_failed(pool, self.id)
        in_flight = self.dlq_in_flight
        if in_flight is None or in_flight.resolved.policy is None:
            return False
        logger.error("Task %s cannot be given to the pool: %r", self.id, exc)
        text = f"could not be given to the pool: {exc}"
        end = End(outcome=Outcome.FAILED, exception_names=(type(exc).__name__,), text=text)
        failure = replace(dropped_failure(exc, text), end=end)
        again = in_flight.resolved.policy.max_deliveries is not None
        ending = self._dlq_wait_for(
            lambda: self.dlq_guard.end(self, failure, self._dlq_stored_late, requeued=again)
        )
        self._dlq_ended = True
        if ending is Ending.WAITS:
            return True
        task_ready(self)
        if ending is Ending.STORED:
            _guarded(self._dlq_fail, exc)
            super().acknowledge()  # type: ignore[misc]
        else:
            super().reject(requeue=again)  # type: ignore[misc]
        return True

    def _dlq_fail(self, exc: Exception) -> None:
        request: Any = self
        self.task.backend.mark_as_failure(
            self.id,
            exc,
            request=request._context,  # noqa: SLF001 - as Celery itself does
            store_result=request.store_errors,
        )
        try:
            raise exc
        except type(exc):
            info = ExceptionInfo()
        signals.task_failure.send(
            sender=self.task,
            task_id=self.id,
            exception=exc,
            args=request.args,
            kwargs=request.kwargs,
            traceback=None,
            einfo=info,
        )
        request.send_event("task-failed", exception=repr(exc), traceback=info.traceback)

    def _dlq_while_ending(
        self, failure: Failure | None, handle: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let Celery handle an end; its acknowledgement in there is the moment of death."""
        if self._dlq_given_up and failure is not None and not self.acknowledged:
            # It goes back to its queue; a time limit or a lost process that comes with the
            # shutdown must neither acknowledge nor reject it.
            self._dlq_waits = True
        if failure is None or self._dlq_ended:
            return handle(*args, **kwargs)
        self._dlq_failure = failure
        handling = HANDLING.set(self.dlq_in_flight is not None)
        try:
            result = handle(*args, **kwargs)
        except BaseException:
            if not self._dlq_ended:  # a MemoryError, say: it ends the worker
                _guarded(self.dlq_guard.crashed, self, failure)
            raise
        else:
            if self.acknowledged and not self._dlq_ended:
                self._dlq_end()  # acknowledged early: only the letter is left to do
            return result
        finally:
            HANDLING.reset(handling)
            self._dlq_failure = None

    def _dlq_end(self, *, requeued: bool = False) -> Ending:
        """Deal with the end, once; what may be done with the message now."""
        if self._dlq_waits:
            return Ending.WAITS
        failure, self._dlq_failure = self._dlq_failure, None
        if failure is None or self._dlq_ended:
            return Ending.LEFT
        self._dlq_ended = True
        if requeued and failure.end and failure.end.outcome is Outcome.WORKER_LOST and _stopping():
            # Celery before 5.5 ends the pool first and sees its children as lost.
            _guarded(self.dlq_guard.interrupted, self)
            return Ending.LEFT
        return self._dlq_wait_for(
            lambda: self.dlq_guard.end(self, failure, self._dlq_stored_late, requeued=requeued)
        )

    def _dlq_wait_for(self, act: Callable[[], Ending]) -> Ending:
        try:
            ending = act()
        except Exception:
            # An error of our own would come again: the message must not wait for us for ever.
            self.dlq_guard.failed("end")
            logger.critical("The end of task %s is left to Celery", self.id, exc_info=True)
            ending = Ending.LEFT
        self._dlq_waits = ending is Ending.WAITS
        return ending

    def _dlq_stored_late(self) -> None:
        self._dlq_waits = False
        super().acknowledge()  # type: ignore[misc]

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        """Celery revokes a task and acknowledges its message; an expired one is a death."""
        announce = super()._announce_revoked  # type: ignore[misc]
        if not expired:
            self.dlq_guard.succeeded(self)
            return announce(reason, terminated, signum, expired)  # type: ignore[no-any-return]
        if self._dlq_waits:
            return None

        def done() -> None:
            self._dlq_waits = False
            announce(reason, terminated, signum, expired)

        if self._dlq_wait_for(lambda: self.dlq_guard.expired(self, done)) is not Ending.WAITS:
            announce(reason, terminated, signum, expired)
        return None

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
        """A cold or soft shutdown, or a lost connection, gives a running task up."""
        if self.dlq_in_flight is not None:
            _guarded(self.dlq_guard.interrupted, self)
            self._dlq_ended = self._dlq_given_up = True
        return super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]

    # Celery 5.7 acknowledges in these two although the task did not die.

    def _retry_worker_lost(self, *args: Any) -> Any:
        failure, self._dlq_failure = self._dlq_failure, None
        retried = super()._retry_worker_lost(*args)  # type: ignore[misc]
        if not retried:
            self._dlq_failure = failure
        return retried

    def _success_was_stored(self) -> Any:
        meta = super()._success_was_stored()  # type: ignore[misc]
        if meta:
            self._dlq_failure = None
            self._dlq_ended = True
            self.dlq_guard.succeeded(self)
        return meta


def guarded_request_class(
    task: Any, guard: Guard, later: Callable[[Any], None], *, starts_here: bool = False
) -> type:
    """The Request class for a task: its own, with the mix-in in front.

    Args:
        task: A Celery task; its ``Request`` may be a class or a dotted name.
        guard: The worker's guard.
        later: Gives a request to the pool again in a moment.
        starts_here: Tasks run in this process; see `celery_dlq.worker.dispatched.starts_here`.
    """
    base = symbol_by_name(task.Request)
    if issubclass(base, DeadLetterRequest):
        base = base.__mro__[base.__mro__.index(DeadLetterRequest) + 1]
    names = {
        "dlq_guard": guard,
        "dlq_later": staticmethod(later),
        "dlq_counted": guard.may_guard(task),
        "dlq_starts_here": starts_here,
    }
    return type(base.__name__, (DeadLetterRequest, base), names)


def _stopping() -> bool:
    """Whether this worker is in a cold shutdown; the state is an exit code, which may be 0."""
    return state.should_terminate is not None and state.should_terminate is not False


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception:
        logger.exception("The dead-letter guard failed; the task is left to Celery")
        return None


def _counted(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Count the start right before the pool gets the task."""

    @wraps(execute)
    def execute_using_pool(self: Any, pool: Any, **kwargs: Any) -> Any:
        return self.dlq_execute(partial(execute, self, pool, **kwargs), pool)

    return execute_using_pool


class NotStartedError(BaseException):
    """Leaves a pool's thread before the task; nobody but us catches it."""


def _left_without_a_word() -> type[BaseException]:
    """The exception that ends a thread or a greenlet without a traceback."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return NotStartedError
    return _silent(greenlet.GreenletExit)


@cache
def _silent(greenlet_exit: type[BaseException]) -> type[BaseException]:
    return type("NotStartedError", (NotStartedError, greenlet_exit), {})


def _forgetting(on_success: Callable[..., Any]) -> Callable[..., Any]:
    """Forget the counters of a message whose task succeeded."""

    @wraps(on_success)
    def wrapper(self: Any, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        result = on_success(self, failed__retval__runtime, **kwargs)
        if not failed__retval__runtime[0] and self.dlq_in_flight is not None:
            self.dlq_guard.returned(self)
        return result

    return wrapper
