"""Columns made from raw entries, without decoding a letter."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from builders import NOW, a_letter, an_ended_delivery
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.export.table import schema, table
from celery_dlq.letters.packed import fields_of
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import (
    FIRST_MICROS,
    LAST_MICROS,
    SCHEMA_VERSION,
    DeadLetter,
    field_kinds,
)

TESTS = Path(__file__).parents[1]


def parts(entry: Mapping[str, bytes]) -> list[bytes]:
    """An entry as Redis gives it."""
    return [part for name, value in entry.items() for part in (name.encode(), value)]


def raw(fields: Mapping[str, bytes]) -> dict[bytes, bytes]:
    """An entry as the store hands it out."""
    return {name.encode(): value for name, value in fields.items()}


def column(name: str, *values: bytes | None) -> list[Any]:
    """Raw values as a column has them."""
    entries = [{} if value is None else {name.encode(): value} for value in values]
    return table(entries).column(name).to_pylist()  # type: ignore[no-any-return]


def test_the_schema_follows_the_record() -> None:
    """One definition: every field is a column of its kind, in the record's order."""
    types = {
        "text": pa.string(),
        "integer": pa.int64(),
        "boolean": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
        "bytes": pa.binary(),
    }
    assert schema().names == list(field_kinds())
    assert {f.name: f.type for f in schema()} == {
        n: types[k.column] for n, k in field_kinds().items()
    }
    assert all(f.nullable for f in schema())
    assert schema().metadata == {b"celery_dlq.schema_version": str(SCHEMA_VERSION).encode()}


def test_every_field_of_the_record_has_a_kind() -> None:
    """A new field cannot be forgotten by the export; only the unknown ones have no column."""
    names = {f.name for f in dataclasses.fields(DeadLetter)}
    assert names - set(field_kinds()) == {"extra"}


def test_letters_become_rows_with_their_values() -> None:
    """A row says what the letter says, with types of Arrow."""
    letter = a_letter(
        published_at=NOW,
        retries=3,
        history=(an_ended_delivery(),),
        body=b"\x80\x00",
        traceback=None,
    )
    row = table([raw(letter.to_fields())]).to_pylist()[0]
    expected = {name: getattr(letter, name) for name in field_kinds()}
    assert row == {
        **expected,
        "reason": letter.reason.value,
        "history": letter.to_fields()["history"].decode(),
    }


ENTRIES = st.fixed_dictionaries(
    {"id": st.binary(min_size=1), "body": st.binary(max_size=300)},
    optional={
        "headers": st.binary(max_size=300),
        "description": st.binary(max_size=40),
        "exception_message": st.binary(max_size=40),
        "traceback": st.binary(max_size=300),
        "history": st.binary(max_size=300),
        "retries": st.integers().map(lambda n: b"%d" % n),
        "kwargs_json": st.binary(max_size=200),
        "task_id": st.binary(max_size=40),
    },
)


@given(st.lists(ENTRIES, max_size=30), st.integers(0, 40), st.integers(0, 40))
def test_entries_taken_apart_at_once_say_what_they_say_one_by_one(
    letters: list[dict[str, bytes]], start: int, size: int
) -> None:
    """Any bytes, any mixture of layouts, with values that are parts of others."""
    for letter in letters:
        if "kwargs_json" in letter:
            letter["kwargs_json"] = letter["body"][start : start + size]
    stored = [fields_of(parts(packed(letter))) for letter in letters]
    together = table(stored).sort_by("id").to_pylist()
    alone = [table([raw(letter)]).to_pylist()[0] for letter in letters]
    assert sorted(map(repr, together)) == sorted(map(repr, alone))


def test_a_column_by_itself_is_the_same_as_among_all() -> None:
    """Its values may be parts of other fields, compressed or not."""
    task_id = "0b1c2d3e-0000-4000-8000-00000000000f"
    headers = json.dumps({"lang": "py", "id": task_id, "argsrepr": "('a long enough text',)"})
    letter = a_letter(
        task_id=task_id,
        root_id=task_id,
        headers=headers,
        argsrepr="('a long enough text',)",
        description="gateway said 502",
        exception_message="gateway said 502",
    )
    stored = [fields_of(parts(packed(letter.to_fields())))]
    whole = table(stored)
    assert whole.column("root_id").to_pylist() == [task_id]
    for name in whole.column_names:
        assert table(stored, columns=[name]).column(name).equals(whole.column(name)), name


@pytest.mark.parametrize("few", [3, 20])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: {**entry, "-": entry["-"][:5]},
        lambda entry: {**entry, "-": b"nonsense"},
        lambda entry: {**entry, "+": entry["+"].rpartition(b"\x1e")[0]},
        lambda entry: {**entry, "+": b"nonsense"},
        lambda entry: {**entry, "body": b"short"},
        lambda entry: {name: value for name, value in entry.items() if name != "body"},
        lambda entry: {**entry, "+": entry["+"].replace(b"4:", b"-4:")},
    ],
)
def test_one_broken_entry_is_refused_and_spoils_no_neighbour(
    spoil: Callable[[dict[str, bytes]], dict[str, bytes]], few: int
) -> None:
    """The error has its number, whichever of its parts is broken."""
    body = b'[[], {"order_id": 1, "customer": "4711"}, {}]'
    letters = [
        a_letter(
            id=str(UUID(int=number)),
            body=body,
            kwargs_json=body[4:-4].decode(),
            traceback="Traceback " * 50,
        )
        for number in range(few)
    ]
    stored = [packed(letter.to_fields()) for letter in letters]
    assert stored[1] != spoil(stored[1])
    stored[1] = spoil(stored[1])
    refused: list[int] = []
    found = table(
        [fields_of(parts(entry)) for entry in stored], lambda number, _exc: refused.append(number)
    )
    assert refused == [1]
    ids = sorted(letter.id for letter in letters if letter is not letters[1])
    assert sorted(found.column("id").to_pylist()) == ids
    assert set(found.column("kwargs_json").to_pylist()) == {body[4:-4].decode()}


def test_the_export_does_not_wait_for_pandas() -> None:
    """`pyarrow.array` would import it, which takes longer than the export of a small queue."""
    program = (
        "import sys\n"
        "from builders import a_letter\n"
        "from celery_dlq.letters.packed import fields_of\n"
        "from celery_dlq.letters.packing import packed\n"
        "from celery_dlq.export.table import table\n"
        "entry = packed(a_letter().to_fields())\n"
        "parts = [part for name, value in entry.items() for part in (name.encode(), value)]\n"
        "assert table([fields_of(parts)]).num_rows == 1\n"
        "assert 'pandas' not in sys.modules, 'pandas was imported'\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)


def test_no_entries_make_an_empty_table() -> None:
    """An empty page has the same columns."""
    assert table([]).schema == schema()
    assert table([]).num_rows == 0


def test_unknown_fields_are_left_out() -> None:
    """A newer worker's fields do not stop an older exporter."""
    fields = {**a_letter().to_fields(), "mood": b"good"}
    assert "mood" not in table([raw(fields)]).column_names


def test_broken_utf8_stays_readable_and_spoils_no_neighbour() -> None:
    """Only the broken bytes are replaced, and a missing value stays missing."""
    assert column("description", b"caf\xe9", "süß".encode(), None) == [
        "caf\N{REPLACEMENT CHARACTER}",
        "süß",
        None,
    ]


@pytest.mark.parametrize("name", ["retries", "worker_pid", "schema_version"])
def test_nonsense_integers_become_null_and_spoil_no_neighbour(name: str) -> None:
    """A foreign writer's entry is not a stuck export."""
    values = (b"7", b"", b"many", b"1.5", b"\xff", b"9" * 30, b"9" * 5000, b"-3", None)
    assert column(name, *values) == [7, None, None, None, None, None, None, -3, None]


def test_nonsense_times_become_null_and_spoil_no_neighbour() -> None:
    """Times are integers, so the same holds."""
    good = a_letter().to_fields()["dead_lettered_at"]
    assert column("dead_lettered_at", good, b"yesterday", None) == [NOW, None, None]


def test_times_that_no_calendar_has_become_null_and_spoil_no_neighbour() -> None:
    """Python could not read such a value of the file."""
    good = a_letter().to_fields()["dead_lettered_at"]
    times = (good, b"%d" % (FIRST_MICROS - 1), b"%d" % (LAST_MICROS + 1), b"%d" % FIRST_MICROS)
    assert column("expires", *times, None) == [
        NOW,
        None,
        None,
        datetime.min.replace(tzinfo=timezone.utc),
        None,
    ]
    assert column("expires", b"%d" % 2**62) == [None]


def test_integers_at_the_edge_are_kept() -> None:
    """The widest numbers of the column pass."""
    assert column("retries", b"%d" % (2**63 - 1), b"%d" % -(2**63), b"%d" % 2**63) == [
        2**63 - 1,
        -(2**63),
        None,
    ]


def test_a_body_is_moved_byte_by_byte() -> None:
    """Nothing looks into a body."""
    assert column("body", b"\x80\x04\xff\x00", b"") == [b"\x80\x04\xff\x00", b""]
