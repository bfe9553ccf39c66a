"""The one Arrow schema of letters, derived from the record, and columns made from raw entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from celery_dlq.errors import CorruptLetter, MissingExtra
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

_FEW = 8

# What every version of the record has; see `celery_dlq.record`.
SUCCESS = frozenset({
    b"id", b"task_id", b"task_name", b"source_queue", b"dead_letter_queue", b"reason",
    b"dead_lettered_at",
})  # fmt: skip
"""What every sample of a success has."""

LETTER = SUCCESS | {b"fingerprint"}
"""What every letter has."""

Names = tuple[bytes, ...]
Row = Sequence[bytes]
Refused = Callable[[int, CorruptLetter], object]


@cache
def schema() -> Any:
    """The Arrow schema: one nullable column per field, in the order of the record."""
    columns = [pa.field(name, _TYPES[kind]) for name, kind in field_kinds().items()]
    return pa.schema(columns, metadata={"celery_dlq.schema_version": str(SCHEMA_VERSION)})


def table(
    entries: Sequence[Mapping[bytes, bytes]],
    refused: Refused | None = None,
    *,
    columns: Sequence[str] | None = None,
    required: frozenset[bytes] = LETTER,
) -> Any:
    """A table of raw store entries: whole columns are moved, no letter is decoded.

    Rows with the same fields come together; else they keep their order.

    Args:
        entries: Field name to value, as the store keeps them. Unknown fields are left out.
        refused: Told the number of each entry that is no letter, and why; it is left out.
            ``None`` makes a row of what can be read of it.
        columns: Only these, in the order of the schema; ``None`` for all.
        required: The fields without which an entry is refused.
    """
    chosen = schema() if columns is None else _part(frozenset(columns))
    groups, others = _sorted(entries, refused, required)
    tables = []
    for names, rows in groups:
        if len(rows) >= _FEW or len(groups) == 1:
            tables.append(_row_table(chosen, names, rows))
        else:  # a table for each would cost more
            others += [dict(zip(names, row, strict=True)) for row in rows]
    if others or not tables:
        mapped = _table(chosen, lambda key: [entry.get(key) for entry in others], len(others))
        tables.append(mapped)
    return pa.concat_tables(tables)


def _sorted(
    entries: Sequence[Mapping[bytes, bytes]], refused: Refused | None, required: frozenset[bytes]
) -> tuple[list[tuple[Names, list[Row]]], list[Mapping[bytes, bytes]]]:
    """Rows by their names, and the entries that come by name."""
    groups: dict[int, tuple[Names, list[Row]]] = {}  # the names live as long as they are in it
    others: list[Mapping[bytes, bytes]] = []
    for number, entry in enumerate(entries):
        try:
            if isinstance(entry, FlatFields):
                names, row = entry.row()
                if id(names) not in groups:
                    if refused is not None:
                        _check(frozenset(names), required)
                    groups[id(names)] = (names, [])
                groups[id(names)][1].append(row)
            else:
                if refused is not None:
                    _check(frozenset(entry), required)
                others.append(entry)
        except CorruptLetter as exc:
            if refused is None:
                others.append(entry)
            else:
                refused(number, exc)
    return list(groups.values()), others


def _check(names: frozenset[bytes], required: frozenset[bytes]) -> None:
    missing = sorted(required - names)
    if missing:
        told = ", ".join(name.decode() for name in missing)
        message = f"expected a dead letter, got an entry without {told}"
        raise CorruptLetter(message)


@lru_cache(maxsize=16)
def _part(names: frozenset[str]) -> Any:
    """The schema of some columns."""
    return pa.schema([f for f in schema() if f.name in names], metadata=schema().metadata)


def _row_table(chosen: Any, names: Names, rows: Sequence[Row]) -> Any:
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    nothing = (None,) * len(rows)
    return _table(chosen, lambda key: columns.get(key, nothing), len(rows))


def _table(chosen: Any, values_of: Callable[[bytes], Sequence[bytes | None]], length: int) -> Any:
    kinds = field_kinds()
    columns = [_column(kinds[name], values_of(name.encode()), length) for name in chosen.names]
    return pa.Table.from_arrays(columns, schema=chosen)


def _column(kind: Kind, values: Sequence[bytes | None], length: int) -> Any:
    first = values[0] if length else None
    if length > 1 and values[-1] == first and values.count(first) == length:
        return pa.repeat(_column(kind, (first,), 1)[0], length)  # of one queue, much is the same
    if length and first is None and values.count(None) == length:
        return pa.nulls(length, _TYPES[kind])
    if kind is Kind.BYTES:
        return pa.array(values, pa.binary())
    if kind in (Kind.INTEGER, Kind.TIME):
        return pc.cast(_numbers(pa.array(values, pa.binary()), values), _TYPES[kind])
    return _texts(values)


def _texts(values: Sequence[bytes | None]) -> Any:
    try:
        return pa.array(values, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):  # a foreign writer's broken UTF-8
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
