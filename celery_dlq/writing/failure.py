"""Descriptions of failures; describing an exception never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from traceback import format_tb
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import (
    Ignore,
    MaxRetriesExceededError,
    Reject,
    Retry,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.utils.serialization import UnpickleableExceptionWrapper

from celery_dlq.decorators import RejectToDLQ
from celery_dlq.letters import json_codec
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.record import Outcome
from celery_dlq.policies.checks import qualified_name
from celery_dlq.policies.decisions import End

SENTRY_EVENT_ID = "dlq_sentry_event_id"
"""Attribute of the pool's ``ExceptionInfo``; see `celery_dlq.features.sentry.integration`."""

SENTRY_TRACE = "dlq_sentry_trace"
"""The same, for the trace of the task: the text of Sentry's header ``sentry-trace``."""

EXCEPTION_NAMES = "dlq_exception_names"
"""Attribute of the pool's ``ExceptionInfo``; see `celery_dlq.features.exceptions.observer`."""

MESSAGE_LIMIT = 4_000
TRACEBACK_LIMIT = 64_000

# `Task.retry` raises the task's own exception when no retry is left; only its frame shows that.
_RETRY_FRAME = re.compile(
    r'^ *File "[^"\n]*celery[/\\]app[/\\]task\.py", line \d+, in retry$', re.MULTILINE
)
_RESULT_FRAME = re.compile(
    r'^ *File "[^"\n]*celery[/\\]backends[/\\]\w+\.py", line \d+, in mark_as_\w+$', re.MULTILINE
)
_MOST_CONTEXTS = 20
_RESULT_LOST = "the result backend did not take the result: "
_RETRY_RAISED = re.compile(r"^celery\.exceptions\.Retry: ", re.MULTILINE)
"""The retry was published: an error raised while Celery handles that (e.g. a result backend that
is down) also has its frames in the traceback."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a delivery, with its exception as text."""

    # The facts for `celery_dlq.policies.decisions.decide_end`; `None` if the message
    # did not die: it was ignored or revoked
    end: End | None
    exception_type: str | None = None  # Dotted name of the exception's class
    exception_message: str | None = None  # Its text, at most `MESSAGE_LIMIT` characters
    # Its traceback, cut in the middle to about `TRACEBACK_LIMIT` characters
    traceback: str | None = None
    sentry_event_id: str | None = None  # The event that the pool process sent to Sentry, if it did
    # The trace that Sentry's integration had of the task, if it had one
    sentry_trace: str | None = None


UNDESCRIBED = Failure(End(outcome=Outcome.FAILED, text="its error could not be described"))
"""A failure that an error of ours keeps from being described; its message dies all the same."""


def failure_of(exc_info: Any, throws: tuple[type, ...]) -> Failure:
    """Describe a failure that a pool reported."""
    exc = unwrapped(exc_info.exception)
    traceback = _capped_traceback(exc_info)
    shown = exc.exc if isinstance(exc, Retry) and exc.exc is not None else exc
    return Failure(
        end=_end_of_exception(exc, traceback, throws, getattr(exc_info, EXCEPTION_NAMES, ())),
        exception_type=_type_name(shown),
        exception_message=_message(shown),
        traceback=traceback,
        sentry_event_id=getattr(exc_info, SENTRY_EVENT_ID, None),
        sentry_trace=getattr(exc_info, SENTRY_TRACE, None),
    )


def dropped_failure(exc: BaseException | None, text: str) -> Failure:
    """Describe why Celery drops a message that never became a request."""
    if exc is None:
        return Failure(None, None, text, None)
    return Failure(None, _type_name(exc), _message(exc) or text, None)


def result_not_stored(exc: BaseException | None, mark: str = "mark_as_") -> bool:
    """True if the result backend raised an error as Celery stored the end of a task there."""
    frames: list[str] = []
    # Celery stores a failure where it could not store a success: that is the error's context.
    for _ in range(_MOST_CONTEXTS):
        if exc is not None:
            frames += format_tb(exc.__traceback__)
            exc = exc.__context__
    return any(f"in {mark}" in found[0] for found in _RESULT_FRAME.finditer("".join(frames)))


def time_limit_failure(seconds: float | None) -> Failure:
    """Describe a hard time limit; Celery reports it without an exception."""
    text = f"time limit of {seconds} s exceeded"
    end = End(
        outcome=Outcome.TIME_LIMIT, text=text, exception_names=_shutdown_texts(TimeLimitExceeded)
    )
    return Failure(end, qualified_name(TimeLimitExceeded), text, None)


def missing_end_failure(exc: BaseException | None) -> Failure:
    """Describe an end that Celery did not report: an error outside the task's body, if known."""
    dropped = dropped_failure(exc, "no error is known")
    lost = _RESULT_LOST if result_not_stored(exc) else ""
    end = End(outcome=Outcome.VANISHED, final=False, text="its end was not reported")
    return Failure(end, dropped.exception_type, f"{lost}{dropped.exception_message}")


def unwrapped(exc: BaseException) -> BaseException:
    """The original exception: billiard wraps it to carry the traceback."""
    return exc.exc if isinstance(exc, ExceptionWithTraceback) else exc


def _end_of_exception(
    exc: BaseException, traceback: str, throws: tuple[type, ...], known: tuple[str, ...]
) -> End | None:
    if isinstance(exc, (Ignore, Terminated)):
        return None
    text = _message(exc)
    if isinstance(exc, RejectToDLQ):
        return End(outcome=Outcome.REJECTED, demanded=True, text=exc.description)
    if isinstance(exc, Reject):
        outcome = Outcome.REQUEUED if exc.requeue else Outcome.REJECTED
        unpublished = not exc.requeue and bool(_RETRY_FRAME.search(traceback))
        return End(
            outcome=outcome, final=not exc.requeue, retry_not_published=unpublished, text=text
        )
    if isinstance(exc, Retry):
        return End(outcome=Outcome.RETRIED, final=False, text=text)
    names = _shutdown_texts(type(exc))
    if isinstance(exc, TimeLimitExceeded):
        return End(outcome=Outcome.TIME_LIMIT, text=text, exception_names=names)
    if isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt)):
        return End(outcome=Outcome.WORKER_LOST, text=text, exception_names=names)
    # Most tracebacks have neither word, which is found out ten times faster.
    lost = ", in mark_as_" in traceback and _RESULT_FRAME.search(traceback)
    refused = ", in retry" in traceback and _RETRY_FRAME.search(traceback)
    raised = refused and _RETRY_RAISED.search(traceback)
    spent = isinstance(exc, MaxRetriesExceededError) or bool(refused and not raised)
    return End(
        outcome=Outcome.FAILED,
        retries_spent=spent,
        exception_names=known or (_type_name(exc), *names),
        expected=isinstance(exc, throws) if throws else False,
        text=f"{_RESULT_LOST}{text}" if lost else text,
    )


def _shutdown_texts(cls: type) -> tuple[str, ...]:
    return tuple(qualified_name(base) for base in cls.__mro__ if base is not object)


def _type_name(exc: BaseException) -> str:
    if isinstance(exc, UnpickleableExceptionWrapper):
        return f"{exc.exc_module}.{exc.exc_cls_name}".removeprefix("builtins.")
    return qualified_name(type(exc))


def _message(exc: BaseException) -> str:
    return shortened(_safe_str(_reason_of(exc)), MESSAGE_LIMIT)


def _reason_of(exc: BaseException) -> object:
    if isinstance(exc, UnpickleableExceptionWrapper):
        return exc.text
    if isinstance(exc, Reject):
        return "" if exc.reason is None else exc.reason
    return exc


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as exc:  # noqa: BLE001 - a broken __str__ must not lose the letter
        return f"<unprintable {type(value).__name__}: __str__ raised {type(exc).__name__}>"


def _capped_traceback(exc_info: Any) -> str:
    try:
        text = str(exc_info.traceback or "")
    except Exception as exc:  # noqa: BLE001 - as above
        return json_codec.safe_repr(exc)
    if len(text) <= TRACEBACK_LIMIT:
        return text
    half = TRACEBACK_LIMIT // 2
    return f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
