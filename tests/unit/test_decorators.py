"""Decorators and errors that the author of a task writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import billiard.reduction
import pytest
from builders import an_app
from celery import Task, _state, shared_task
from celery.exceptions import NotRegistered, Reject
from celery.local import Proxy
from celery.utils.serialization import get_pickleable_exception, get_pickled_exception

from celery_dlq.decorators import RejectToDLQ, dead_letter_policy
from celery_dlq.errors import SettingsError
from celery_dlq.policies.policy import Policy, policy_of

POLICY = Policy(max_deliveries=3)


def a_function() -> Callable[[int], int]:
    """Make a function of its own, which no other test has marked."""

    def charge(order_id: int) -> int:
        return order_id

    return charge


def the_task(app: Any, name: str) -> Any:
    """The registered task, as a worker sees it."""
    app.finalize()
    return app.tasks[name]


@pytest.mark.parametrize("given", [a_function(), 3])
def test_a_decorator_without_brackets_or_names_says_what_to_write(given: Any) -> None:
    """One line, when the module is imported."""
    with pytest.raises(SettingsError, match=r"write @dead_letter_policy\(max_deliveries=3\)$"):
        dead_letter_policy(given)


def test_the_decorator_works_below_app_task() -> None:
    """The policy is on the function that becomes a task."""
    app = an_app()
    app.task(name="below", shared=False)(dead_letter_policy(max_deliveries=3)(a_function()))
    assert policy_of(the_task(app, "below")) == POLICY


def test_the_decorator_works_above_app_task() -> None:
    """The policy is on a task that Celery has not made yet, and does not make it."""
    app = an_app()
    lazy = app.task(name="above", shared=False)(a_function())
    assert dead_letter_policy(max_deliveries=3)(lazy) is lazy
    assert not app.configured
    assert policy_of(the_task(app, "above")) == POLICY


def test_the_decorator_works_above_a_task_that_is_made() -> None:
    """``lazy=False`` gives the task itself."""
    app = an_app()
    made = app.task(name="made", shared=False, lazy=False)(a_function())
    assert dead_letter_policy(max_deliveries=3)(made) is made
    assert policy_of(the_task(app, "made")) == POLICY


@pytest.mark.parametrize("options", [{"bind": True}, {"autoretry_for": (KeyError,)}])
@pytest.mark.parametrize("above", [True, False])
def test_the_decorator_works_with_options_that_wrap_the_function(
    options: dict[str, Any], *, above: bool
) -> None:
    """Bound and autoretried tasks run a wrapper; the policy shows through it."""
    app, mark = an_app(), dead_letter_policy(max_deliveries=3)
    make = app.task(name="wrapped", shared=False, **options)
    if above:
        mark(make(a_function()))
    else:
        make(mark(a_function()))
    assert policy_of(the_task(app, "wrapped")) == POLICY


@pytest.mark.parametrize("above", [True, False])
def test_the_decorator_works_with_shared_task(*, above: bool) -> None:
    """Reusable Django apps do not know the Celery app."""
    name, mark = f"shared-{uuid4()}", dead_letter_policy(max_deliveries=3)
    if above:
        mark(shared_task(name=name)(a_function()))
    else:
        shared_task(name=name)(mark(a_function()))
    assert policy_of(the_task(an_app(), name)) == POLICY


def test_a_shared_task_of_an_app_that_is_finalized_already_gets_its_policy() -> None:
    """A module that a worker imports late, after the policies of other tasks were asked for."""
    early, late = f"early-{uuid4()}", f"late-{uuid4()}"
    app, mark = an_app(), dead_letter_policy(max_deliveries=3)
    mark(shared_task(name=early)(a_function()))
    assert policy_of(the_task(app, early)) == POLICY
    mark(shared_task(name=late)(a_function()))
    assert policy_of(the_task(app, late)) == POLICY
    assert policy_of(the_task(an_app(), early)) == POLICY


def test_a_shared_task_is_found_though_the_current_app_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closed app gets no shared tasks any more, and may still be the current one."""
    closed = an_app()
    closed.finalize()
    closed.close()
    monkeypatch.setattr(_state._tls, "current_app", closed)
    name = f"shared-{uuid4()}"
    dead_letter_policy(max_deliveries=3)(shared_task(name=name)(a_function()))
    assert policy_of(the_task(an_app(), name)) == POLICY
    assert _state._tls.current_app is closed


def test_the_decorator_works_on_a_task_class_and_its_heirs() -> None:
    """A base class guards all tasks made from it; a subclass may have its own policy."""

    @dead_letter_policy(max_deliveries=3)
    class Base(Task):
        name = "base"

        def run(self) -> None:
            """Do nothing."""

    @dead_letter_policy(max_deliveries=1)
    class Heir(Base):
        name = "heir"

    app = an_app()
    app.register_task(Base())
    app.register_task(Heir())
    app.task(name="function", shared=False, base=Base)(a_function())
    assert policy_of(the_task(app, "base")) == POLICY
    assert policy_of(the_task(app, "heir")) == Policy(max_deliveries=1)
    assert policy_of(the_task(app, "function")) == POLICY


def test_a_task_without_the_decorator_has_no_policy() -> None:
    """Nothing is guarded by accident."""
    app = an_app()
    app.task(name="plain", shared=False)(a_function())
    assert policy_of(the_task(app, "plain")) is None


def test_the_policy_of_a_lazy_task_is_not_that_of_a_namesake_in_another_app() -> None:
    """Two apps in one process may both have a task ``charge``."""
    one, other = an_app(), an_app()
    dead_letter_policy(max_deliveries=3)(one.task(name="namesake", shared=False)(a_function()))
    other.task(name="namesake", shared=False)(a_function())
    assert policy_of(the_task(other, "namesake")) is None
    assert policy_of(the_task(one, "namesake")) == POLICY


def test_a_shared_task_that_the_current_app_has_not_got_is_passed_over() -> None:
    """It belongs to another app of this process, perhaps to one that is gone."""

    def gone() -> object:
        raise NotRegistered("gone")

    dead_letter_policy(max_deliveries=3)(Proxy(gone))
    app = an_app()
    app.task(name="present", shared=False)(a_function())
    assert policy_of(the_task(app, "present")) is None


def test_the_decorated_function_is_given_back() -> None:
    """It can still be called and tested as what it is."""
    function = a_function()
    assert dead_letter_policy(max_deliveries=3)(function) is function
    assert function(7) == 7


@pytest.mark.parametrize("keys", [{"max_deliveries": 0}, {"max_delivery": 3}])
def test_a_bad_policy_is_refused_where_it_is_written(keys: dict[str, Any]) -> None:
    """The error comes at the import of the module, before any decoration."""
    with pytest.raises(SettingsError, match="dead_letter_policy"):
        dead_letter_policy(**keys)


def test_a_rejection_carries_its_description() -> None:
    """The author's text is what the operator reads."""
    rejection = RejectToDLQ("no such order")
    assert rejection.description == str(rejection) == "no such order"
    assert isinstance(rejection, Reject)


def test_a_rejection_is_never_requeued() -> None:
    """Celery must not give the message back, whatever the arguments."""
    assert RejectToDLQ("x", requeue=True).requeue is False


@pytest.mark.parametrize(("description", "shown"), [("", ""), (17, "17"), (KeyError("a"), "'a'")])
def test_any_description_becomes_text(description: Any, shown: str) -> None:
    """``raise RejectToDLQ(exc)`` is what people write."""
    assert RejectToDLQ(description).description == shown


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_rejection_survives_pickling(protocol: int) -> None:
    """It travels from the pool child to the worker."""
    copy = pickle.loads(pickle.dumps(RejectToDLQ("no such order"), protocol))
    assert type(copy) is RejectToDLQ
    assert (copy.description, copy.requeue) == ("no such order", False)


def test_a_rejection_survives_the_picklers_of_the_pool() -> None:
    """Billiard's pickler and Celery's check for picklable exceptions both pass it on."""
    rejection = RejectToDLQ("no such order")
    assert get_pickleable_exception(rejection) is rejection
    assert get_pickled_exception(rejection) is rejection
    sent = billiard.reduction.ForkingPickler.dumps(rejection)
    assert pickle.loads(sent).description == "no such order"
