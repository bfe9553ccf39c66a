"""The Request mix-in: where the guard takes part in Celery's handling of a message.

Celery makes one Request class per task (``create_request_cls``) on top of
``Task.Request`` and overrides ``execute_using_pool`` and ``on_success`` there
without calling ``super()``. So a base class cannot override these two; it can
wrap what the subclass defines, from ``__init_subclass__``.

Source: https://github.com/celery/celery/blob/main/celery/worker/request.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import MaxRetriesExceededError, TaskRevokedError
from celery.states import READY_STATES
from celery.utils.imports import symbol_by_name
from celery.worker import state
from celery.worker.state import task_ready

from celery_dlq.errors import MaxDeliveriesExceeded
from celery_dlq.logs import get_logger
from celery_dlq.record import Outcome, Reason
from celery_dlq.verdict import Die
from celery_dlq.worker.failure import Failure, failure_of, time_limit_failure
from celery_dlq.worker.guard import HANDLING, Begin, Ending, Guard, Tracked

logger = get_logger("celery_dlq.worker")


class DeadLetterRequest:
    """Mixed in front of a task's own ``Request`` class.

    Attributes:
        dlq_guard: The worker's guard.
        dlq_later: Gives a request to the pool again in a moment.
        dlq_counted: Whether starts are counted: some policy could guard the task.
        dlq_tracked: The guarded message, from its start on.
    """

    dlq_guard: Guard
    dlq_later: Callable[[Any], None]
    dlq_counted = False
    dlq_tracked: Tracked | None = None

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.dlq_counted:
            return
        own = cls.__dict__
        if "execute_using_pool" in own:
            cls.execute_using_pool = _counted(own["execute_using_pool"])  # type: ignore[attr-defined]
        if "on_success" in own:
            cls.on_success = _forgetting(own["on_success"])  # type: ignore[attr-defined]

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
            return super().reject(requeue)  # type: ignore[misc,no-any-return]
        ending = self._dlq_end(requeued=requeue)
        if ending is Ending.BURIED:
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
        handling = HANDLING.set(self.dlq_tracked is not None)
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
            # A bug of ours must not lose the message: it stays unacknowledged.
            logger.exception("Task %s ended, but its letter could not be made", self.id)
            ending = Ending.WAITS
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
        if self.dlq_tracked is not None:
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


def guarded_request_class(task: Any, guard: Guard, later: Callable[[Any], None]) -> type:
    """The Request class for a task: its own, with the mix-in in front.

    Args:
        task: A Celery task; its ``Request`` may be a class or a dotted name.
        guard: The worker's guard.
        later: Gives a request to the pool again in a moment.
    """
    base = symbol_by_name(task.Request)
    if issubclass(base, DeadLetterRequest):
        base = base.__mro__[base.__mro__.index(DeadLetterRequest) + 1]
    names = {
        "dlq_guard": guard,
        "dlq_later": staticmethod(later),
        "dlq_counted": guard.may_guard(task),
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
        if self.revoked():
            raise TaskRevokedError(self.id)
        try:
            begin = self.dlq_guard.begin(self)
        except Exception:
            logger.exception("Task %s is not guarded this time, it runs", self.id)
            begin = Begin.RUN
        if begin is Begin.RUN:
            return execute(self, pool, **kwargs)
        if begin is Begin.LATER:
            self.dlq_later(self)
        # Celery's word for "skip it and release its slot".
        raise TaskRevokedError(self.id)

    return execute_using_pool


def _forgetting(on_success: Callable[..., Any]) -> Callable[..., Any]:
    """Forget the counters of a message whose task succeeded."""

    @wraps(on_success)
    def wrapper(self: Any, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        result = on_success(self, failed__retval__runtime, **kwargs)
        if not failed__retval__runtime[0] and self.dlq_tracked is not None:
            self.dlq_guard.returned(self)
        return result

    return wrapper
