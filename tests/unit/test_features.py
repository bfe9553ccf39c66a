"""What messages are compared by: every value, exact, and bounded whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import a_letter
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters.comparison import (
    MAX_PAIRS,
    MAX_VALUE_CHARS,
    UNREAD,
    FeatureValue,
    pairs_of,
)
from celery_dlq.letters.record import DeadLetter

DEEP = 100_000


def pairs(letter: DeadLetter) -> set[FeatureValue]:
    """The pairs of a letter as it is stored."""
    fields = letter.to_fields()
    return pairs_of(lambda name: fields.get(name, b"").decode())


def arguments(args: str = "[]", kwargs: str = "{}") -> set[FeatureValue]:
    """The pairs of arguments, given as JSON text."""
    found = pairs(a_letter(args_json=args, kwargs_json=kwargs))
    return {pair for pair in found if pair[0].startswith(("args", "kwargs"))}


def test_a_message_is_its_place_and_its_task() -> None:
    """What is not known is left out, and so is the time; that arguments are missing is kept."""
    found = pairs(a_letter(worker_hostname="celery@a", release="v7", retries=2, args_json=None))
    assert found == {
        ("host", "celery@a"),
        ("release", "v7"),
        ("queue", "orders"),
        ("retries", "2"),
        ("task", "shop.charge"),
        UNREAD,
    }


def test_arguments_are_looked_into_three_levels_deep() -> None:
    """An argument was given, and has a value; parts of objects and items of lists have theirs."""
    kwargs = '{"customer": {"kind": "vip", "at": {"x": [1.50, null]}}, "tags": ["a", "b", "a"]}'
    assert arguments('[7, {"sku": true}]', kwargs) == {
        ("args[0]", None),
        ("args[0]", "7"),
        ("args[1]", None),
        ("args[1].sku", None),
        ("args[1].sku", "true"),
        ("kwargs.customer", None),
        ("kwargs.customer.kind", None),
        ("kwargs.customer.kind", "vip"),
        ("kwargs.customer.at", None),
        ("kwargs.customer.at.x", None),
        ("kwargs.customer.at.x[]", None),
        ("kwargs.customer.at.x[]", "1.50"),
        ("kwargs.customer.at.x[]", "null"),
        ("kwargs.tags", None),
        ("kwargs.tags[]", None),
        ("kwargs.tags[]", "a"),
        ("kwargs.tags[]", "b"),
    }


@pytest.mark.parametrize("number", ["12345678901234567890123", "0.10", "1e400", "-0", "9" * 199])
def test_numbers_are_what_was_written(number: str) -> None:
    """Two ids that a float would make equal stay two."""
    assert ("args[0]", number) in arguments(f"[{number}]")


@pytest.mark.parametrize(
    "text", ["not json", "[" * DEEP, '{"a":' * DEEP, "9" * DEEP, '"a"', "7", "null", "", "[1", "{]"]
)
def test_odd_arguments_are_no_values(text: str) -> None:
    """What is not JSON, too deep, too long, or no arguments is left out, and that is known."""
    assert arguments(text, text) == set()
    assert UNREAD in pairs(a_letter(args_json=text))
    assert UNREAD in pairs(a_letter(kwargs_json=text))


def test_a_flood_of_values_is_cut() -> None:
    """Neither many arguments nor long or deep ones make many or long pairs."""
    many = json.dumps({f"{n}": n for n in range(2_000)})
    deep = "[[" + "[" * 500 + "]" * 500 + "]]"
    wide = json.dumps([[{"k": "v"}] * 2_000])
    cut = pairs(a_letter(kwargs_json=many))
    assert len(cut) == MAX_PAIRS
    assert UNREAD in cut
    assert UNREAD not in pairs(a_letter(kwargs_json='{"a": 1}'))
    for text in (deep, wide, json.dumps(["x" * 60_000]), json.dumps([{"y" * 9_000: {"z": 1}}])):
        found = arguments(text)
        assert len(found) >= 2
        assert all(len(part or "") <= MAX_VALUE_CHARS for pair in found for part in pair)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(ANY, ANY)
def test_any_json_is_read_and_bounded(args: Any, kwargs: Any) -> None:
    """Nothing that a publisher may write raises or grows."""
    texts = {"args_json": json.dumps(args), "kwargs_json": json.dumps(kwargs)}
    found = pairs_of(lambda name: texts.get(name, "9" * 5_000))
    assert len(found) <= MAX_PAIRS
    assert all(len(part or "") <= MAX_VALUE_CHARS for pair in found for part in pair)
