"""What a policy says about exceptions: how it is written, found, and carried out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from builders import an_app
from celery import Celery, signals, states
from celery.app.trace import build_tracer
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded

from celery_dlq.config import Settings
from celery_dlq.errors import SettingsError
from celery_dlq.features.exceptions.observer import (
    ExceptionRules,
    exception_names,
    warn_of_exceptions,
)
from celery_dlq.features.exceptions.policy import ExceptionAction, ExceptionRule, why_not_here
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import PolicyCache
from celery_dlq.policies.table import PolicyTable
from celery_dlq.writing.failure import EXCEPTION_NAMES, failure_of

RETRY: dict[str, Any] = {"action": "retry", "max_retries": 2, "countdown": 0}
FATAL = {"action": "dead_letter", "dead_letter_queue": "fatal-DLQ"}


class BaseError(Exception):
    """Has a rule in most of these tests."""


class SubError(BaseError, ValueError):
    """Has none of its own."""


class SaidSo(Reject):
    """Of an app."""


class Outer:
    """Has an exception in it."""

    class InnerError(Exception):
        """Is found there."""


def parsed(exceptions: Any) -> Policy:
    """A policy with nothing else."""
    return Policy.parse({"exceptions": exceptions}, "dlq_queues['orders']")


# -- how it is written ---------------------------------------------------------------------


def test_rules_are_read_from_classes_and_dotted_names() -> None:
    """As issue trackers quote them, without an import; and back from JSON."""
    policy = parsed(
        {
            "requests.ConnectionError": RETRY,
            "shop.Fatal": FATAL,
            KeyError: {"action": "ignore"},
        }
    )
    assert dict(policy.of("exceptions").rules) == {
        "requests.ConnectionError": ExceptionRule(
            action=ExceptionAction.RETRY, max_retries=2, countdown=0.0
        ),
        "shop.Fatal": ExceptionRule(
            action=ExceptionAction.DEAD_LETTER, dead_letter_queue="fatal-DLQ"
        ),
        "KeyError": ExceptionRule(action=ExceptionAction.IGNORE),
    }
    assert Policy.parse(json.loads(json.dumps(policy.to_json())), "again") == policy
    assert Policy.parse({"exceptions": policy.of("exceptions")}, "again") == policy
    assert parsed({}) == Policy()
    assert policy.other_dead_letter_queues == ("fatal-DLQ",)
    assert hash(policy) == hash(parsed(policy.to_json()["exceptions"]))


@pytest.mark.parametrize(
    ("exceptions", "said"),
    [
        (3, "['exceptions'] to be a mapping of exceptions to actions, got 3"),
        (
            {"shop.Fatal": 1},
            "retry, dead_letter or ignore), or a mapping with one, got 1",
        ),
        (
            {"shop.Fatal": {}},
            "retry, dead_letter or ignore), or a mapping with one, got {}",
        ),
        ({"a.B": {"action": "rety"}}, "got 'rety'; did you mean 'retry'?"),
        ({"a.B": {"action": None}}, "one of retry, dead_letter, ignore, got None"),
        ({"a.B": {**RETRY, "max_retrys": 3}}, "got 'max_retrys'; did you mean 'max_retries'?"),
        ({"a.B": {"action": "ignore", "countdown": 1}}, "only known keys of the action ignore"),
        ({"a.B": {**RETRY, "dead_letter_queue": "x"}}, "only known keys of the action retry"),
        ({"a.B": {**RETRY, "max_retries": -1}}, "a whole number of 0 or more, got -1"),
        ({"a.B": {**RETRY, "backoff": "fixed"}}, "write autoretry_for and default_retry_delay at"),
        ({"a.B": {**RETRY, "countdown": "soon"}}, "14d, got 'soon'"),
        ({"a.B": {**FATAL, "dead_letter_queue": "{x}"}}, "without braces"),
        ({"a B": RETRY}, "or their dotted names, got 'a B'"),
        ({"a.B, c.D": RETRY}, "or their dotted names, got 'a.B, c.D'"),
        ({"": RETRY}, "exception classes or their dotted names, got ''"),
        ({int: RETRY}, "exception classes or their dotted names, got <class 'int'>"),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(exceptions: Any, said: str) -> None:
    """At start-up, in one line."""
    with pytest.raises(SettingsError) as raised:
        parsed(exceptions)
    assert said in str(raised.value)
    assert "dlq_queues['orders']['exceptions']" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ValueErorr", "it is no built-in exception; did you mean 'ValueError'?"),
        ("nope", "it is no built-in exception; write its module, too: shop.errors.SoldOut"),
        ("print", "it is no built-in exception"),
        ("SystemExit", "it ends the process"),
        (KeyboardInterrupt, "it ends the process"),
        ("Retry", "by it a task says itself"),
        (Reject, "by it a task says itself"),
        ("celery_dlq.RejectToDLQ", "by it a task says itself"),
    ],
)
def test_a_name_that_can_never_act_is_refused(name: Any, said: str) -> None:
    """With what is meant, or why."""
    with pytest.raises(SettingsError) as raised:
        Policy.parse({"exceptions": {name: "ignore"}}, "x")
    assert said in str(raised.value)
    assert "expected x['exceptions'] to be exceptions that a task can fail with" in str(
        raised.value
    )


@pytest.mark.parametrize("name", ["celery.exceptions.WorkerLostError", TimeLimitExceeded])
def test_what_a_worker_reports_can_only_be_ignored(name: Any) -> None:
    """No task raises it, so it is neither retried nor sent elsewhere."""
    assert parsed({name: "ignore"}).of("exceptions").names
    with pytest.raises(SettingsError, match="no task raises it"):
        parsed({name: {"action": "retry"}})
    with pytest.raises(SettingsError, match="no task raises it"):
        parsed({"WorkerLostError": "ignore"})


@pytest.mark.parametrize("name", ["BaseException", "Exception", "ExceptionGroup", SubError])
def test_a_name_that_may_act_is_taken(name: Any) -> None:
    """Bases, too: subclasses count."""
    if name == "ExceptionGroup" and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 has it first")
    policy = parsed({name: {"action": "ignore"}})
    assert [why_not_here(each) for each in policy.of("exceptions").names] == [""]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{__name__}.BaseErorr", f"there is no BaseErorr in {__name__}; did you mean 'BaseError'"),
        ("json.decodr.JSONDecodeError", "there is no module json.decodr here"),
        ("no_such_package.errors.SoldOut", "there is no module no_such_package here"),
        ("json.JSONDecoder", "it is no exception but type"),
        (f"{__name__}.SaidSo", "by it a task says itself"),
        ("json.JSONDecodeError", ""),
        (f"{__name__}.Outer.InnerError", ""),
        ("this.is_not_imported.YetError", ""),
        ("shop.test.<locals>.LocalError", ""),
    ],
)
def test_what_only_a_worker_can_know_is_warned_of(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that is there but not imported may have it: nothing is imported for it."""
    policy = parsed({name: {"action": "ignore"}})
    warn_of_exceptions("dlq_queues['orders']", policy)
    assert why in caplog.text
    assert bool(caplog.text) == bool(why)
    assert "this" not in sys.modules


def test_settings_take_a_policy_object_as_it_is() -> None:
    """Parsed or not."""
    policy = parsed({"shop.Fatal": FATAL})
    for given in (policy, Policy(features=policy.features)):
        settings = Settings.from_conf({"dlq_queues": {"orders": given}, "dlq_url": "redis://x"})
        assert settings.queues["orders"] == policy


def test_two_mappings_are_merged_by_exception() -> None:
    """The stronger policy wins for an exception that both name; others stay."""
    strong = parsed({"a.A": RETRY, "a.B": {"action": "ignore"}})
    weak = parsed({"a.B": RETRY, "a.C": FATAL})
    assert strong.over(weak) == parsed({"a.A": RETRY, "a.B": {"action": "ignore"}, "a.C": FATAL})
    assert strong.over(Policy()) == Policy().over(strong) == strong


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (ExceptionRule(action=ExceptionAction.RETRY), [1, 2, 4, 8]),
        (ExceptionRule(action=ExceptionAction.RETRY, countdown=30.0), [30, 60, 120]),
        (ExceptionRule(action=ExceptionAction.RETRY, countdown=0.2), [1, 1, 1, 2]),
        (ExceptionRule(action=ExceptionAction.RETRY, countdown=300.0), [300, 600, 600]),
        (ExceptionRule(action=ExceptionAction.RETRY, countdown=0.0), [0, 0]),
    ],
)
def test_a_retry_waits_as_the_rule_says(rule: ExceptionRule, waits: list[int]) -> None:
    """Whole seconds."""
    assert [rule.seconds_before_retry(retries, 0.999) for retries in range(len(waits))] == waits


def test_jitter_is_a_part_of_the_wait() -> None:
    """From none of it to all of it, as Celery's ``retry_jitter``."""
    rule = ExceptionRule(action=ExceptionAction.RETRY)
    assert (
        rule.seconds_before_retry(3, 0.0),
        rule.seconds_before_retry(3, 0.5),
        rule.seconds_before_retry(3, 0.9999),
    ) == (0, 4, 8)
    assert rule.seconds_before_retry(10**9, 0.9999) == 600  # the number comes over the wire


# -- how it is found -----------------------------------------------------------------------


def test_the_class_comes_before_its_bases() -> None:
    """In Python's own order."""
    here = __name__
    assert exception_names(SubError) == (
        f"{here}.SubError",
        f"{here}.BaseError",
        "ValueError",
        "Exception",
        "BaseException",
    )


def test_a_class_is_found_under_the_names_under_which_it_can_be_imported() -> None:
    """``json.JSONDecodeError`` is defined in ``json.decoder``; its place is that of the class."""
    names = exception_names(json.JSONDecodeError, ["json.JSONDecodeError", "ValueError", "json.x"])
    assert names[:3] == ("json.decoder.JSONDecodeError", "json.JSONDecodeError", "ValueError")
    soft = "celery.exceptions.SoftTimeLimitExceeded"
    assert soft in exception_names(SoftTimeLimitExceeded, [soft])


class HostileModule(ModuleType):
    """Imports, or raises, when it is asked for what it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "key", ["hostile.Error", "hostile.sub.Error", "", ".", "a..b", "x" * 10_000, "json.loads.x"]
)
def test_looking_up_a_name_imports_and_calls_nothing(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Names come from settings; modules may be lazy or worse."""
    monkeypatch.setitem(sys.modules, "hostile", HostileModule("hostile"))
    monkeypatch.setitem(sys.modules, "celery_dlq_none", None)  # type: ignore[arg-type]
    before = set(sys.modules)
    assert exception_names(KeyError, [key, "celery_dlq_none.X"])[0] == "KeyError"
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("exceptions", "action"),
    [
        ({SubError: RETRY, BaseError: FATAL}, ExceptionAction.RETRY),
        ({Exception: RETRY, BaseError: FATAL}, ExceptionAction.DEAD_LETTER),
        ({Exception: RETRY, BaseError: "ignore"}, ExceptionAction.IGNORE),
        ({SubError: RETRY, Exception: "ignore"}, ExceptionAction.RETRY),
        ({KeyError: RETRY}, None),
    ],
)
def test_the_most_specific_rule_counts(exceptions: Any, action: Any) -> None:
    """The name of an action is the short form of a rule."""
    rule = parsed(exceptions).of("exceptions").rule_of(exception_names(SubError))
    assert (rule.action if rule else None) is action


# -- how it is carried out -----------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose results are in memory."""
    made = an_app(result_backend="cache+memory://")
    with made.connection() as connection, connection.SimpleQueue("orders") as queue:
        queue.clear()  # the broker in memory is that of all tests
    yield made
    made.close()


def guarded(app: Celery, exceptions: Any, **policy: Any) -> ExceptionRules:
    """Install rules for one queue on all tasks of an app."""
    table = PolicyTable({"orders": Policy.parse({"exceptions": exceptions, **policy}, "x")})
    rules = ExceptionRules(PolicyCache(table, app.amqp.queues, "orders"))
    app.conf.task_default_queue = "orders"
    for task in app.tasks.values():
        rules.on_task(task)
    return rules


def run(app: Celery, task: Any, retries: int = 0) -> Any:
    """Run a task as a worker does; the state, and what was returned or raised."""
    tracer = build_tracer(task.name, task, app=app)
    request = {
        "id": "t-1",
        "retries": retries,
        "is_eager": False,
        "delivery_info": {"exchange": "", "routing_key": "orders"},
    }
    done = tracer("t-1", (), {}, request)
    return (done.info.state, done.retval) if done.info else (states.SUCCESS, done.retval)


def failing(app: Celery, exc: Exception, **options: Any) -> Any:
    """A task that raises."""

    @app.task(name=f"shop.{exc}", shared=False, **options)
    def fails() -> None:
        raise exc

    app.finalize()
    return app.tasks[fails.name]


def test_a_retry_is_celerys_own(app: Celery) -> None:
    """It is published with the next number, and Celery's signal is sent."""
    task, seen = failing(app, SubError("x")), []
    guarded(app, {BaseError: RETRY})
    retried = signals.task_retry.connect(lambda **more: seen.append(more["reason"]), weak=False)

    state, _info = run(app, task)

    signals.task_retry.disconnect(retried)
    assert state == states.RETRY
    assert isinstance(seen[0], Retry)
    assert isinstance(seen[0].exc, SubError)
    with app.connection() as connection, connection.SimpleQueue("orders") as queue:
        message = queue.get(timeout=1)
    assert (message.headers["id"], message.headers["retries"]) == ("t-1", 1)
    assert run(app, task, retries=2)[0] == states.FAILURE
    end = failure_of(run(app, task, retries=2)[1], ()).end
    assert end is not None
    assert end.retries_spent
    assert not hasattr(task, "override_max_retries")


@pytest.mark.parametrize(
    ("own", "rule", "policy", "last"),
    [(3, None, None, 3), (3, 5, None, 5), (3, 5, 4, 4), (3, None, 9, 3), (None, None, 2, 2)],
)
def test_the_lowest_limit_of_retries_counts(
    app: Celery, own: int | None, rule: int | None, policy: int | None, last: int
) -> None:
    """The rule's stands for the task's own; the policy's bounds both."""
    task = failing(app, SubError("x"), max_retries=own)
    guarded(app, {BaseError: {**RETRY, "max_retries": rule}}, max_retries=policy)
    assert run(app, task, retries=last - 1)[0] == states.RETRY
    assert run(app, task, retries=last)[0] == states.FAILURE


@pytest.mark.parametrize("action", [FATAL, {"action": "ignore"}])
def test_a_rule_beats_autoretry(app: Celery, action: Any) -> None:
    """Also where that takes any exception; the exception arrives as it was raised."""
    exc = SubError("x")
    task = failing(app, exc, autoretry_for=(Exception,))
    guarded(app, {BaseError: action})

    state, info = run(app, task)

    assert state == states.FAILURE
    assert info.exception is exc
    assert exc.__context__ is None
    assert exc.__cause__ is None
    assert "Decided" not in info.traceback


def test_autoretry_goes_on_with_what_no_rule_names(app: Celery) -> None:
    """And with its own limit."""
    task = failing(app, LookupError("x"), autoretry_for=(Exception,), max_retries=1)
    guarded(app, {BaseError: {**RETRY, "max_retries": 9}})
    assert run(app, task)[0] == states.RETRY
    assert run(app, task, retries=1)[0] == states.FAILURE


def test_a_retry_by_a_rule_beats_autoretry(app: Celery) -> None:
    """One retry is published, not two, also if it cannot be published."""
    task = failing(app, SubError("x"), autoretry_for=(Exception,), max_retries=0)
    guarded(app, {BaseError: RETRY})
    assert run(app, task)[0] == states.RETRY
    task.apply_async = lambda *_, **__: 1 / 0
    assert run(app, task)[0] == states.REJECTED


def test_a_task_that_says_itself_what_it_wants_is_obeyed(app: Celery) -> None:
    """``Reject`` is no failure; a ``retry()`` that refuses is the end."""

    @app.task(name="shop.gives_up", bind=True, max_retries=0, shared=False)
    def gives_up(self: Any) -> None:
        try:
            raise SubError("x")
        except SubError as exc:
            self.retry(exc=exc)

    rejecting = failing(app, Reject("no", requeue=False))
    guarded(app, {Exception: RETRY})
    assert run(app, rejecting)[0] == states.REJECTED
    assert run(app, app.tasks["shop.gives_up"])[0] == states.FAILURE


def test_a_direct_call_is_a_function_call(app: Celery) -> None:
    """No message, no retry."""
    task = failing(app, SubError("x"))
    guarded(app, {BaseError: RETRY})
    with pytest.raises(SubError):
        task()


def test_an_error_of_ours_leaves_the_exception_to_celery(app: Celery) -> None:
    """It is logged."""
    task = failing(app, SubError("x"))
    rules = guarded(app, {BaseError: RETRY})
    rules.place = lambda _request: 1 / 0  # type: ignore[assignment,return-value]
    state, info = run(app, task)
    assert (state, type(info.exception)) == (states.FAILURE, SubError)


def test_a_task_whose_limit_is_no_number_fails_with_its_own_exception(app: Celery) -> None:
    """What a rule would do cannot be found out."""
    task = failing(app, SubError("x"), max_retries="3")
    guarded(app, {BaseError: {"action": "retry"}}, max_retries=2)
    state, info = run(app, task)
    assert (state, type(info.exception)) == (states.FAILURE, SubError)


def test_a_later_worker_takes_over_and_an_end_leaves_celery_alone(app: Celery) -> None:
    """In one process, as tests have it; nothing is wrapped twice."""
    task = failing(app, SubError("x"))
    guarded(app, {BaseError: RETRY})
    wrapped = task.run
    second = guarded(app, {BaseError: {"action": "ignore"}})
    assert task.run is wrapped
    assert run(app, task)[0] == states.FAILURE
    second.close()
    state, info = run(app, task)
    assert state == states.FAILURE
    assert not hasattr(info, EXCEPTION_NAMES)


def test_a_task_is_left_as_it_is_without_exceptions_in_a_policy(app: Celery) -> None:
    """So that it costs nothing."""
    task = failing(app, SubError("x"))
    before = task.run
    guarded(app, None, max_deliveries=3)
    assert task.run == before


def test_the_names_go_with_a_failure_whose_exception_cannot(app: Celery) -> None:
    """The main process gets an instance of the nearest base class that can be pickled."""

    class LocalError(BaseError):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(text)

    task = failing(app, LocalError(1, "x"))
    guarded(app, {BaseError: FATAL})

    _state, info = run(app, task)

    assert type(info.exception) is BaseError
    end = failure_of(info, ()).end
    assert end is not None
    assert end.exception_names[:2] == (
        f"{__name__}.{LocalError.__qualname__}",
        f"{__name__}.BaseError",
    )


def test_a_result_that_cannot_be_stored_is_no_message_of_an_unknown_queue(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery reports it when the task's request is over: where it came from is not known then."""

    @app.task(name="shop.succeeds", shared=False)
    def succeeds() -> str:
        return "x"

    app.finalize()
    guarded(app, {BaseError: FATAL})

    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("the value is too large")

    monkeypatch.setattr(app.backend, "mark_as_done", refused)
    with pytest.warns(RuntimeWarning, match="the value is too large"):
        run(app, app.tasks["shop.succeeds"])

    assert "routing key" not in caplog.text
