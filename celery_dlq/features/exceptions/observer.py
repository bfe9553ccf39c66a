"""The policy key ``exceptions``, where tasks run.

Only the process that runs a task has its exception: another one may lack the class, or get a
base class in its place because the exception cannot be pickled. So this module, like Celery's
``autoretry_for``, wraps the task's ``run``. A retry is published there, by ``Task.retry``: state,
signals, callbacks, chains and chords are Celery's. Dead-lettering and ignoring are decided in the
main process, as every end is (`celery_dlq.policies.decisions`); for that, the names of the
exception's class and bases go with the failure.

Source: https://github.com/celery/celery/blob/main/celery/app/autoretry.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from celery import signals
from celery.app.task import Task
from celery.exceptions import TaskPredicate

from celery_dlq.features.exceptions.policy import (
    ExceptionAction,
    ExceptionRule,
    imported,
    why_not_here,
)
from celery_dlq.letters.printable import get_logger
from celery_dlq.policies.checks import qualified_name
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import PolicyCache
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.failure import EXCEPTION_NAMES

logger = get_logger("celery_dlq.worker")

_ATTRIBUTE = "_dlq_exceptions"
_WRAPPED = "_dlq_wrapped"
_RETRY_CODE = getattr(Task.retry, "__code__", None)  # an app's tools may have replaced it


def observer(parts: WorkerParts) -> Observer:
    """The observer of a worker."""
    for where, policy in parts.policies.policies.named_policies():
        warn_of_exceptions(where, policy)
    return ExceptionRules(parts.policies)


class ExceptionRules(Observer):
    """What the policies of one worker say about exceptions."""

    def __init__(self, policies: PolicyCache) -> None:
        self._policies = policies
        self._tasks: list[Any] = []
        self.place: Callable[[Any], dict[str, Any]] = _place_of
        signals.task_failure.connect(_send_names, weak=False, dispatch_uid="celery_dlq.exceptions")

    def on_task(self, task: Any) -> None:
        """Carry out the policies' rules when this task raises; before Celery builds its tracer."""
        if vars(task).get(_ATTRIBUTE) is not self:
            setattr(task, _ATTRIBUTE, self)
            self._tasks.append(task)
        if _WRAPPED in vars(task) or not self._policies.have_exceptions(task):
            return
        if hasattr(task, "_orig_run"):  # ``autoretry_for`` must not retry what is decided here
            task._orig_run = _deciding(task, task._orig_run, past=True)  # noqa: SLF001 - it looks there
            task.run = _unpacking(task, task.run)
        else:
            task.run = _deciding(task, task.run, past=False)
        setattr(task, _WRAPPED, True)

    def close(self) -> None:
        """Leave all exceptions to Celery again."""
        for task in self._tasks:
            if vars(task).get(_ATTRIBUTE) is self:
                delattr(task, _ATTRIBUTE)
        self._tasks.clear()

    def rule_of(self, task: Any, exc: BaseException) -> tuple[Policy, ExceptionRule] | None:
        """The policy and the rule for an exception that a task raised in this process."""
        request = task.request
        if request.called_directly:
            return None
        policy = self._policies.resolve(self.place(request), task).policy
        rules = None if policy is None else policy.of("exceptions")
        rule = rules and rules.rule_of(exception_names(type(exc), rules.names))
        return (policy, rule) if policy is not None and rule else None

    def on_error(self, info: Any, task: Any, delivery_info: dict[str, Any]) -> None:
        """Put the names of an exception on billiard's ``ExceptionInfo`` of it."""
        self.mark_exception(info, task, delivery_info, info.type)

    def mark_exception(
        self, info: Any, task: Any, delivery_info: dict[str, Any], kind: type
    ) -> None:
        """Put the names of an exception's class and bases on an ``ExceptionInfo``."""
        policy = self._policies.resolve(delivery_info, task).policy
        if rules := policy and policy.of("exceptions"):
            setattr(info, EXCEPTION_NAMES, exception_names(kind, rules.names))


def warn_of_exceptions(where: str, policy: Policy) -> None:
    """Warn of the exceptions that a policy names and that no task of this worker can raise."""
    rules = policy.of("exceptions")
    for name in rules.names if rules else ():
        if why := why_not_here(name):
            logger.warning("The exception %r in %s never acts here: %s", name, where, why)


def exception_names(kind: type, keys: Iterable[str] = ()) -> tuple[str, ...]:
    """The names of an exception's class and its bases, the class first."""
    others = [(key, found) for key in keys if (found := imported(key)) is not None]
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if base is not object:
            names[qualified_name(base)] = None
            names.update((key, None) for key, found in others if found is base)
    return tuple(names)


def _place_of(request: Any) -> dict[str, Any]:
    return request.delivery_info or {}


class _Decided(BaseException):
    """Takes an exception past ``autoretry_for``, which may name `Exception`."""

    def __init__(self, exc: Exception, policy: Policy, rule: ExceptionRule) -> None:
        super().__init__()
        self.found = exc, policy, rule


def _deciding(task: Any, run: Callable[..., Any], *, past: bool) -> Callable[..., Any]:
    """Wrap what a task runs: carry out what a policy says, or take it past ``autoretry_for``."""

    @wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except TaskPredicate:  # Retry, Ignore, Reject: the task said itself what it wants
            raise
        except Exception as exc:
            found = _rule_of(task, exc)
            if found is not None and past:
                raise _Decided(exc, *found) from None
            if found is not None:
                _carry_out(task, exc, *found)
            raise

    return guarded


def _rule_of(task: Any, exc: Exception) -> tuple[Policy, ExceptionRule] | None:
    rules = vars(task).get(_ATTRIBUTE)
    try:
        return rules.rule_of(task, exc) if rules is not None else None
    except Exception:
        logger.exception("The policy for an exception cannot be read; Celery decides")
        return None


def _unpacking(task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the ``run`` of a task with ``autoretry_for``."""

    @wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except _Decided as decided:
            exc, policy, rule = decided.found
        try:
            raise exc  # noqa: TRY301 - outside of the block above, which would be its context
        except Exception:
            _carry_out(task, exc, policy, rule)
            raise
        finally:
            del exc  # else this frame and its traceback keep each other

    return guarded


def _carry_out(task: Any, exc: Exception, policy: Policy, rule: ExceptionRule) -> None:
    """Retry, if the rule says so and the task did not give up itself."""
    if rule.action is not ExceptionAction.RETRY or _out_of_retries(exc):
        return
    try:
        retrying = _with_limit(task, policy, rule)
        wait = rule.seconds_before_retry(task.request.retries, random.random())  # noqa: S311 - no secret
    except Exception:
        logger.exception("Task %s is not retried as its policy says; Celery decides", task.name)
        return
    raise retrying.retry(exc=exc, countdown=wait)


def _with_limit(task: Any, policy: Policy, rule: ExceptionRule) -> Any:
    """A copy of a task with the limit of a rule, or of its policy, as its own.

    As an argument of `Task.retry`, the limit would stay on the task, for other exceptions too.
    """
    own = task.max_retries if rule.max_retries is None else rule.max_retries
    limits = [limit for limit in (own, policy.max_retries) if limit is not None]
    made = object.__new__(type(task))  # `copy` would return the task itself
    vars(made).update(vars(task))
    made.max_retries = min(limits, default=None)
    return made


def _out_of_retries(exc: BaseException) -> bool:
    """True if the task itself called ``retry()``, which refused and raised the exception."""
    traceback = exc.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is _RETRY_CODE:
            return True
        traceback = traceback.tb_next
    return False


def _send_names(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    """In the process of the task: the names go with the failure to the main process."""
    rules = getattr(sender, "__dict__", {}).get(_ATTRIBUTE)
    raised = sys.exc_info()[0]
    if rules is None or einfo is None or raised is None:
        return
    try:
        # Not `on_error`: Celery reports a result that cannot be stored without the message.
        if place := rules.place(sender.request):
            rules.mark_exception(einfo, sender, place, raised)
    except Exception:
        logger.exception("The names of an exception are not known")
