"""The one Arrow schema of letters, derived from the record, and columns made from raw entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from celery_dlq.errors import MissingExtra
from celery_dlq.ports import FlatFields
from celery_dlq.record import SCHEMA_VERSION, Kind, field_kinds

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc

# What every Parquet reader agrees on: no nanoseconds, no UUID type, no dictionaries.
_TYPES: dict[Kind, Any] = {
    Kind.TEXT: pa.string(),
    Kind.INTEGER: pa.int64(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.BYTES: pa.binary(),
    Kind.JSON: pa.string(),
    Kind.HISTORY: pa.string(),
}

_MOST_LAYOUTS = 8


@cache
def schema() -> Any:
    """The Arrow schema: one nullable column per field, in the order of the record."""
    columns = [pa.field(name, _TYPES[kind]) for name, kind in field_kinds().items()]
    return pa.schema(columns, metadata={"celery_dlq.schema_version": str(SCHEMA_VERSION)})


def table(entries: Sequence[Mapping[bytes, bytes]]) -> Any:
    """A table of raw store entries: whole columns are moved, no letter is decoded.

    Rows with the same fields come together; else they keep their order.

    Args:
        entries: Field name to value, as the store keeps them. Unknown fields are left out.
    """
    layouts = _layouts(entries)
    if layouts is None:
        return _table(lambda key: [entry.get(key) for entry in entries], len(entries))
    return pa.concat_tables([_flat_table(rows) for rows in layouts])


def _layouts(entries: Sequence[Mapping[bytes, bytes]]) -> list[list[Sequence[bytes]]] | None:
    """Flat entries by the names in them, if these are few; else ``None``.

    Looking fields up by name costs more than all the rest of an export.
    """
    groups: dict[bytes, list[Sequence[bytes]]] = {}
    for entry in entries:
        if not isinstance(entry, FlatFields) or len(groups) > _MOST_LAYOUTS:
            return None
        groups.setdefault(b"\0".join(entry.flat[::2]), []).append(entry.flat)
    if any(names.count(b"\0") != len(rows[0]) // 2 - 1 for names, rows in groups.items()):
        return None  # a name with a NUL in it: other names could look the same
    return list(groups.values()) or None


def _flat_table(rows: Sequence[Sequence[bytes]]) -> Any:
    columns = list(zip(*rows, strict=True))
    named = dict(zip(rows[0][::2], columns[1::2], strict=True))
    nothing = (None,) * len(rows)
    return _table(lambda key: named.get(key, nothing), len(rows))


def _table(values_of: Callable[[bytes], Sequence[bytes | None]], length: int) -> Any:
    columns = [
        _column(kind, values_of(name.encode()), length) for name, kind in field_kinds().items()
    ]
    return pa.Table.from_arrays(columns, schema=schema())


def _column(kind: Kind, values: Sequence[bytes | None], length: int) -> Any:
    if length and values[0] is None and values.count(None) == length:
        return pa.nulls(length, _TYPES[kind])
    raw = pa.array(values, pa.binary())
    if kind is Kind.BYTES:
        return raw
    if kind in (Kind.INTEGER, Kind.TIME):
        return pc.cast(_numbers(raw, values), _TYPES[kind])
    return _texts(raw, values)


def _texts(raw: Any, values: Sequence[bytes | None]) -> Any:
    try:
        return pc.cast(raw, pa.string())
    except pa.ArrowInvalid:  # a foreign writer's broken UTF-8: faithful where possible
        return pa.array([None if v is None else v.decode("utf-8", "replace") for v in values])


def _numbers(raw: Any, values: Sequence[bytes | None]) -> Any:
    try:
        return pc.cast(pc.cast(raw, pa.string()), pa.int64())
    except pa.ArrowInvalid:  # a foreign writer's nonsense becomes null, not a stuck export
        return pa.array([_number(v) for v in values], pa.int64())


def _number(value: bytes | None) -> int | None:
    try:
        number = int(value or b"")
    except ValueError:
        return None
    return number if -(2**63) <= number < 2**63 else None
