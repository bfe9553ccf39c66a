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
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import InvalidTaskError, MaxRetriesExceededError, TaskRevokedError
from celery.states import READY_STATES
from celery.utils.imports import symbol_by_name
from celery.worker import state
from celery.worker.state import task_ready

from celery_dlq.errors import MaxDeliveriesExceeded
from celery_dlq.logs import get_logger
from celery_dlq.policies.decisions import Die, End, PutOff, Run
from celery_dlq.record import Outcome, Reason
from celery_dlq.worker.dispatched import drop_failed, is_closed
from celery_dlq.worker.failure import (
    Failure,
    dropped_failure,
    failure_of,
    time_limit_failure,
)
from celery_dlq.worker.guard import Guard, Refusal
from celery_dlq.worker.lifecycle import (
    DECIDED,
    HANDLING,
    HELD,
    NEXT,
    OVER,
    DeliveryState,
    GuardedRequest,
    InFlight,
)

if TYPE_CHECKING:

    class _Base:
        """Celery's Request, as far as the mix-in leans on it: Celery ships no types."""

        id: Any
        name: str
        task: Any
        message: Any
        request_dict: dict[str, Any]
        delivery_info: dict[str, Any]
        args: Any
        kwargs: Any
        expires: Any
        acknowledged: bool
        worker_pid: int | None
        time_start: float | None
        time_limits: Any
        store_errors: Any
        execute_using_pool: Any
        on_success: Any
        _context: Any

        def on_accepted(self, pid: Any, time_accepted: Any) -> Any: ...
        def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any: ...
        def on_timeout(self, soft: Any, timeout: Any) -> Any: ...
        def acknowledge(self) -> None: ...
        def reject(self, requeue: Any = ...) -> None: ...
        def revoked(self) -> Any: ...
        def send_event(self, name: str, **fields: Any) -> None: ...
        def _announce_revoked(
            self, reason: Any, terminated: Any, signum: Any, expired: Any
        ) -> None: ...
        def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any: ...
        def _retry_worker_lost(self, *args: Any) -> Any: ...
        def _success_was_stored(self) -> Any: ...

else:
    _Base = object

logger = get_logger("celery_dlq.worker")

_S = DeliveryState


class DeadLetterRequest(_Base):
    """Mixed in front of a task's own ``Request`` class.

    Attributes:
        dlq_guard: The worker's guard.
        dlq_later: Gives a request to the pool again in a moment.
        dlq_counted: Whether starts are counted: some policy could guard the task.
        dlq_starts_here: The pool says right before the task, where it runs, that it starts.
        dlq_state: Where the delivery is; changed by `dlq_move` only.
        dlq_in_flight: The guarded message, from its start on.
    """

    dlq_guard: Guard
    dlq_later: Callable[[GuardedRequest], None]
    dlq_counted = False
    dlq_starts_here = False
    dlq_state = DeliveryState.NEW
    dlq_in_flight: InFlight | None = None

    _dlq_failure: Failure | None = None  # what Celery tells of the end, while ENDING
    _dlq_let_go: Callable[[], Any] | None = None  # what is done once the store has answered

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.dlq_counted:
            return
        own = cls.__dict__
        if "execute_using_pool" in own:
            cls.execute_using_pool = _counted(own["execute_using_pool"])
        if "on_success" in own:
            cls.on_success = _forgetting(own["on_success"])

    def dlq_move(self, state: DeliveryState) -> None:
        """Go on to another state; an illegal transition is logged and counted, and changes nothing.

        See `celery_dlq.worker.lifecycle`.
        """
        before = self.dlq_state
        if state in NEXT[before]:
            self.dlq_state = state
            if before is _S.DISPATCHED:
                self.dlq_guard.accepted(self)
            return
        self.dlq_guard.failed("transition")
        logger.error(
            "Task %s stays %s and does not become %s: an error of celery_dlq, please report it",
            self.id,
            before.value,
            state.value,
            stack_info=True,
        )

    def on_accepted(self, pid: Any, time_accepted: Any) -> Any:
        """A pool process begins with it; in a pool of this process the task is next."""
        if self.dlq_starts_here and self.dlq_counted and self.dlq_state is _S.NEW:
            self._dlq_begin_here()
        elif self.dlq_state is not _S.RUNNING:
            self.dlq_move(_S.RUNNING)
        return super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """The pool reported an exception, a lost child or a hard time limit."""
        failure = _guarded(failure_of, exc_info, tuple(self.task.throws or ()))
        return self._dlq_while_ending(failure, super().on_failure, exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001 - Celery's signature
        """A soft or hard time limit was exceeded; only the hard one ends the delivery."""
        failure = None if soft else time_limit_failure(timeout)
        return self._dlq_while_ending(failure, super().on_timeout, soft, timeout)

    def acknowledge(self) -> None:
        """Acknowledge, but never before the letter of a death is stored."""
        if self.dlq_state is _S.ENDING:
            if self._dlq_end() is not _S.WAITING_FOR_STORE:
                super().acknowledge()
        elif self.dlq_state not in HELD:
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - Celery's signature
        """Reject; a death is acknowledged instead, once its letter is stored.

        A rejection would copy the message to a dead-letter exchange of the broker's
        own, and on SQS it would not even remove it.
        """
        if self.dlq_state is _S.ENDING:
            ended = self._dlq_end(requeued=requeue)
            if ended is _S.STORED:
                super().acknowledge()
            elif ended is not _S.WAITING_FOR_STORE:
                super().reject(requeue)
        elif self.dlq_state not in HELD:
            seen = self.time_start is not None or hasattr(self.message, "dlq_is_dispatched")
            # Else Celery drops it before its start: an eta that no clock can show, say.
            if seen or requeue or not self.dlq_refuse(InvalidTaskError("cannot be scheduled")):
                super().reject(requeue)

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """The letter is stored, or cannot be: do what had to wait for that."""
        self.dlq_move(state)
        self._dlq_let_go_now()

    def dlq_settle(self, verdict: Die, dead_letter_queue: str) -> None:
        """End the task of a message that was dead-lettered without being executed.

        The result becomes a failure, so that nobody waits for it for ever; errbacks
        run and a chord or chain fails as Celery fails it.
        """
        exc = refusal_error(f"{self.name}[{self.id}]", verdict, dead_letter_queue)
        task_ready(self)
        try:
            self._dlq_fail(exc)
        except Exception:
            logger.exception("Task %s was dead-lettered, but its result is not stored", self.id)
        finally:
            super().acknowledge()

    def dlq_settle_copy(self, dead_letter_queue: str) -> None:
        """Acknowledge a late copy of a message whose letter is stored.

        Its worker may have died between storing the letter and ending the task; then that
        is made up for.
        """
        verdict = Die(Reason.MAX_DELIVERIES_EXCEEDED, "dead-lettered before")
        if self._dlq_has_a_result():
            task_ready(self)
            super().acknowledge()
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
        if not self.dlq_starts_here and not self.dlq_begin():
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
            return bool(super().revoked())
        except Exception as exc:
            if not self.dlq_refuse(exc):
                raise
            return True

    def dlq_begin(self) -> bool:
        """Count the start; whether it may happen."""
        start: Run | PutOff | Refusal
        try:
            start = self.dlq_guard.begin(self)
        except Exception:
            self.dlq_guard.failed("start")
            logger.exception("Task %s is not guarded this time, it runs", self.id)
            start = Run()
        if isinstance(start, Run):
            self.dlq_move(_S.RUNNING if self.dlq_starts_here else _S.DISPATCHED)
            return True
        if isinstance(start, PutOff):
            self.dlq_later(self)
        else:
            self._dlq_end_at_start(start)
        return False

    def _dlq_begin_here(self) -> None:
        """Count the start; not to start is to leave the pool's thread by an exception."""
        if not self.dlq_begin():
            raise _left_without_a_word()(self.id)

    def _dlq_end_at_start(self, refusal: Refusal) -> None:
        settle = partial(self.dlq_settle_copy, refusal.dead_letter_queue)
        if isinstance(refusal.verdict, Die):
            settle = partial(self.dlq_settle, refusal.verdict, refusal.dead_letter_queue)
        if refusal.state is _S.WAITING_FOR_STORE:
            self._dlq_wait(settle)
            return
        self.dlq_move(refusal.state)
        try:
            settle()
        except Exception:
            # The broker or the result backend, say. The message comes back, and is not run now.
            logger.exception("Task %s is not executed again, but could not be ended", self.id)

    def dlq_refuse(self, exc: Exception) -> bool:
        """Dead-letter a message that Celery cannot even look at; it would end the worker.

        Returns:
            Whether that was done; else the error is Celery's.
        """
        failure = dropped_failure(exc, "not a Celery task message")

        def decide() -> DeliveryState:
            return self.dlq_guard.dropped(
                self.message, self.request_dict, Reason.INVALID_MESSAGE, failure, self
            )

        state = self._dlq_carry_out(decide, self._dlq_discard)
        if state is _S.STORED:
            self._dlq_discard()
        return state is not _S.DONE

    def _dlq_discard(self) -> None:
        task_ready(self)
        super().acknowledge()

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
        decide = partial(self.dlq_guard.end, self, failure, requeued=again)
        settle = partial(self._dlq_fail_and_acknowledge, exc)
        self.dlq_move(_S.ENDING)
        state = self._dlq_carry_out(decide, settle)
        if state is _S.STORED:
            settle()
        elif state is _S.DONE:
            task_ready(self)
            super().reject(requeue=again)
        return True

    def _dlq_fail_and_acknowledge(self, exc: Exception) -> None:
        task_ready(self)
        _guarded(self._dlq_fail, exc)
        super().acknowledge()

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
        """Let Celery handle an end; its acknowledgement in there is the moment of death."""
        if failure is None or self.dlq_state in OVER:
            return handle(*args, **kwargs)
        self.dlq_move(_S.ENDING)
        self._dlq_failure = failure
        handling = HANDLING.set(self.dlq_in_flight is not None)
        try:
            result = handle(*args, **kwargs)
            if self.acknowledged and self.dlq_state is _S.ENDING:
                self._dlq_end()  # acknowledged early: only the letter is left to do
        except BaseException:
            if self.dlq_state not in OVER:  # a MemoryError, say: it ends the worker
                _guarded(self.dlq_guard.crashed, self, failure)
            raise
        else:
            return result
        finally:
            HANDLING.reset(handling)
            self._dlq_failure = None
            if self.dlq_state is _S.ENDING:  # it was none
                self.dlq_move(_S.RUNNING)

    def _dlq_end(self, *, requeued: bool = False) -> DeliveryState:
        """Deal with the end, once; what may be done with the message now."""
        failure, self._dlq_failure = self._dlq_failure, None
        if failure is None:
            return _S.WAITING_FOR_STORE  # another thread is storing the letter right now
        if requeued and failure.end and failure.end.outcome is Outcome.WORKER_LOST and _stopping():
            # Celery before 5.5 ends the pool first and sees its children as lost.
            _guarded(self.dlq_guard.interrupted, self)
            self.dlq_move(_S.RELEASED)
            return _S.RELEASED
        decide = partial(self.dlq_guard.end, self, failure, requeued=requeued)
        return self._dlq_carry_out(decide, super().acknowledge)

    def _dlq_carry_out(
        self, decide: Callable[[], DeliveryState], settle: Callable[[], Any]
    ) -> DeliveryState:
        """Go on to the state that the guard decides; ``settle`` once its letter has waited."""
        try:
            state = decide()
        except Exception:
            # An error of our own would come again: the message must not wait for us for ever.
            self.dlq_guard.failed("end")
            logger.critical("The end of task %s is left to Celery", self.id, exc_info=True)
            state = _S.DONE
        if state is _S.WAITING_FOR_STORE:
            self._dlq_wait(settle)
        else:
            self.dlq_move(state)
        return state

    def _dlq_wait(self, settle: Callable[[], Any]) -> None:
        self._dlq_let_go = settle
        # In a pool of threads the store may have answered meanwhile.
        if self.dlq_state in (_S.STORED, _S.DONE):
            self._dlq_let_go_now()
        else:
            self.dlq_move(_S.WAITING_FOR_STORE)

    def _dlq_let_go_now(self) -> None:
        let_go = self.__dict__.pop("_dlq_let_go", None)  # once, whichever thread comes first
        if let_go is not None:
            let_go()

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        """Celery revokes a task and acknowledges its message; an expired one is a death."""
        announce = partial(super()._announce_revoked, reason, terminated, signum, expired)
        if self.dlq_state is _S.WAITING_FOR_STORE:
            return  # dead already
        if expired:
            decide = partial(self.dlq_guard.expired, self)
            if self._dlq_carry_out(decide, announce) is _S.WAITING_FOR_STORE:
                return
        elif self.dlq_state not in DECIDED:
            self.dlq_guard.succeeded(self)
            self.dlq_move(_S.DONE)
        announce()

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
        """A cold or soft shutdown, or a lost connection, gives a running task up."""
        if self.dlq_in_flight is not None and self.dlq_state not in OVER:
            _guarded(self.dlq_guard.interrupted, self)
            self.dlq_move(_S.RELEASED)
        return super()._announce_cancelled(*args, **kwargs)

    # Celery 5.7 acknowledges in these two although the task did not die.

    def _retry_worker_lost(self, *args: Any) -> Any:
        if self.dlq_state is not _S.ENDING:
            return super()._retry_worker_lost(*args)
        self.dlq_move(_S.RUNNING)  # no death, if the retry can be published
        retried = super()._retry_worker_lost(*args)
        self.dlq_move(_S.DONE if retried else _S.ENDING)
        return retried

    def _success_was_stored(self) -> Any:
        meta = super()._success_was_stored()
        if meta and self.dlq_state not in DECIDED:
            self.dlq_guard.succeeded(self)
            self.dlq_move(_S.DONE)
        return meta


_: type[GuardedRequest] = DeadLetterRequest  # checked by mypy


def guarded_request_class(
    task: Any, guard: Guard, later: Callable[[GuardedRequest], None], *, starts_here: bool = False
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


def refusal_error(task: str, verdict: Die, dead_letter_queue: str) -> Exception:
    """The result of a message that is not executed because of a limit.

    Args:
        task: The task's name and id.
        verdict: Why it is not executed.
        dead_letter_queue: Where its letter is, if its policy keeps one.
    """
    spent = verdict.reason is Reason.MAX_RETRIES_EXCEEDED
    kind = MaxRetriesExceededError if spent else MaxDeliveriesExceeded
    where = f"is in {dead_letter_queue}" if verdict.kept else "ended"
    return kind(f"{task} {where}: {verdict.description}")


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
        failed = failed__retval__runtime[0]
        ours = not failed and self.dlq_in_flight is not None and self.dlq_state not in DECIDED
        if ours:
            self.dlq_move(_S.DONE)  # first: a success is acknowledged also after a shutdown
        result = on_success(self, failed__retval__runtime, **kwargs)
        if ours:
            self.dlq_guard.returned(self)
        return result

    return wrapper
