"""JSON text that loses nothing and never fails."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters import json_codec

_ZONES = st.none() | st.sampled_from([timezone.utc, timezone(timedelta(hours=-3, minutes=-30))])
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.datetimes(timezones=_ZONES)
    | st.dates()
    | st.times(timezones=_ZONES)
    | st.decimals(allow_nan=False)
    | st.uuids()
)
VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


class Unprintable:
    """Has a ``repr`` that raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class HouseDate(date):
    """A date as other libraries subclass it."""


class HouseTime(time):
    """A time as other libraries subclass it."""


@given(value=VALUES)
def test_everything_a_message_may_hold_comes_back(value: Any) -> None:
    """Bytes, times, decimals and UUIDs survive at any depth, and so does what JSON knows."""
    assert json_codec.loads(json_codec.dumps(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\xff",
        datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc),
        datetime(2026, 1, 2),  # noqa: DTZ001 - message headers may be naive
        date(2026, 1, 2),
        time(3, 4, 5, 6),
        Decimal("1.10"),
        UUID(int=7),
    ],
)
def test_a_restored_value_has_its_type(value: object) -> None:
    """Equal is not enough: the type is the same too."""
    restored = json_codec.loads(json_codec.dumps({"x": value}))["x"]
    assert type(restored) is type(value)
    assert restored == value


@pytest.mark.parametrize(
    ("value", "plain"),
    [(HouseDate(2026, 1, 2), date(2026, 1, 2)), (HouseTime(3, 4), time(3, 4))],
)
def test_subclasses_of_dates_and_times_come_back_as_plain_ones(
    value: object, plain: object
) -> None:
    """Libraries subclass dates; such a value is still a date after a round trip."""
    assert json_codec.loads(json_codec.dumps(value)) == plain


def test_buffers_become_bytes() -> None:
    """A body part may arrive as a view of a buffer."""
    value = [bytearray(b"ab"), memoryview(b"cd")]
    assert json_codec.loads(json_codec.dumps(value)) == [b"ab", b"cd"]


def test_sets_become_lists() -> None:
    """JSON has no sets; their members are kept."""
    assert json_codec.loads(json_codec.dumps({"x": {1}, "y": frozenset({2})})) == {
        "x": [1],
        "y": [2],
    }


def test_an_unknown_type_is_kept_as_its_repr() -> None:
    """An operator can read it, and a letter is not lost for it."""
    assert json_codec.loads(json_codec.dumps({"x": complex(1, 2)})) == {"x": "(1+2j)"}


def test_an_unprintable_value_does_not_raise() -> None:
    """A broken ``__repr__`` is named instead."""
    shown = json_codec.loads(json_codec.dumps({"x": Unprintable()}))["x"]
    assert shown == "<unprintable Unprintable: repr raised RuntimeError>"


def test_a_structure_that_contains_itself_does_not_raise() -> None:
    """Cycles are kept as a readable repr."""
    cycle: dict[str, object] = {"name": "loop"}
    cycle["self"] = cycle
    assert json_codec.loads(json_codec.dumps(cycle)) == "{'name': 'loop', 'self': {...}}"


def test_a_structure_of_extreme_depth_does_not_raise() -> None:
    """Depth beyond the interpreter's limit is no reason to lose a letter."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert "RecursionError" in json_codec.dumps(deep)


def test_keys_of_odd_types_do_not_raise() -> None:
    """Values that JSON cannot name are kept as a readable repr."""
    assert json_codec.loads(json_codec.dumps({(1, 2): "x"})) == "{(1, 2): 'x'}"


def test_text_is_compact_and_not_escaped() -> None:
    """Stored headers are short, and people's names stay readable."""
    assert json_codec.dumps({"a": ["ü", 1]}) == '{"a":["ü",1]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_still_make_valid_json(value: float) -> None:
    """``NaN`` is no JSON: readers other than Python's would refuse the whole column."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = json_codec.dumps({"x": value})
    json.loads(text, parse_constant=refuse)
    assert repr(json_codec.loads(text)["x"]) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"__type__":"uuid","__value__":"not one"}',
        '{"__type__":"uuid","__value__":{"hex":"as kombu writes it"}}',
        '{"__type__":"datetime","__value__":17}',
        '{"__type__":"decimal","__value__":"x"}',
        '{"__type__":"bytes","__value__":"?"}',
        '{"__type__":"later","__value__":1}',
        '{"__type__":"bytes","__value__":"QQ==","more":1}',
        '{"__type__":[],"__value__":1}',
        '{"__type__":{"a":1},"__value__":1}',
    ],
)
def test_tags_that_cannot_be_restored_stay_as_they_are(text: str) -> None:
    """A user's own dictionary that looks like a tag is not an error."""
    assert json_codec.loads(text) == json.loads(text)


def test_text_that_is_not_json_is_a_value_error() -> None:
    """Callers catch one type."""
    with pytest.raises(ValueError, match="Expecting value"):
        json_codec.loads("nope")


def test_safe_repr_never_floods() -> None:
    """A huge value is cut, and the cut is seen."""
    shown = json_codec.safe_repr("x" * 50_000, limit=100)
    assert len(shown) == 100
    assert shown.endswith("…")


@pytest.mark.parametrize(
    "text",
    ["2026-03-01T12:00:00", "2026-03-01T12:00:00Z", "2026-03-01T12:00:00.0000000Z"],
)
def test_a_time_without_a_zone_is_in_utc(text: str) -> None:
    """As those with one: each reader of a time has the same rule."""
    assert json_codec.instant(text) == datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
