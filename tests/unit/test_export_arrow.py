"""Columns made from raw entries, without decoding a letter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from builders import NOW, a_letter, an_ended_delivery

from celery_dlq.export.arrow import schema, table
from celery_dlq.record import SCHEMA_VERSION, DeadLetter, Kind, field_kinds, history_json


def raw(fields: Mapping[str, bytes]) -> dict[bytes, bytes]:
    """An entry as the store hands it out."""
    return {name.encode(): value for name, value in fields.items()}


def column(name: str, *values: bytes | None) -> list[Any]:
    """What becomes of raw values in a column."""
    entries = [{} if value is None else {name.encode(): value} for value in values]
    return table(entries).column(name).to_pylist()  # type: ignore[no-any-return]


def test_the_schema_follows_the_record() -> None:
    """One definition: every field is a column of its kind, in the record's order."""
    types = {
        Kind.TEXT: pa.string(),
        Kind.JSON: pa.string(),
        Kind.HISTORY: pa.string(),
        Kind.INTEGER: pa.int64(),
        Kind.TIME: pa.timestamp("us", tz="UTC"),
        Kind.BYTES: pa.binary(),
    }
    assert schema().names == list(field_kinds())
    assert {f.name: f.type for f in schema()} == {n: types[k] for n, k in field_kinds().items()}
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
        **expected, "reason": letter.reason.value, "history": history_json(letter.history)
    }  # fmt: skip


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
