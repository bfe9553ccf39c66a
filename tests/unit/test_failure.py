"""Descriptions of failures: real exceptions, real tracebacks, and broken ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from builders import an_app
from celery import Task
from celery.app.trace import build_tracer
from celery.exceptions import (
    Ignore,
    MaxRetriesExceededError,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.utils.serialization import UnpickleableExceptionWrapper, get_pickleable_exception
from celery.worker.request import Request

from celery_dlq.decorators import RejectToDLQ
from celery_dlq.letters.record import Outcome
from celery_dlq.policies.decisions import End
from celery_dlq.writing.failure import (
    MESSAGE_LIMIT,
    TRACEBACK_LIMIT,
    Failure,
    dropped_failure,
    failure_of,
    time_limit_failure,
    unwrapped,
)


class SoldOutError(ValueError):
    """An exception of an application."""


class UnprintableError(Exception):
    """Has a ``__str__`` that raises."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class WordlessError(Exception):
    """Has a ``__str__`` that gives no text."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value] # noqa: PLE0307 - broken on purpose


class UnpickleableError(Exception):
    """Cannot travel from the pool child to the worker as it is."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def info_of(exc: BaseException) -> Any:
    """Raise it and give what billiard makes of it."""
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()


def failure(exc: BaseException, *throws: type[BaseException]) -> Failure:
    """Describe an exception that was raised."""
    return failure_of(info_of(exc), throws)


def end(exc: BaseException, *throws: type[BaseException]) -> End:
    """The facts of an end that is one."""
    found = failure(exc, *throws).end
    assert found is not None
    return found


def traced(task: Task, *, retries: int) -> Failure:
    """Run a task as a pool child does, and describe what it reports."""
    tracer = build_tracer(task.name, task, app=task.app)
    request = {
        "id": "t-1",
        "retries": retries,
        "is_eager": False,
        "called_directly": False,
        "delivery_info": {},
        "hostname": "celery@web-1",
    }
    report = tracer("t-1", (), {}, request)[0]
    assert isinstance(report, ExceptionInfo)
    return failure_of(report, tuple(task.throws))


def test_an_exception_is_described() -> None:
    """Type, text and traceback are what a person would see."""
    found = failure(SoldOutError("only 3 left"))
    assert found.exception_type == f"{__name__}.SoldOutError"
    assert found.exception_message == "only 3 left"
    assert found.traceback is not None
    assert "in info_of" in found.traceback
    assert found.traceback.rstrip().endswith("SoldOutError: only 3 left")


def test_an_exception_is_a_failure_with_the_names_of_its_bases() -> None:
    """``ignore`` can name the class or any of its bases."""
    found = end(SoldOutError("x"))
    assert (found.outcome, found.final, found.text) == (Outcome.FAILED, True, "x")
    assert (found.demanded, found.expected, found.retries_spent) == (False, False, False)
    assert {f"{__name__}.SoldOutError", "ValueError", "Exception"} <= set(found.exception_names)


def test_an_exception_of_throws_is_expected() -> None:
    """The task's own list of expected exceptions is obeyed, with subclasses."""
    assert end(SoldOutError("x"), KeyError, ValueError).expected
    assert not end(SoldOutError("x"), KeyError).expected


@pytest.mark.parametrize(
    ("exc", "outcome", "final", "text"),
    [
        (Reject("no room", requeue=True), Outcome.REQUEUED, False, "no room"),
        (Reject("bad", requeue=False), Outcome.REJECTED, True, "bad"),
        (Reject(KeyError("a")), Outcome.REJECTED, True, "'a'"),
        (Reject(), Outcome.REJECTED, True, ""),
        (Retry("later", KeyError("a"), 3), Outcome.RETRIED, False, "later"),
        (TimeLimitExceeded(5), Outcome.TIME_LIMIT, True, "TimeLimitExceeded(5,)"),
        (WorkerLostError("signal 9"), Outcome.WORKER_LOST, True, "signal 9"),
        (SystemExit(3), Outcome.WORKER_LOST, True, "3"),
        (KeyboardInterrupt(), Outcome.WORKER_LOST, True, ""),
        (SoftTimeLimitExceeded(), Outcome.FAILED, True, "SoftTimeLimitExceeded()"),
    ],
)
def test_each_way_to_end_has_its_outcome(
    exc: BaseException, outcome: Outcome, text: str, *, final: bool
) -> None:
    """Each report of Celery and billiard has its outcome; only a final end can be a death."""
    found = end(exc)
    assert (found.outcome, found.final, found.text) == (outcome, final, text)
    assert not found.demanded


@pytest.mark.parametrize("exc", [Ignore(), Terminated("SIGTERM")])
def test_an_ignored_or_revoked_task_did_not_die(exc: BaseException) -> None:
    """Both are done, on purpose."""
    assert failure(exc).end is None


def test_a_rejection_to_the_dead_letter_queue_is_demanded() -> None:
    """Its description is the text, and it is final."""
    found = failure(RejectToDLQ("no such order"))
    assert found.end == End(outcome=Outcome.REJECTED, demanded=True, text="no such order")
    assert found.exception_message == "no such order"
    assert found.exception_type == "celery_dlq.decorators.RejectToDLQ"


def test_a_retry_is_described_by_what_caused_it() -> None:
    """The history shows the error, not Celery's word for a retry."""
    found = failure(Retry("later", SoldOutError("only 3 left"), 3))
    assert found.exception_type == f"{__name__}.SoldOutError"
    assert found.exception_message == "only 3 left"


def test_a_retry_without_a_cause_is_described_as_itself() -> None:
    """``raise self.retry()`` needs no exception."""
    assert failure(Retry("later", None, 3)).exception_type == "celery.exceptions.Retry"


def test_an_exception_that_cannot_be_printed_does_not_raise() -> None:
    """A broken ``__str__`` must not lose the letter."""
    found = failure(UnprintableError("x"))
    assert found.exception_message == (
        "<unprintable UnprintableError: __str__ raised RuntimeError>"
    )
    assert failure(WordlessError()).exception_message == (
        "<unprintable WordlessError: __str__ raised TypeError>"
    )
    assert failure(Reject(UnprintableError())).end is not None


def test_a_traceback_that_cannot_be_printed_does_not_raise() -> None:
    """Any report of a pool is described."""
    report = SimpleNamespace(exception=KeyError("a"), traceback=UnprintableError())
    assert "RuntimeError" in (failure_of(report, ()).traceback or "")


def test_a_missing_traceback_is_empty() -> None:
    """A lost worker has no traceback."""
    report = SimpleNamespace(exception=WorkerLostError("signal 9"), traceback=None)
    assert failure_of(report, ()).traceback == ""


def test_a_long_message_is_cut_at_its_end() -> None:
    """Some libraries put whole documents into their messages."""
    shown = failure(ValueError("x" * 1_000_000)).exception_message
    assert shown is not None
    assert len(shown) == MESSAGE_LIMIT
    assert shown.endswith("x…")


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    """Its beginning and its end are both kept."""
    report = SimpleNamespace(
        exception=RecursionError("deep"), traceback=f"BEGIN{'x' * 1_000_000}END"
    )
    shown = failure_of(report, ()).traceback
    assert shown is not None
    assert len(shown) < TRACEBACK_LIMIT + 100
    assert shown.startswith("BEGIN")
    assert shown.endswith("END")
    assert f"{1_000_008 - TRACEBACK_LIMIT} characters left out" in shown


def test_an_exception_that_cannot_be_pickled_has_its_own_name() -> None:
    """Celery wraps it on its way to the worker; an operator sees through that."""
    wrapped = get_pickleable_exception(UnpickleableError(7, "odd"))
    assert isinstance(wrapped, UnpickleableExceptionWrapper)
    found = failure(wrapped)
    assert found.exception_type == f"{__name__}.UnpickleableError"
    assert "odd" in (found.exception_message or "")
    assert found.end is not None
    assert f"{__name__}.UnpickleableError" in found.end.exception_names


def test_a_wrapped_built_in_is_named_without_its_module() -> None:
    """As every other built-in exception is."""
    wrapped = UnpickleableExceptionWrapper("builtins", "KeyError", ("a",), "KeyError('a')")
    assert failure(wrapped).exception_type == "KeyError"


def test_billiards_wrapper_is_taken_off() -> None:
    """It only carries a traceback over a pipe."""
    exc = SoldOutError("x")
    assert unwrapped(ExceptionWithTraceback(exc, exc.__traceback__)) is exc
    report = SimpleNamespace(
        exception=ExceptionWithTraceback(exc, exc.__traceback__), traceback="tb"
    )
    assert failure_of(report, ()).exception_type == f"{__name__}.SoldOutError"


def test_a_hard_time_limit_is_described() -> None:
    """Celery reports it without an exception."""
    found = time_limit_failure(5)
    assert found.end is not None
    assert found.end.outcome is Outcome.TIME_LIMIT
    assert found.exception_message == "time limit of 5 s exceeded"
    assert found.exception_type is not None
    assert found.exception_type.endswith("TimeLimitExceeded")


def test_a_dropped_message_is_described() -> None:
    """With the error that Celery met, or with words."""
    found = dropped_failure(KeyError("shop.charge"), "unknown task")
    assert (found.exception_type, found.exception_message) == ("KeyError", "'shop.charge'")
    found = dropped_failure(None, "too late")
    assert (found.exception_type, found.exception_message) == (None, "too late")
    assert dropped_failure(ValueError(), "unreadable").exception_message == "unreadable"


def test_a_retry_that_cannot_be_published_is_no_rejection() -> None:
    """``Task.retry`` rejects the message then, without a word about itself."""
    app = an_app(
        broker_url="redis://127.0.0.1:1/0",
        broker_transport_options={"max_retries": 1, "interval_start": 0, "interval_step": 0},
    )

    @app.task(bind=True, name="unpublished", max_retries=2, lazy=False, shared=False)
    def unpublished(self: Task) -> None:
        raise self.retry(exc=SoldOutError("only 3 left"), retry=False)

    found = traced(unpublished, retries=0)
    assert found.end is not None
    assert found.end.outcome is Outcome.REJECTED
    assert found.end.retry_not_published
    own = end(Reject("bad", requeue=False))
    assert not own.retry_not_published


@pytest.mark.parametrize("with_cause", [True, False])
def test_a_task_whose_retries_are_spent_is_not_a_failed_one(*, with_cause: bool) -> None:
    """``Task.retry`` raises the task's own exception then; its frame in the traceback shows it."""
    app = an_app()

    @app.task(bind=True, name="retrying", max_retries=2, lazy=False, shared=False)
    def retrying(self: Task) -> None:
        raise self.retry(exc=SoldOutError("only 3 left") if with_cause else None)

    found = traced(retrying, retries=2)
    assert found.end is not None
    assert found.end.outcome is Outcome.FAILED
    assert found.end.retries_spent
    expected = SoldOutError if with_cause else MaxRetriesExceededError
    assert (found.exception_type or "").endswith(expected.__name__)


def test_autoretry_that_is_spent_is_not_a_failure() -> None:
    """``autoretry_for`` goes through ``Task.retry`` too."""
    app = an_app()

    @app.task(name="auto", autoretry_for=(ValueError,), max_retries=1, lazy=False, shared=False)
    def auto() -> None:
        raise SoldOutError("only 3 left")

    found = traced(auto, retries=1)
    assert found.end is not None
    assert found.end.retries_spent
    assert found.exception_message == "only 3 left"


def test_a_failure_in_a_retry_is_no_spent_retry() -> None:
    """The last attempt may die of something that is not retried."""
    app = an_app()

    @app.task(name="failing", autoretry_for=(ValueError,), max_retries=1, lazy=False, shared=False)
    def failing() -> None:
        raise KeyError("other")

    found = traced(failing, retries=1)
    assert found.end is not None
    assert not found.end.retries_spent


def test_a_retry_whose_result_cannot_be_stored_is_no_spent_retry() -> None:
    """The retry is published; then the result backend fails, in a traceback that shows both."""
    app = an_app()

    @app.task(bind=True, name="unstored", max_retries=2, lazy=False, shared=False)
    def unstored(self: Task) -> None:
        raise self.retry()

    def refuse(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("Connection refused")

    app.backend.mark_as_retry = refuse
    with pytest.warns(RuntimeWarning, match="Exception raised outside body"):
        found = traced(unstored, retries=0)
    assert found.exception_message == "Connection refused"
    assert "in retry" in (found.traceback or "")
    assert found.end is not None
    assert found.end.outcome is Outcome.FAILED
    assert not found.end.retries_spent


def test_a_function_of_the_application_named_retry_is_no_spent_retry() -> None:
    """Only Celery's own frame counts."""
    app = an_app()

    def retry() -> None:
        raise KeyError("other")

    @app.task(name="own", lazy=False, shared=False)
    def own() -> None:
        retry()

    found = traced(own, retries=0)
    assert found.end is not None
    assert not found.end.retries_spent


def test_celery_still_hands_the_worker_what_we_describe() -> None:
    """The request's handler of failures takes one report, whose exception we read."""
    assert "exc_info" in Request.on_failure.__code__.co_varnames
