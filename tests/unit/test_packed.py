"""Packed entries come back byte by byte; broken ones are errors."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from builders import NOW, a_letter, an_ended_delivery
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import packing
from celery_dlq.letters.packed import PackedFields, fields_of
from celery_dlq.letters.packing import COMPRESSED, INLINE, packed
from celery_dlq.letters.record import DeadLetter

WIRE = Path(__file__).parent.parent / "wire"

KWARGS = json.dumps({"order": "x" * 200, "note": "gift"})
LETTER = a_letter(
    traceback="Traceback (most recent call last):\n  File x\n" * 20,
    history=tuple(an_ended_delivery(number=n) for n in range(1, 6)),
    headers=json.dumps({"lang": "py", "task": "shop.charge", "kwargsrepr": "{'a': '" + "y" * 99}),
    kwargsrepr="{'a': '" + "y" * 99,
    properties='{"delivery_mode":2,"priority":0}',
    body=f"[[1], {KWARGS}, {{}}]".encode() + b" " * 4000,
    kwargs_json=KWARGS,
    first_delivered_at=NOW,
)

NAMES = st.one_of(
    st.sampled_from(
        [
            "body",
            "args_json",
            "kwargs_json",
            "headers",
            "id",
            "argsrepr",
            "kwargsrepr",
            "task_id",
            "root_id",
            "description",
            "exception_message",
            "traceback",
            "history",
            "properties",
            "a.b",
            "~key",
        ]
    ),
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name not in "+-~"),
)
# Texts that repeat each other, are long enough to be compressed, or hold what separates values.
VALUES = st.one_of(
    st.binary(max_size=50),
    st.sampled_from([b"", b"0123456789abcdef" * 3, b"0123456789abcdef", b"a\x1eb", b"x" * 5000]),
)


def parts(entry: Mapping[str, bytes]) -> list[bytes]:
    """An entry as Redis gives it back."""
    return [part for name, value in entry.items() for part in (name.encode(), value)]


def raw(fields: Mapping[str, bytes]) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in fields.items()}


@given(st.dictionaries(NAMES, VALUES))
def test_any_fields_come_back(fields: dict[str, bytes]) -> None:
    """Any names and values, also of later versions: by name, as a row and in all."""
    stored = parts(packed(fields))
    assert dict(fields_of(stored)) == raw(fields)
    by_name = fields_of(stored)
    assert {name: by_name.get(name) for name in raw(fields)} == raw(fields)
    assert by_name.get(b"nothing") is None
    assert all(name in by_name for name in raw(fields))
    assert b"nothing" not in by_name
    entry = fields_of(stored)
    assert isinstance(entry, PackedFields)
    assert entry.fields() == raw(fields)


def test_a_letter_takes_less_than_its_fields() -> None:
    """Repeated values are kept once; texts for people only are compressed."""
    fields = LETTER.to_fields()
    entry = packed(fields)
    assert next(iter(entry)) == INLINE.decode()
    message = sum(len(fields[name]) for name in ("body", "headers", "properties"))
    assert sum(map(len, entry.values())) < message + 500
    assert KWARGS.encode() not in entry["+"]


def test_what_a_redrive_needs_is_not_compressed() -> None:
    """Body, headers and properties are looked up without a decompression."""
    entry = packed(LETTER.to_fields())
    entry["-"] = b"broken"
    fields = fields_of(parts(entry))
    for name in ("body", "headers", "properties", "routing_key", "kwargs_json", "kwargsrepr"):
        assert fields.get(name.encode()) == LETTER.to_fields()[name]


def test_a_small_message_is_compressed_more() -> None:
    """Otherwise the letter would take many times the memory of the message."""
    headers = {
        "lang": "py",
        "task": "shop.charge",
        "origin": "gen1@web",
        "retries": 0,
        "timelimit": [None, None],
        "ignore_result": False,
        "stamps": {},
    }
    letter = a_letter(headers=json.dumps(headers), history=(an_ended_delivery(),))
    entry = packed(letter.to_fields())
    assert b"timelimit" not in entry["+"]
    assert dict(fields_of(parts(entry))) == raw(letter.to_fields())


def test_a_field_like_one_whose_place_is_compressed_is_read() -> None:
    """The task's id is in the headers, these are compressed, and the root's id is the same."""
    task_id = "0b1c2d3e-0000-4000-8000-00000000000f"
    letter = a_letter(
        task_id=task_id, root_id=task_id, headers=json.dumps({"lang": "py", "id": task_id})
    )
    entry = packed(letter.to_fields())
    assert b"lang" not in entry["+"]
    for name in ("task_id", "root_id"):
        assert fields_of(parts(entry)).get(name.encode()) == task_id.encode()


def test_the_example_of_the_module_is_right() -> None:
    """A reader of the module sees a real entry first."""
    fields = {
        "schema_version": b"1",
        "id": b"8a3c",
        "task_id": b"0f9f2b1e-4f7e",
        "task_name": b"shop.charge",
        "reason": b"failed",
        "description": b"sold out",
        "dead_lettered_at": b"1772600767891011",
        "exception_message": b"sold out",
        "traceback": b"Traceback (most recent call last):",
        "fingerprint": b"ab12",
        "headers": b'{"task":"shop.charge","id":"0f9f2b1e-4f7e"}',
        "body": b'[["order-1", "express"], {}, {}]' + b" " * 1000,
        "args_json": b'["order-1", "express"]',
    }
    shown = re.sub(r"\n +␞", "␞", packing.__doc__ or "")
    assert packed(fields)["+"].decode().replace("\x1e", "␞") in shown


def test_what_scripts_and_people_need_stays_plain() -> None:
    """Lua reads these fields by name."""
    entry = packed(LETTER.to_fields())
    for name in ("id", "reason", "fingerprint", "dead_lettered_at", "body"):
        assert entry[name] == LETTER.to_fields()[name]


def test_entries_of_one_kind_have_the_same_layout() -> None:
    """The exporter moves their columns together."""
    one, other = (
        PackedFields(parts(packed(a_letter(body=body, args_json=None).to_fields())))
        for body in (b"a" * 2000, b"b" * 2000)
    )
    assert one.layout() is other.layout()


@pytest.mark.parametrize("name", ["letter", "smallest"])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_golden_entries_stay_readable(name: str, kind: str) -> None:
    """An entry whose fields are all plain is one, too."""
    golden = json.loads((WIRE / f"{name}_v1.fields").read_text())
    fields = {field: base64.b64decode(text) for field, text in golden.items()}
    if kind == "plain":
        stored = parts(fields)
    else:
        entry = json.loads((WIRE / f"{name}_v1.{kind}").read_text())
        stored = parts({field: base64.b64decode(text) for field, text in entry.items()})
    assert dict(fields_of(stored)) == raw(fields)


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
@pytest.mark.parametrize("field", [INLINE, COMPRESSED])
def test_a_broken_entry_is_reported(field: bytes, cut: int) -> None:
    """It raises nothing else, can still be shown, and is no letter."""
    entry = raw(packed(LETTER.to_fields()))
    broken = entry[field][:cut]
    entry[field] = broken if field == COMPRESSED else broken.replace(b"\x1e", b"")
    stored = [part for pair in entry.items() for part in pair]
    fields = PackedFields(stored)
    with pytest.raises(CorruptLetter, match="cannot be unpacked"):
        fields.fields()
    assert dict(fields) == entry
    named = {name.decode(): value for name, value in fields.items()}
    with pytest.raises(CorruptLetter):
        DeadLetter.from_fields(named)


def test_a_reference_into_a_missing_body_is_reported() -> None:
    """Args and kwargs are parts of the body."""
    entry = packed(LETTER.to_fields())
    del entry["body"]
    with pytest.raises(CorruptLetter):
        PackedFields(parts(entry)).fields()
    cut = packed(LETTER.to_fields())
    cut["body"] = cut["body"][:20]
    with pytest.raises(CorruptLetter, match="beyond its end"):
        PackedFields(parts(cut)).fields()
