"""Celery's hooks in a guarded request of a pool that runs tasks in this process.

`celery_dlq.worker.request` has the table of both kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import ref

from billiard.einfo import ExceptionInfo
from celery.exceptions import TaskRevokedError

from celery_dlq.letters.printable import get_logger
from celery_dlq.worker.dispatched import ENDED
from celery_dlq.worker.request import DeadLetterRequest
from celery_dlq.worker.shutdown_signals import is_stopping
from celery_dlq.writing.lifecycle import DeliveryState

logger = get_logger("celery_dlq.worker")

_S = DeliveryState


class InProcessRequest(DeadLetterRequest):
    """For pools that start tasks in this process: solo, threads, gevent and eventlet."""

    dlq_starts_here = True

    _dlq_is_killed = False  # its greenlet: by an operator, a lost connection or a shutdown
    _dlq_escaped: BaseException | None = None  # in the solo pool, past Celery's handling

    def _dlq_may_be_given(self) -> bool:
        """Let observers hold it here already, in order: threads would mix it up."""
        if not self.dlq_guard.is_watching:
            return True
        return self._dlq_is_ours() and self._dlq_carry_out(
            self.dlq_guard.verdict_before_start(self)
        )

    def _dlq_give(self, execute: Callable[[], Any], pool: Any) -> Any:
        """Give the pool the task, and note its future; its thread or greenlet counts the start."""
        self.dlq_job = self._dlq_escaped = job = None
        try:
            job = execute()
        except NotStartedError as exc:  # in the solo pool
            raise TaskRevokedError(self.id) from exc
        except Exception as exc:
            self._dlq_escaped = exc
            raise
        finally:
            if not pool.is_green:  # a greenlet notes itself
                self.dlq_job = getattr(job, "f", ENDED)  # solo is done with it
        return job

    def on_accepted(self, pid: Any, time_accepted: Any) -> Any:
        """Count the start; if it may not happen, leave the pool's thread by an exception."""
        if self.dlq_state is _S.NEW:
            greenlet = sys.modules.get("greenlet")
            current = None if greenlet is None else greenlet.getcurrent()
            if id(current) == pid:  # as pools of greenlets name them
                self.dlq_job = ref(current)
            if is_stopping() or not self._dlq_count_start():
                raise _silent_exit()(self.id)
            if self.dlq_counted and is_stopping():  # meanwhile; the pool's thread may just end
                self.dlq_guard.uncount_never_started([self])
                raise _silent_exit()(self.id)
            self.dlq_move(_S.RUNNING)
        return super().on_accepted(pid, time_accepted)

    def dlq_on_success(
        self, on_success: Callable[..., Any], failed__retval__runtime: Any, **kwargs: Any
    ) -> Any:
        """A greenlet that is killed reports a success of its own form: that is none.

        Source: ``_make_killable_target`` in
        https://github.com/celery/celery/blob/main/celery/concurrency/gevent.py
        """
        report = failed__retval__runtime
        if self._dlq_is_killed and not isinstance(report, ExceptionInfo) and report[0] is False:
            return None
        return super().dlq_on_success(on_success, report, **kwargs)

    def on_timeout(self, soft: bool, timeout: Any) -> Any:  # noqa: FBT001 - Celery's signature
        """The time limit of gevent's pool; it also reports one that the task has of its own."""
        left_by = sys.exc_info()[1]
        if left_by is not None and getattr(left_by, "seconds", timeout) != timeout:
            return self._dlq_end_left_by(left_by)
        return super().on_timeout(soft, timeout)

    def _dlq_error_of_thread(self) -> BaseException | None:
        """The error that ended the task's thread, past Celery's callbacks."""
        job = self.dlq_job
        if self._dlq_escaped is None and isinstance(job, Future) and job.done():
            return None if job.cancelled() else job.exception()
        return self._dlq_escaped

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """An operator ends a running task; a greenlet ends in here, as in `cancel`."""
        self._dlq_is_killed = bool(pool.is_green and self.time_start is not None)
        return super().terminate(pool, signal)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """A lost connection or a shutdown ends a running task."""
        self._dlq_is_killed = bool(pool.is_green)
        return super().cancel(pool, *args, **kwargs)

    def dlq_terminate(self, pool: Any) -> None:  # noqa: ARG002 - as the other kind's
        """Say that a running task runs on."""
        if self.time_start is not None or self.dlq_job is not None:
            logger.warning(
                "Task %s runs, and only prefork pools can terminate a task: it is dead-lettered "
                "if it fails or comes back",
                self.id,
            )


class NotStartedError(BaseException):
    """Leaves a pool's thread before the task starts; only this module catches it."""


def _silent_exit() -> type[BaseException]:
    """Choose the exception that ends a thread or a greenlet without a traceback."""
    greenlet = sys.modules.get("greenlet")
    silent = () if greenlet is None else (greenlet.GreenletExit,)
    return type("NotStartedError", (NotStartedError, *silent), {})
