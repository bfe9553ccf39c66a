"""The Arrow schema of letters, derived from the record, and tables made from raw entries.

Entries of one layout become columns together, hundreds at a time: Arrow splits, selects and checks
the values, and releases the GIL meanwhile. Python handles each entry a few times, and never a
single value.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain
from typing import Any

from celery_dlq.errors import CorruptLetter
from celery_dlq.export.arrow import pa, pc
from celery_dlq.letters.packed import EntryLayout, PackedFields, decompressed
from celery_dlq.letters.packing import COMPRESSED, INLINE, SEPARATOR
from celery_dlq.letters.record import (
    FIRST_MICROS,
    LAST_MICROS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    Kind,
    field_kinds,
)

_MIN_LAYOUT_ROWS = 8

SUCCESS = REQUIRED_FIELDS - {b"fingerprint"}
"""Fields that every sample of a success has."""

Refused = Callable[[int, CorruptLetter], object]


@cache
def schema() -> Any:
    """The Arrow schema: one nullable column per field, in the order of the record."""
    columns = [pa.field(name, _TYPES[kind.column]) for name, kind in field_kinds().items()]
    return pa.schema(columns, metadata={"celery_dlq.schema_version": str(SCHEMA_VERSION)})


def table(
    entries: Sequence[Mapping[bytes, bytes]],
    refused: Refused | None = None,
    *,
    columns: Sequence[str] | None = None,
    required: frozenset[bytes] = REQUIRED_FIELDS,
) -> Any:
    """Make a table of raw store entries, without decoding each letter.

    Rows of one layout are next to each other, in their order.
    """
    chosen = schema() if columns is None else _part_of_schema(frozenset(columns))
    wanted = frozenset(name.encode() for name in chosen.names)
    required = frozenset() if refused is None else required
    tables: list[Any] = []
    groups: dict[bytes, list[int]] = {}
    for number, entry in enumerate(entries):
        head = entry.head() if isinstance(entry, PackedFields) else b""
        groups.setdefault(head, []).append(number)
    unpacked = groups.pop(b"", [])
    for numbers in groups.values():
        if len(numbers) >= _MIN_LAYOUT_ROWS or len(groups) == 1:  # else a table costs more
            with suppress(ValueError, CorruptLetter):  # found below, entry by entry
                layout = entries[numbers[0]].layout()  # type: ignore[attr-defined]
                _check_names(layout.names, required)
                rows = [entries[number].parts for number in numbers]  # type: ignore[attr-defined]
                tables.append(_table_of(chosen, _layout_columns(layout, rows, wanted), len(rows)))
                continue
        unpacked += numbers
    others: list[Mapping[bytes, bytes]] = []
    unreadable: dict[int, CorruptLetter] = {}
    for number in unpacked:
        entry = entries[number]
        try:
            fields = entry.fields() if isinstance(entry, PackedFields) else entry
            _check_names(fields.keys(), required)
            others.append(fields)
        except CorruptLetter as exc:
            unreadable[number] = exc
    for number, error in sorted(unreadable.items()):
        others.append(entries[number]) if refused is None else refused(number, error)
    if others or not tables:
        found = {n: pa.array([entry.get(n) for entry in others], pa.binary()) for n in wanted}
        tables.append(_table_of(chosen, found, len(others)))
    return pa.concat_tables(tables)


def _check_names(names: AbstractSet[bytes], required: frozenset[bytes]) -> None:
    missing = sorted(required - names)
    if missing:
        names_text = ", ".join(name.decode() for name in missing)
        raise CorruptLetter(f"the entry is not a letter, it lacks {names_text}")


@lru_cache(maxsize=16)
def _part_of_schema(names: frozenset[str]) -> Any:
    """The schema of the named columns."""
    return pa.schema([f for f in schema() if f.name in names], metadata=schema().metadata)


def _table_of(chosen: Any, found: Mapping[bytes, Any], length: int) -> Any:
    kinds = field_kinds()
    columns = [_column(kinds[name], found.get(name.encode()), length) for name in chosen.names]
    return pa.Table.from_arrays(columns, schema=chosen)


def _column(kind: Kind, values: Any, length: int) -> Any:
    """A typed column of stored values; ``None`` means that no row has one."""
    if values is None or values.null_count == length:
        return pa.nulls(length, _TYPES[kind.column])
    return _READERS[kind.column](values)


def _text_array(values: Any) -> Any:
    if values.type == pa.string():
        return values
    try:
        return pc.cast(values, pa.string())
    except pa.ArrowInvalid:  # a foreign writer's broken UTF-8
        texts = (None if v is None else v.decode("utf-8", "replace") for v in values.to_pylist())
        return pa.array(texts, pa.string())


def _booleans(values: Any) -> Any:
    """Columns of ``true`` and ``false``; a foreign writer's other texts become null."""
    texts = _text_array(values)
    true = pc.equal(texts, "true")
    return pc.if_else(pc.or_(true, pc.equal(texts, "false")), true, pa.scalar(None, pa.bool_()))


def _times(values: Any) -> Any:
    """Columns of times; a foreign writer's outside of the years 1 to 9999 become null."""
    micros = _numbers(values)
    ends = pc.min_max(micros)
    first, last = ends["min"].as_py(), ends["max"].as_py()
    if first is not None and not FIRST_MICROS <= first <= last <= LAST_MICROS:
        known = pc.greater_equal(micros, FIRST_MICROS)
        known = pc.and_(known, pc.less_equal(micros, LAST_MICROS))
        micros = pc.if_else(known, micros, pa.scalar(None, pa.int64()))
    return pc.cast(micros, _TYPES["time"])


def _numbers(values: Any) -> Any:
    try:
        return pc.cast(pc.cast(values, pa.string()), pa.int64())
    except pa.ArrowInvalid:  # a foreign writer's bad numbers become null
        stored = pc.cast(values, pa.binary()).to_pylist()
        return pa.array([_parsed_number(v) for v in stored], pa.int64())


def _parsed_number(value: bytes | None) -> int | None:
    try:
        number = int(value or b"")
    except ValueError:
        return None
    return number if -(2**63) <= number < 2**63 else None


# Types that all Parquet readers share: no nanoseconds, no UUID type, no dictionaries.
_TYPES = {
    "text": pa.string(),
    "integer": pa.int64(),
    "boolean": pa.bool_(),
    "time": pa.timestamp("us", tz="UTC"),
    "bytes": pa.binary(),
}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "text": _text_array,
    "integer": _numbers,
    "boolean": _booleans,
    "time": _times,
    "bytes": lambda values: pc.cast(values, pa.binary()),
}
_MAX_COLUMN_BYTES = 2**31 - 1  # offsets are 32-bit


def _layout_columns(
    layout: EntryLayout, rows: Sequence[Sequence[bytes]], wanted: frozenset[bytes]
) -> dict[bytes, Any]:
    """Make Arrow arrays of the parts of entries; ``ValueError`` if one does not match."""
    needed = wanted | {other for name, other in layout.same if name in wanted}
    needed |= {whole for name, whole in layout.places if name in needed}
    found: dict[bytes, Any] = {}
    plain: dict[bytes, Sequence[bytes]] = {}
    columns = list(zip(*rows, strict=True))
    for name, names, values in zip(layout.stored, columns[::2], columns[1::2], strict=True):
        if names.count(name) != len(rows):
            raise ValueError("an entry has other fields")
        if name == INLINE:
            found |= _split_joined(values, (b"", *layout.joined), needed)  # b"": the head
        elif name == COMPRESSED and not needed.isdisjoint(layout.compressed):
            found |= _split_joined(
                [decompressed(value) for value in values], layout.compressed, needed
            )
        elif name in needed:
            plain[name] = values
    found |= _following_columns(
        list(plain), _bytes_array([*chain.from_iterable(plain.values())]), len(rows)
    )
    if places := [place for place in layout.places if place[0] in needed]:
        _cut_places(found, places, len(rows))
    return found | {name: found[other] for name, other in layout.same if name in needed}


def _split_joined(
    texts: Sequence[bytes], names: Sequence[bytes], needed: frozenset[bytes]
) -> dict[bytes, Any]:
    """Split joined values of all entries into arrays by field."""
    count, total = len(names), len(names) * len(texts)
    numbers, order = _count_up_to(total), array("i")
    chosen = [number for number, name in enumerate(names) if name in needed]
    for number in chosen:
        order += numbers[number:total:count]
    values = _split_values(_bytes_array(texts), SEPARATOR, count).take(_integer_array(order))
    return _following_columns([names[number] for number in chosen], values, len(texts))


def _following_columns(names: Sequence[bytes], values: Any, rows: int) -> dict[bytes, Any]:
    """Columns that follow each other in one array; texts, unless one of them is none."""
    with suppress(pa.ArrowInvalid):
        values = pc.cast(values, pa.string())
    return {name: values.slice(rows * at, rows) for at, name in enumerate(names)}


def _bytes_array(values: Sequence[bytes]) -> Any:
    """An array of bytes; `pyarrow.array` would import pandas, and read each value twice."""
    text = b"".join(values)
    if len(text) > _MAX_COLUMN_BYTES:
        raise ValueError(f"a column of {len(text):,} bytes is larger than 2 GiB")
    bounds = pc.cumulative_sum(_integer_array(array("i", [0, *map(len, values)])))
    buffers = [None, bounds.buffers()[1], pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)


def _cut_places(found: dict[bytes, Any], places: Sequence[tuple[bytes, bytes]], rows: int) -> None:
    """Replace places, ``start:length``, by these slices of other columns.

    An array over the buffer of all values has pairs of a slice and the gap that follows it; Arrow
    copies the first of each pair.
    """
    numbers = _split_values(pa.concat_arrays([found[name] for name, _whole in places]), b":", 2)
    numbers = pc.cast(pc.cast(numbers, pa.string()), pa.int32())
    if pc.min(numbers).as_py() < 0:
        raise ValueError("a place is before the beginning")
    for first, (name, other) in zip(range(0, len(numbers), 2 * rows), places, strict=True):
        pairs, whole = _integers(numbers.slice(first, 2 * rows)), found[other]
        starts, sizes = _integer_array(pairs[::2]), _integer_array(pairs[1::2])
        ends = pc.add_checked(starts, sizes)
        if pc.any(pc.greater(ends, pc.binary_length(whole))).as_py():
            raise ValueError("a place is beyond the end")
        _validity, offsets, text = whole.buffers()
        at = pa.Array.from_buffers(pa.int32(), rows, [None, offsets], offset=whole.offset)
        bounds = array("i", bytes(8 * rows + 4))
        bounds[:-1:2] = _integers(pc.add(at, starts))
        bounds[1::2] = _integers(pc.add(at, ends))
        bounds[-1] = bounds[-2]
        laid = pa.Array.from_buffers(pa.binary(), 2 * rows, [None, pa.py_buffer(bounds), text])
        found[name] = laid.take(_integer_array(_count_up_to(2 * rows)[: 2 * rows : 2]))


def _split_values(values: Any, separator: bytes, count: int) -> Any:
    """Split each value into exactly ``count`` values; all of them in one array."""
    lists = pc.split_pattern(values, separator)
    total = count * len(values)
    if _integers(lists.offsets) != _count_up_to(total)[: total + 1 : count]:
        raise ValueError(f"expected {count} values")
    return lists.values


def _count_up_to(count: int) -> array[int]:
    """The numbers from 0 to ``count``, and more: few lists serve all counts."""
    return _numbers_to(1 << count.bit_length())


@cache
def _numbers_to(count: int) -> array[int]:
    return array("i", range(count + 1))


def _integer_array(numbers: array[int]) -> Any:
    """A column of integers; if it were made of a list, Arrow would import pandas."""
    return pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(numbers)])


def _integers(numbers: Any) -> array[int]:
    """A column without nulls, as C integers."""
    at = numbers.offset
    return array("i", numbers.buffers()[1].to_pybytes())[at : at + len(numbers)]
