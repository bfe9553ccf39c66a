"""Arguments of operations that are misspelt, at run time; `tests/typing` has them for mypy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
from celery import Celery
from fresh import fresh_conf

from celery_dlq import DeadLetters, DLQError, LetterFilter, dead_letter_policy
from celery_dlq.letters.filters import FilterFields
from celery_dlq.operating import OperatorMethods
from celery_dlq.operations.api import Operations
from celery_dlq.policies.keys import PolicyKeys
from celery_dlq.policies.policy import policy_keys


@pytest.fixture
def dlq() -> Iterator[DeadLetters]:
    """The operator's API on letters in memory."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(fresh_conf())
    yield DeadLetters(app)
    app.close()


@pytest.mark.parametrize(
    ("method", "options", "meant"),
    [
        ("redrive", {"ratee": 5}, "rate"),
        ("dry_run", {"tto_queue": "orders"}, "to_queue"),
        ("letters", {"fingerprnt": "c0ffee"}, "fingerprint"),
        ("entries", {"newest": True}, "newest_first"),
        ("tail", {"resaon": "failed"}, "reason"),
        ("count", {"task": "shop.charge"}, "task_name"),
        ("purge", {"limt": 1}, "limit"),
        ("discard", {"forver": True}, "forever"),
        ("differences", {"mots": 5}, "most"),
        ("trim", {"dryrun": True}, "dry_run"),
    ],
)
def test_a_misspelt_argument_is_named_with_the_one_that_is_meant(
    dlq: DeadLetters, method: str, options: Any, meant: str
) -> None:
    """Before anything is looked for."""
    (name,) = options
    text = f"arguments of {method}(), got '{name}'; did you mean '{meant}'?"
    with pytest.raises(DLQError, match=re.escape(text)):
        getattr(dlq, method)("orders-DLQ", **options)


@pytest.mark.parametrize(
    ("kind", "options", "meant"),
    [("redrive", {"ratee": 5}, "rate"), ("discard", {"limt": 1}, "limit")],
)
def test_a_misspelt_option_of_a_plan(dlq: DeadLetters, kind: str, options: Any, meant: str) -> None:
    """It has the options of the operation that is planned."""
    plans = Operations(dlq.assembly)
    with pytest.raises(DLQError, match=f"did you mean '{meant}'"):
        plans.plan(kind, "orders-DLQ", **options)


@pytest.mark.parametrize("where", ["kwargs.tenant=42", {"reason": "failed"}, True])
def test_a_filter_that_is_none_says_what_to_write(dlq: DeadLetters, where: Any) -> None:
    """The command's ``--where`` has another name here, and no traceback of ours."""
    for call in (dlq.letters, dlq.count, dlq.purge, dlq.redrive, dlq.differences):
        with pytest.raises(DLQError, match=r"expected where to be a LetterFilter.*conditions='kw"):
            call("orders-DLQ", where=where)


def test_a_filter_and_its_fields_are_not_given_together(dlq: DeadLetters) -> None:
    """One of them would be ignored, and more letters purged than were meant."""
    with pytest.raises(DLQError, match="got a filter and reason"):
        dlq.purge("orders-DLQ", LetterFilter(task_name="shop.charge"), reason="failed")


def test_the_keywords_that_types_know_are_those_that_are_taken() -> None:
    """They are written a second time for mypy."""
    assert [*FilterFields.__annotations__] == [*LetterFilter.__slots__]
    assert {*PolicyKeys.__annotations__} == {*policy_keys()}


def test_an_operation_has_the_signature_and_the_text_of_its_own() -> None:
    """For `help()` and for editors, though it is imported late."""
    assert "progress" in signature(DeadLetters.redrive).parameters
    assert "Exactly once" in (DeadLetters.redrive.__doc__ or "")


def test_each_method_of_operators_is_named_once_more_for_those_who_load_none() -> None:
    """`help()`, `dir()` and a worker know their names; only a look-up loads them."""
    named = {name for name in vars(OperatorMethods) if not name.startswith("_")}
    assert named <= {*dir(DeadLetters)}
    assert all(getattr(DeadLetters, name) for name in dir(DeadLetters) if not name.startswith("_"))


def test_policies_say_it_too(dlq: DeadLetters) -> None:
    """A decorator when its module is imported, an override before it is set."""
    misspelt: Any = {"max_delivery": 3}
    with pytest.raises(DLQError, match="did you mean 'max_deliveries'"):
        dead_letter_policy(**misspelt)
    with pytest.raises(DLQError, match="did you mean 'max_deliveries'"):
        dlq.override_policy("orders", timedelta(hours=1), **misspelt)
