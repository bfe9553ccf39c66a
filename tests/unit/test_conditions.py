"""Conditions on arguments and headers: what is written, what holds, what is refused."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from builders import a_letter
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.utils.json import dumps

from celery_dlq.errors import DLQError
from celery_dlq.letters import conditions
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.packed import PackedFields
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import DeadLetter

KWARGS = {
    "tenant": 42,
    "name": "acme GmbH",
    "zip": "00042",
    "price": 9.5,
    "cost": "9.75",
    "word": "NaN",
    "on": True,
    "no": None,
    "a.b": {"c d": "deep"},
    "lines": [{"sku": "A1"}, {"sku": "B2"}],
    "empty": "",
    "day": "2026-01-31",
    "nan": float("nan"),
    "ünï": "x=1",
}
LETTER = a_letter(
    args_json=json.dumps([7, {"id": "7"}, [1, 2]]),
    kwargs_json=json.dumps(KWARGS),
    headers=json.dumps({"x-tenant": "acme", "retries": 3, "stamps": {"by": ["me"]}}),
)


def holds(text: str, letter: DeadLetter = LETTER) -> bool:
    """Whether one condition holds."""
    return LetterFilter(conditions=(text,)).matches(letter)


@pytest.mark.parametrize(
    "text",
    [
        "kwargs.tenant=42",
        "kwargs.tenant=42.0",
        "kwargs.tenant=4.2e1",
        "kwargs.tenant!=43",
        'kwargs.tenant!="42"',
        "kwargs.tenant>41.5",
        "kwargs.tenant>=42",
        "kwargs.tenant<=42",
        " kwargs.tenant  <  43 ",
        "kwargs.zip=00042",
        'kwargs.zip="00042"',
        "kwargs.zip!=42",
        "kwargs.zip<43",
        'kwargs.zip<"1"',
        "kwargs.name=acme GmbH  ",
        "kwargs.name~me Gm",
        'kwargs.name~"e G"',
        "kwargs.price=9.50",
        "kwargs.price=9.5 ",
        "kwargs.cost>9.5",
        "kwargs.word>=NaN",
        "kwargs.on=true",
        "kwargs.on!=1",
        "kwargs.no=null",
        "kwargs.empty=",
        'kwargs.empty=""',
        "kwargs.day>2026-01-30",
        "kwargs.day<=2026-01-31",
        "kwargs.nan!=NaN",
        'kwargs["a.b"]["c d"]=deep',
        'kwargs["a.b"].e!=deep',
        'kwargs.ünï="x=1"',
        r'kwargs["\u00fcn\u00ef"]=x=1',
        "kwargs.lines[1].sku=B2",
        "kwargs.lines.1.sku=B2",
        "kwargs.lines[2].sku!=B2",
        "kwargs.lines!=1",
        "kwargs.nothing.at.all!=1",
        "args[0]=7",
        "args.0=7",
        "args[1].id=7",
        "args[2][1]=2",
        "args[9]!=7",
        "headers.x-tenant~cm",
        "headers.retries>2",
        "headers.stamps.by[0]=me",
    ],
)
def test_a_condition_holds(text: str) -> None:
    """Numbers are compared as numbers; a text is also found without quotes."""
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "kwargs.tenant=43",
        'kwargs.tenant="42"',
        "kwargs.tenant!=42",
        "kwargs.tenant<42",
        "kwargs.tenant>42",
        'kwargs.tenant<"5"',
        "kwargs.tenant~4",
        "kwargs.zip=42",
        "kwargs.name=acme",
        "kwargs.name~ACME",
        "kwargs.name<5",
        "kwargs.on=1",
        "kwargs.on>0",
        'kwargs.on="true"',
        "kwargs.no=",
        "kwargs.no!=null",
        "kwargs.nan=NaN",
        "kwargs.nan<1",
        "kwargs.nothing=",
        "kwargs.nothing=null",
        "kwargs.nothing<1",
        "kwargs.nothing~a",
        "kwargs.a.b=deep",
        "kwargs.lines=1",
        "kwargs.lines[2].sku=B2",
        "kwargs.lines.01.sku=B2",
        "kwargs.tenant[0]=4",
        "args[3]=7",
        "args.id=7",
        "headers.retries>3",
        "headers.tenant=acme",
    ],
)
def test_a_condition_does_not_hold(text: str) -> None:
    """What is not there equals nothing, and a truth value is no number."""
    assert not holds(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (UUID("0f9f2b1e-4f7e-4b7e-9d0c-6b1f6a2f5d11"), "0f9f2b1e-4f7e-4b7e-9d0c-6b1f6a2f5d11"),
        (Decimal("10.50"), "10.50"),
        (datetime(2026, 1, 31, tzinfo=timezone.utc), "2026-01-31T00:00:00+00:00"),
        (b"acme", "acme"),
    ],
)
def test_values_that_json_tags_are_found_by_their_text(value: object, text: str) -> None:
    """As Celery's own serializer writes them."""
    letter = a_letter(kwargs_json=dumps({"id": value}))
    assert holds(f"kwargs.id={text}", letter)
    assert holds(f"kwargs.id~{text[:4]}", letter)
    assert not holds(f"kwargs.id!={text}", letter)


@pytest.mark.parametrize("value", [{"hex": "no"}, {"hex": 1}, [1], {"__type__": 1}])
def test_what_only_looks_like_a_tag_equals_nothing(value: object) -> None:
    """A publisher's own object must not end a scan."""
    letter = a_letter(kwargs_json=json.dumps({"id": {"__type__": "uuid", "__value__": value}}))
    assert not holds("kwargs.id=1", letter)
    assert holds("kwargs.id!=1", letter)


@pytest.mark.parametrize(
    "text", [None, "{", "null", "[" * 100_000, '{"tenant": 1' + "0" * 5000 + "}"]
)
def test_a_letter_without_readable_arguments_is_left_out(text: str | None) -> None:
    """Nobody can say that its tenant is another one; its headers can still be found."""
    letter = a_letter(kwargs_json=text, headers='{"x": 1}')
    assert not holds("kwargs.tenant=42", letter)
    assert not holds("kwargs.tenant!=42", letter)
    assert holds("headers.x=1", letter)


def test_a_pickled_body_is_never_read() -> None:
    """Unpickling runs code of whoever published it."""
    letter = a_letter(
        body=b"\x80\x04cos\nsystem\n(S'exit'\ntR.",
        content_type="application/x-python-serialize",
        args_json=None,
        kwargs_json=None,
    )
    assert not holds("kwargs.tenant!=42", letter)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected args, kwargs or headers at character 1 of the condition '', got its end"),
        ("tenant=42", r"expected args, kwargs or headers at character 1 .*, got 'tenant=42'"),
        ("kwargs=1", r'expected .name, \[number\] or \["name"\] at character 7 .*, got \'=1\''),
        ("kwargs.=1", "at character 7 of the condition 'kwargs.=1', got '.=1'"),
        ("kwargs.a.", r"one of = != < <= > >= ~ at character 9"),
        ("kwargs.a", r"one of = != < <= > >= ~ at character 9 .* got its end"),
        ("kwargs.a b=1", "at character 9 .* got ' b=1'"),
        ("kwargs['a']=1", "at character 7"),
        ("args[-1]=1", "at character 5"),
        ("args[x]=1", "at character 5"),
        (r'kwargs["\x"]=1', "expected a name as JSON writes it at character 7"),
        ("kwargs.a==1", "expected one of = .* in double quotes .* at character 9 .*, got '==1'"),
        ("kwargs.a=~1", "in double quotes a value that begins so, at character 9"),
        ("kwargs.a<>1", "at character 9"),
        ("kwargs.a~", "expected a value after ~ at character 10"),
        ('kwargs.a<""', "expected a value after < at character 10"),
        ('kwargs.a="x', "a text that ends with a double quote at character 10"),
        ("kwargs.a=[1]", "one value, not a list or an object, at character 10"),
        ("kwargs.a={}", "one value, not a list or an object, at character 10"),
        ("kwargs.a=" + "1" * 192, "at most 200 characters, got 201 in 'kwargs.a=111"),
        ("kwargs" + ".a" * 21 + "=1", "a path of at most 20 names, got 21 in the condition"),
    ],
)
def test_a_malformed_condition_is_refused_with_its_place(text: str, message: str) -> None:
    """A condition that meant something else would choose other letters."""
    with pytest.raises(DLQError, match=message):
        LetterFilter(conditions=(text,))


def test_the_number_of_conditions_is_bounded() -> None:
    """Each costs time with every letter of a scan; one that is given twice counts once."""
    most = tuple(f"kwargs.a{n}=1" for n in range(10))
    assert LetterFilter(conditions=most + most).conditions == most
    with pytest.raises(DLQError, match="expected at most 10 conditions, got 11"):
        LetterFilter(conditions=(*most, "kwargs.b=1"))


@pytest.mark.parametrize("given", [(5,), (None,), (b"kwargs.a=1",)])
def test_a_condition_is_a_text(given: Any) -> None:
    """Options of programs come as anything."""
    with pytest.raises(DLQError, match=r"conditions such as 'kwargs\.tenant=42', got"):
        LetterFilter(conditions=given)


def test_the_longest_and_deepest_condition_is_taken() -> None:
    """The bounds themselves are allowed."""
    deep: Any = "x"
    for _ in range(19):
        deep = {"a": deep}
    letter = a_letter(kwargs_json=json.dumps({"a": deep}))
    assert holds("kwargs" + ".a" * 20 + "=x", letter)
    assert holds("kwargs.a!=" + "1" * 190, letter)


NAMES = st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)


@given(NAMES, SCALARS, st.sampled_from(["args", "kwargs", "headers"]))
@example("", "", "kwargs")
@example('"', "\udc80", "headers")
@example("é]", '"=~<', "kwargs")
def test_every_value_is_found_at_every_name(name: str, value: Any, root: str) -> None:
    """Whatever the name and the value, JSON's own spelling of both finds it, and only it."""
    held: Any = [value] if root == "args" else {name: value}
    field = {"args": "args_json", "kwargs": "kwargs_json", "headers": "headers"}[root]
    letter = a_letter(**{field: json.dumps(held)})
    path = f"{root}[0]" if root == "args" else f"{root}[{json.dumps(name)}]"
    assert holds(f"{path}={json.dumps(value)}", letter)
    assert not holds(f"{path}!={json.dumps(value)}", letter)
    assert not holds(f"{path}=something else entirely", letter)


TREES = st.recursive(
    SCALARS | st.sampled_from([42, "42", "acme"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "0", "é"]), inner, max_size=3)
    ),
    max_leaves=8,
)
PATHS = st.lists(st.sampled_from([".a", ".b", "[0]", '["é"]']), min_size=1, max_size=3).map("".join)
CONDITIONS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["args", "kwargs", "headers"]),
    PATHS,
    st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]),
    st.sampled_from(["42", '"42"', "acme", "true", "null", "-1.5", "c"]),
)


@given(
    args=st.none() | st.lists(TREES, max_size=3),
    kwargs=st.none() | st.dictionaries(st.sampled_from(["a", "b", "é"]), TREES, max_size=3),
    headers=st.dictionaries(st.sampled_from(["a", "b", "é"]), TREES, max_size=3),
    texts=st.lists(CONDITIONS, min_size=1, max_size=3),
    ascii_only=st.booleans(),
)
def test_a_letter_and_its_stored_forms_fit_alike(
    *, args: Any, kwargs: Any, headers: Any, texts: list[str], ascii_only: bool
) -> None:
    """A scan reads raw fields, often packed; it must mean the same."""
    args_json, kwargs_json, headers_json = (
        None if part is None else json.dumps(part, ensure_ascii=ascii_only)
        for part in (args, kwargs, headers)
    )
    letter = a_letter(
        args_json=args_json,
        kwargs_json=kwargs_json,
        headers=headers_json,
        body=f"[{args_json}, {kwargs_json}, {{}}]".encode("utf-8", "backslashreplace"),
        traceback="long " * 100,
    )
    where = LetterFilter(conditions=tuple(texts))
    fields = letter.to_fields()
    raw = {name.encode(): value for name, value in fields.items()}
    parts = [part for name, value in packed(fields).items() for part in (name.encode(), value)]
    fits = where.matches(letter)
    assert where.matches_fields(raw) is fits
    assert where.matches_fields(PackedFields(parts)) is fits
    one_by_one = [LetterFilter(conditions=(text,)).matches(letter) for text in texts]
    assert fits is all(one_by_one)


@given(st.text(max_size=30).map(lambda text: f"kwargs{text}"))
@example('kwargs["\\ud800"]=1')
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    """Text of a URL or a shell leads to no other error."""
    try:
        where = LetterFilter(conditions=(text,))
    except DLQError:
        return
    where.matches(LETTER)
    assert conditions.checked(text) == (text,)


def test_arguments_that_decide_and_are_not_known_are_neither_a_match_nor_a_miss() -> None:
    """Whoever asks counts them; a condition on a header that fails decides alone."""
    known = {"args_json": "[1]", "kwargs_json": "{}", "headers": '{"x": 1}'}
    for texts, field, judged in (
        (("args[0]=1",), "", True),
        (("args[0]!=1",), "", False),
        (("args[0]!=1",), "args_json", None),
        (("args[0]=1", "headers.x=1"), "args_json", None),
        (("args[0]=1", "headers.x=2"), "args_json", False),
        (("args[0]=2", "kwargs.a=1"), "kwargs_json", False),
        (("headers.x=1",), "args_json", True),
        (("headers.x=1",), "headers", False),
    ):
        text_of = {**known, field: ""}.get
        assert conditions.judge_all(texts, lambda name, get=text_of: get(name) or "") is judged, (
            texts
        )
        assert conditions.all_hold(texts, lambda name, get=text_of: get(name) or "") is (
            judged is True
        )
