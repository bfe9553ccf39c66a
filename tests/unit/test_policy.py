"""Policies: how they are checked, how they combine, and what they never guard."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from celery_dlq.errors import SettingsError
from celery_dlq.features.exceptions.policy import ExceptionAction, ExceptionPolicy, ExceptionRule
from celery_dlq.letters.record import Reason
from celery_dlq.policies.checks import duration_seconds, qualified_name, seconds, suggestion
from celery_dlq.policies.policy import Policy


class Bill:
    """Holds an exception, as classes of an application do."""

    class UnpaidError(Exception):
        """An exception with a qualified name."""


def one_line(raised: pytest.ExceptionInfo[SettingsError]) -> str:
    """The text of an error, which must be one line."""
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_policy_takes_all_its_keys() -> None:
    """Every key is converted to the one unit it is kept in."""
    policy = Policy.parse(
        {
            "max_deliveries": 5,
            "max_retries": 0,
            "dead_letter_queue": "lost-orders",
            "default_delay": timedelta(minutes=1, milliseconds=500),
            "reasons": ["failed", Reason.REJECTED],
            "exceptions": {KeyError: "ignore", Bill.UnpaidError: "dead_letter"},
        },
        "dlq_queues['orders']",
    )
    assert policy == Policy(
        max_deliveries=5,
        max_retries=0,
        dead_letter_queue="lost-orders",
        default_delay=60.5,
        reasons=frozenset({Reason.FAILED, Reason.REJECTED}),
        features=(
            (
                "exceptions",
                ExceptionPolicy(
                    (
                        ("KeyError", ExceptionRule(action=ExceptionAction.IGNORE)),
                        (
                            f"{__name__}.Bill.UnpaidError",
                            ExceptionRule(action=ExceptionAction.DEAD_LETTER),
                        ),
                    )
                ),
            ),
        ),
    )


def test_none_means_not_set_here() -> None:
    """A key with ``None`` is as good as left out."""
    assert Policy.parse({"max_deliveries": None, "exceptions": None}, "x") == Policy()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_deliveries", 0, "a whole number of 1 or more"),
        ("max_deliveries", -1, "a whole number of 1 or more"),
        ("max_deliveries", 1.5, "a whole number of 1 or more"),
        ("max_deliveries", True, "a whole number of 1 or more"),
        ("max_deliveries", 10**400, "a whole number up to 1,000,000,000,000,000"),
        ("max_deliveries", "5", "a whole number of 1 or more"),
        ("max_retries", -1, "a whole number of 0 or more"),
        ("max_retries", [], "a whole number of 0 or more"),
        ("dead_letter_queue", "", "a name (text that is not empty)"),
        ("dead_letter_queue", " \n", "a name (text that is not empty)"),
        ("dead_letter_queue", 5, "a name (text that is not empty)"),
        ("dead_letter_queue", "a{b", "a queue name without braces"),
        ("dead_letter_queue", "a}b", "a queue name without braces"),
        ("default_delay", -0.1, "a duration of 0 to 268,435,455 seconds, RabbitMQ's bound"),
        (
            "default_delay",
            timedelta(seconds=-1),
            "a duration of 0 to 268,435,455 seconds, RabbitMQ's bound",
        ),
        ("default_delay", math.inf, "a duration of 0 to 268,435,455 seconds, RabbitMQ's bound"),
        ("default_delay", math.nan, "a duration of 0 to 268,435,455 seconds, RabbitMQ's bound"),
        pytest.param(
            "default_delay",
            10**400,
            "a duration of 0 to 268,435,455 seconds, RabbitMQ's bound",
            id="a number beyond floats",
        ),
        (
            "default_delay",
            "soon",
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        (
            "default_delay",
            True,
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        ("reasons", "failed", "a list of reasons"),
        ("reasons", 5, "a list of reasons"),
        ("exceptions", 5, "a mapping of exceptions to actions"),
        ("exceptions", {5: "ignore"}, "exception classes or their dotted names"),
        ("exceptions", {"": "ignore"}, "exception classes or their dotted names"),
        ("exceptions", {KeyError(): "ignore"}, "exception classes or their dotted names"),
    ],
)
def test_a_bad_value_says_what_was_expected_and_what_came(
    key: str, value: object, expected: str
) -> None:
    """One line names the place, the expectation and the value."""
    with pytest.raises(SettingsError) as raised:
        Policy.parse({key: value}, "dlq_queues['orders']")
    text = one_line(raised)
    assert text.startswith(f"expected dlq_queues['orders']['{key}'] to be {expected}, got ")


def test_a_value_of_many_lines_still_makes_one_line() -> None:
    """Some objects print themselves over many lines; an error stays one line."""

    class Table:
        def __repr__(self) -> str:
            return "Table(\n  1,\n  2)"

    with pytest.raises(SettingsError) as raised:
        Policy.parse({"max_deliveries": Table()}, "dead_letter_policy")
    assert "Table(" in one_line(raised)


@pytest.mark.parametrize("values", [5, None, "max_deliveries", ["max_deliveries"]])
def test_a_policy_must_be_a_mapping(values: Any) -> None:
    """``dlq_queues = {"orders": 5}`` is a mistake that people make."""
    with pytest.raises(SettingsError) as raised:
        Policy.parse(values, "dlq_queues['orders']")
    text = one_line(raised)
    assert text == (f"expected dlq_queues['orders'] to be a mapping of policy keys, got {values!r}")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("max_delivery", "did you mean 'max_deliveries'?"),
        ("max_retry", "did you mean 'max_retries'?"),
        ("dead_letter_que", "did you mean 'dead_letter_queue'?"),
        ("MAX_DELIVERIES", "expected one of "),
        (5, "expected one of "),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(key: object, hint: str) -> None:
    """A misspelt key would guard nothing, so it is an error with a suggestion."""
    with pytest.raises(SettingsError) as raised:
        Policy.parse({key: 3}, "dead_letter_policy")  # type: ignore[dict-item]
    text = one_line(raised)
    assert f"expected only known policy keys in dead_letter_policy, got {key!r}; {hint}" in text


def test_an_unknown_reason_is_refused_with_a_hint() -> None:
    """A list of reasons is closed."""
    with pytest.raises(SettingsError) as raised:
        Policy.parse({"reasons": ["failled"]}, "dead_letter_policy")
    assert one_line(raised) == (
        "expected only known reasons in dead_letter_policy['reasons'], got 'failled'; "
        "did you mean 'failed'?"
    )


def test_a_suggestion_lists_what_there_is_when_nothing_is_close() -> None:
    """A person who is far off gets the whole choice."""
    assert suggestion("zzz", ["b", "a"]) == "expected one of a, b"


def test_a_duration_may_be_a_number_or_a_timedelta() -> None:
    """Both are kept in seconds."""
    assert seconds("x", 2) == seconds("x", timedelta(seconds=2)) == 2.0


@pytest.mark.parametrize(
    ("cls", "name"),
    [(KeyError, "KeyError"), (Bill.UnpaidError, f"{__name__}.Bill.UnpaidError")],
)
def test_a_qualified_name_has_no_module_for_built_ins(cls: type, name: str) -> None:
    """Exceptions are named as tracebacks name them."""
    assert qualified_name(cls) == name


@pytest.mark.parametrize(
    ("policy", "name"),
    [(Policy(), "orders-DLQ"), (Policy(dead_letter_queue="lost-orders"), "lost-orders")],
)
def test_the_dead_letter_queue_has_a_name_by_default(policy: Policy, name: str) -> None:
    """``<queue>-DLQ``, unless it is named."""
    assert policy.dead_letter_queue_of("orders") == name


def test_a_policy_keeps_all_reasons_unless_it_names_some() -> None:
    """``reasons`` narrows; unset keeps every death."""
    assert all(Policy().keeps(reason) for reason in Reason)
    some = Policy(reasons=frozenset({Reason.FAILED}))
    assert [reason for reason in Reason if some.keeps(reason)] == [Reason.FAILED]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5h", 5400),
        ("30s", 30),
        (" 5m ", 300),
        ("2h", 7200),
        ("7d", 604800),
        ("1w", 604800),
        ("", None),
        ("h", None),
        ("-2h", None),
        ("2 h", None),
        ("2026-01-31", None),
    ],
)
def test_durations_are_read_from_texts(text: str, seconds: float | None) -> None:
    """The command line and overrides take the same texts."""
    assert duration_seconds(text) == seconds
