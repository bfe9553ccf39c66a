"""Filters: which letters an operation is about."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from builders import NOW, a_letter
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import DLQError
from celery_dlq.filters import LetterFilter
from celery_dlq.record import Reason

LETTER = a_letter(
    id="letter-1",
    reason=Reason.FAILED,
    task_name="shop.charge",
    fingerprint="abc123",
    exception_type="shop.errors.SoldOut",
    exception_message="only 3 left",
    description="no such article",
    worker_hostname="celery@web-1",
    dead_lettered_at=NOW,
    body=b'[["\xc3\xbcber 9000"], {}, {}]',
)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"ids": frozenset({"letter-1", "x"})}, True),
        ({"ids": frozenset({"x"})}, False),
        ({"ids": frozenset()}, False),
        ({"reason": "failed"}, True),
        ({"reason": Reason.FAILED}, True),
        ({"reason": Reason.REJECTED}, False),
        ({"task_name": "shop.charge"}, True),
        ({"task_name": "shop"}, False),
        ({"fingerprint": "abc123"}, True),
        ({"fingerprint": "abc"}, True),
        ({"fingerprint": "bc1"}, False),
        ({"exception_type": "shop.errors.SoldOut"}, True),
        ({"exception_type": "SoldOut"}, True),
        ({"exception_type": "errors.SoldOut"}, False),
        ({"exception_type": ""}, False),
        ({"worker_hostname": "celery@web-1"}, True),
        ({"worker_hostname": "web-1"}, False),
        ({"since": NOW}, True),
        ({"since": NOW + SECOND}, False),
        ({"until": NOW}, False),
        ({"until": NOW + SECOND}, True),
        ({"grep": "such article"}, True),
        ({"grep": "3 left"}, True),
        ({"grep": "über 9000"}, True),
        ({"grep": "SUCH"}, False),
        ({"grep": "\udcff"}, False),
        ({"reason": "failed", "task_name": "shop.refund"}, False),
        ({"reason": "failed", "task_name": "shop.charge", "fingerprint": "a"}, True),
    ],
)
def test_a_letter_fits_when_every_field_that_is_set_fits(
    fields: dict[str, Any], *, fits: bool
) -> None:
    """Fields narrow together; the end of a time span is open."""
    assert LetterFilter(**fields).matches(LETTER) is fits


ESCAPED = json.dumps([['über 9000 \N{PILE OF POO} a/b "c"'], {}, {}]).encode()


@pytest.mark.parametrize(
    ("text", "body", "fits"),
    [
        ("über 9000", ESCAPED, True),
        ("\N{PILE OF POO}", ESCAPED, True),
        ("\N{PILE OF POO} a/b", ESCAPED.replace(b"/", b"\\/"), True),
        ('"c"', ESCAPED, True),
        ("über", rb'"\u00FCber"', True),
        ("über", "über".encode(), True),
        ("uber", ESCAPED, False),
        ("9.00", ESCAPED, False),
        ("a\nb", rb'"a\nb"', True),
        ("", b"", True),
    ],
)
def test_text_is_found_however_json_spells_it(text: str, body: bytes, *, fits: bool) -> None:
    """Python's own json writes non-ASCII as escapes; other writers do not."""
    assert LetterFilter(grep=text).matches(a_letter(body=body, description="")) is fits


TIMES = (None, NOW, NOW + SECOND)
WINDOWS = [(a, b) for a in TIMES for b in TIMES if a is None or b is None or a <= b]


def a_filter(window: tuple[datetime | None, datetime | None], **changes: Any) -> LetterFilter:
    """A filter for what died in a time."""
    return LetterFilter(since=window[0], until=window[1], **changes)


FILTERS = st.builds(
    a_filter,
    st.sampled_from(WINDOWS),
    reason=st.sampled_from([None, "failed", Reason.REJECTED]),
    task_name=st.sampled_from([None, "shop.charge", "x"]),
    fingerprint=st.sampled_from([None, "abc", "f"]),
    exception_type=st.sampled_from([None, "SoldOut", "ValueError", ""]),
    worker_hostname=st.sampled_from([None, "celery@web-1", "w"]),
    grep=st.sampled_from([None, "über", "article", "nope"]),
    ids=st.sampled_from([None, frozenset({"letter-1"}), frozenset()]),
)


@given(FILTERS)
def test_a_letter_and_its_stored_fields_fit_alike(where: LetterFilter) -> None:
    """A scan reads raw fields; it must mean the same."""
    for letter in (LETTER, a_letter(exception_type=None, worker_hostname=None)):
        raw = {name.encode(): value for name, value in letter.to_fields().items()}
        assert where.matches_fields(raw) is where.matches(letter)


@given(FILTERS)
def test_a_filter_survives_json(where: LetterFilter) -> None:
    """A job that is resumed means the same letters."""
    assert LetterFilter.from_json(json.loads(json.dumps(where.to_json()))) == where


def test_a_time_that_ends_before_it_begins_is_refused() -> None:
    """As ages the two are easily swapped, and an export would never find anything."""
    with pytest.raises(DLQError, match="expected since to be before until"):
        LetterFilter(since=NOW + SECOND, until=NOW)


def test_what_is_no_letter_fits_no_time() -> None:
    """A scan over broken entries goes on."""
    assert not LetterFilter(since=NOW).matches_fields({b"dead_lettered_at": b"soon"})
    assert not LetterFilter(until=NOW).matches_fields({})


def test_a_letter_without_an_exception_fits_no_exception() -> None:
    """A missing value equals nothing."""
    letter = a_letter(exception_type=None, exception_message=None)
    assert not LetterFilter(exception_type="ValueError").matches(letter)
    assert not LetterFilter(grep="nowhere").matches(letter)


def test_a_filter_is_true_when_it_narrows() -> None:
    """Commands ask before they touch all letters."""
    assert not LetterFilter()
    assert LetterFilter(ids=frozenset())
    assert LetterFilter(grep="")


@pytest.mark.parametrize("reason", ["boredom", "", "FAILED", 5])
def test_an_unknown_reason_is_refused_with_the_known_ones(reason: Any) -> None:
    """A misspelt reason would silently match nothing."""
    with pytest.raises(DLQError, match="expected reason to be one of adopted, expired") as raised:
        LetterFilter(reason=reason)
    assert str(raised.value).endswith(f"got {str(reason)!r}")


@pytest.mark.parametrize("name", ["since", "until"])
def test_a_naive_time_is_refused(name: str) -> None:
    """A time without a zone would be another moment on another machine."""
    with pytest.raises(ValueError, match=f"expected {name} to be an aware datetime"):
        LetterFilter(**{name: datetime(2026, 1, 1)})  # noqa: DTZ001 - naive on purpose
