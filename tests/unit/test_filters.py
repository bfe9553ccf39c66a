"""Filters: which letters an operation is about."""

from __future__ import annotations

import json
import pickle
import time
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest
from builders import NOW, a_letter
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import Reason

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
    kwargs_json='{"tenant": 42, "day": "2026-01-31"}',
    release="2026.3",
    root_id="root-1",
    group_id="group-1",
    deliveries=3,
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
        ({"release": "2026.3"}, True),
        ({"release": "2026"}, False),
        ({"root_id": "root-1"}, True),
        ({"root_id": "root"}, False),
        ({"group_id": "group-1"}, True),
        ({"group_id": "root-1"}, False),
        ({"min_deliveries": 3}, True),
        ({"min_deliveries": 4}, False),
        ({"conditions": ("kwargs.tenant=42",)}, True),
        ({"conditions": ("kwargs.tenant=42", "kwargs.day<2026-02")}, True),
        ({"conditions": ("kwargs.tenant=42", "kwargs.day>2026-02")}, False),
        ({"conditions": "kwargs.tenant=43"}, False),
        ({"conditions": ("kwargs.tenant=42",), "reason": "rejected"}, False),
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
    release=st.sampled_from([None, "2026.3", "x"]),
    root_id=st.sampled_from([None, "root-1", "x"]),
    group_id=st.sampled_from([None, "group-1"]),
    min_deliveries=st.sampled_from([None, 1, 3, 4]),
    conditions=st.sampled_from(
        [None, (), ("kwargs.tenant=42",), ("kwargs.tenant=42", "args[0]!=1"), ("headers.a=1",)]
    ),
)


def test_one_id_is_that_id() -> None:
    """As a text, too: it does not find each letter whose id is a part of it."""
    assert LetterFilter(ids="letter-1").matches(LETTER)  # type: ignore[arg-type]
    assert not LetterFilter(ids="letter-10").matches(LETTER)  # type: ignore[arg-type]
    assert LetterFilter(ids=["letter-1"]).matches(LETTER)  # type: ignore[arg-type]


@given(FILTERS)
def test_a_letter_and_its_stored_fields_fit_alike(where: LetterFilter) -> None:
    """A scan reads raw fields; it must mean the same."""
    for letter in (LETTER, a_letter(exception_type=None, worker_hostname=None, deliveries=0)):
        raw = {name.encode(): value for name, value in letter.to_fields().items()}
        assert where.matches_fields(raw) is where.matches(letter)


@given(FILTERS)
def test_a_filter_survives_json(where: LetterFilter) -> None:
    """A job that is resumed means the same letters, and so does a task of Spark."""
    assert LetterFilter.from_json(json.loads(json.dumps(where.to_json()))) == where
    copy = pickle.loads(pickle.dumps(where))
    assert (copy, hash(copy)) == (where, hash(where))


@given(FILTERS)
def test_a_filter_survives_a_url(where: LetterFilter) -> None:
    """A page that is shared or asked for again shows the same letters."""
    if where.ids == frozenset() or where.exception_type == "":
        with pytest.raises(DLQError, match="not to be empty in a URL"):
            where.to_query()
        return
    assert LetterFilter.from_query(parse_qs(urlencode(where.to_query(), doseq=True))) == where


def test_a_form_leaves_out_what_nobody_filled_in() -> None:
    """Browsers send empty texts for empty fields, and times without an offset."""
    form = "task_name=&since=2026-01-31T18:00&conditions=&conditions=kwargs.a%3D1&min_deliveries=2"
    assert LetterFilter.from_query(parse_qs(form, keep_blank_values=True)) == LetterFilter(
        since=datetime(2026, 1, 31, 18, tzinfo=timezone.utc),
        conditions=("kwargs.a=1",),
        min_deliveries=2,
    )
    assert not LetterFilter.from_query({"ids": [""], "conditions": [], "grep": ""})
    assert LetterFilter.from_query({"task_name": "shop.charge"}).task_name == "shop.charge"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"tsk": ["a"]}, r"the fields of a filter \(ids, reason, .*\), got 'tsk'"),
        ({"reason": ["failed", "expired"]}, "expected reason once, got it 2 times"),
        ({"reason": ["bored"]}, "expected reason to be one of"),
        ({"since": ["yesterday"]}, "expected since to be an ISO 8601 time, got 'yesterday'"),
        ({"until": ["2026-13-01"]}, "expected until to be an ISO 8601 time"),
        ({"min_deliveries": ["many"]}, "expected min_deliveries to be .* 1 or more, got 'many'"),
        ({"min_deliveries": ["0"]}, "expected min_deliveries to be .* 1 or more, got 0"),
        ({"min_deliveries": ["9" * 5000]}, "expected min_deliveries to be .* 1 or more"),
        ({"conditions": ["kwargs.a"]}, "of the condition 'kwargs.a'"),
    ],
)
def test_a_malformed_query_is_refused_by_the_name_of_its_field(
    query: dict[str, list[str]], message: str
) -> None:
    """A field that was passed over would choose more letters than the page says."""
    with pytest.raises(DLQError, match=message):
        LetterFilter.from_query(query)


@pytest.mark.parametrize("least", [0, -1, True, 1.5, "3"])
def test_min_deliveries_is_a_number_of_deliveries(least: Any) -> None:
    """Zero would narrow nothing, and yet count as a filter."""
    with pytest.raises(DLQError, match="expected min_deliveries to be a whole number of 1 or more"):
        LetterFilter(min_deliveries=least)


def test_a_time_that_ends_before_it_begins_is_refused() -> None:
    """As ages the two are easily swapped, and an export would never find anything."""
    with pytest.raises(DLQError, match="expected since to be before until"):
        LetterFilter(since=NOW + SECOND, until=NOW)


def test_what_is_no_letter_fits_no_time() -> None:
    """A scan over broken entries goes on."""
    assert not LetterFilter(since=NOW).matches_fields({b"dead_lettered_at": b"soon"})
    assert not LetterFilter(until=NOW).matches_fields({})
    assert not LetterFilter(min_deliveries=1).matches_fields({b"deliveries": b"often"})
    assert not LetterFilter(conditions=("kwargs.a!=1",)).matches_fields({b"mood": b"\xff"})


def test_a_letter_without_an_exception_fits_no_exception() -> None:
    """A missing value equals nothing."""
    letter = a_letter(exception_type=None, exception_message=None)
    assert not LetterFilter(exception_type="ValueError").matches(letter)
    assert not LetterFilter(grep="nowhere").matches(letter)


def test_a_filter_is_true_when_it_narrows() -> None:
    """Commands ask before they touch all letters."""
    assert not LetterFilter()
    assert not LetterFilter(conditions=())
    assert LetterFilter(ids=frozenset())
    assert LetterFilter(grep="")


@pytest.mark.parametrize("reason", ["boredom", "", "FAILED", 5])
def test_an_unknown_reason_is_refused_with_the_known_ones(reason: Any) -> None:
    """A misspelt reason would silently match nothing."""
    known = ", ".join(sorted(Reason))
    with pytest.raises(DLQError, match=f"expected reason to be one of {known}") as raised:
        LetterFilter(reason=reason)
    assert str(raised.value).endswith(f"got {str(reason)!r}")


@pytest.mark.parametrize("name", ["since", "until"])
def test_a_naive_time_is_refused(name: str) -> None:
    """A time without a zone would be another moment on another machine."""
    with pytest.raises(ValueError, match=f"expected {name} to be an aware datetime"):
        LetterFilter(**{name: datetime(2026, 1, 1)})  # noqa: DTZ001 - naive on purpose


@pytest.mark.parametrize("unit", ["a", "\\u0061", "\\\\"])
def test_a_search_takes_time_that_grows_with_the_body_alone(unit: str) -> None:
    """A text that nearly matches everywhere took minutes, in which the process did nothing else."""
    body = b'[["%b"], {}, {}]' % (unit * 200_000).encode()
    text = json.loads(f'"{unit}"') * 999 + "b"
    began = time.process_time()
    assert not LetterFilter(grep=text).matches(a_letter(body=body, description=""))
    assert time.process_time() - began < 2


def test_a_search_text_is_bounded() -> None:
    """Nobody types so much, and a URL that has it is no search."""
    LetterFilter(grep="a" * 1000)
    with pytest.raises(DLQError, match="at most 1000 characters, got 1001"):
        LetterFilter(grep="a" * 1001)
