"""The Arrow schema of letters, derived from the record, and tables made from raw entries.

Entries of one layout become columns together, hundreds at a time: Arrow splits, selects and checks
the values, and releases the GIL meanwhile. Python handles each entry a few times, and never a
single value.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from celery_dlq.errors import CorruptLetter, MissingExtra
from celery_dlq.letters.packed import (
    COMPRESSED,
    INLINE,
    SEPARATOR,
    EntryLayout,
    PackedFields,
    decompressed,
)
from celery_dlq.letters.record import FIRST_MICROS, LAST_MICROS, SCHEMA_VERSION, Kind, field_kinds

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc

# Types that all Parquet readers share: no nanoseconds, no UUID type, no dictionaries.
_TYPES: dict[Kind, Any] = {
    Kind.TEXT: pa.string(),
    Kind.INTEGER: pa.int64(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.BYTES: pa.binary(),
    Kind.JSON: pa.string(),
    Kind.HISTORY: pa.string(),
}

_MIN_LAYOUT_ROWS = 8

SUCCESS = frozenset(
    {
        b"id",
        b"task_id",
        b"task_name",
        b"source_queue",
        b"dead_letter_queue",
        b"reason",
        b"dead_lettered_at",
    }
)
"""Fields that every sample of a success has."""

LETTER = SUCCESS | {b"fingerprint"}
"""Fields that every letter has, in all versions of the record; see `celery_dlq.letters.record`."""

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
    """Make a table of raw store entries, without decoding each letter.

    Rows of one layout are next to each other, in their order.
    """
    chosen = schema() if columns is None else _part(frozenset(columns))
    wanted = frozenset(name.encode() for name in chosen.names)
    tables: list[Any] = []
    others: list[Mapping[bytes, bytes]] = []

    def refuse(number: int, exc: CorruptLetter) -> None:
        if refused is None:
            others.append(entries[number])
        else:
            refused(number, exc)

    groups = _by_layout(entries, refuse, None if refused is None else required)
    unpacked = groups.pop(None, [])
    for layout, numbers in groups.items():
        if len(numbers) >= _MIN_LAYOUT_ROWS or len(groups) == 1:  # else a table costs more
            with suppress(ValueError):  # an entry does not match its layout: found below
                rows = [entries[number].parts for number in numbers]  # type: ignore[attr-defined]
                tables.append(_table(chosen, _layout_columns(layout, rows, wanted), len(rows)))
                continue
        unpacked += numbers
    for number in unpacked:
        try:
            entry = entries[number]
            others.append(entry.fields() if isinstance(entry, PackedFields) else entry)
        except CorruptLetter as exc:
            refuse(number, exc)
    if others or not tables:
        found = {n: pa.array([entry.get(n) for entry in others], pa.binary()) for n in wanted}
        tables.append(_table(chosen, found, len(others)))
    return pa.concat_tables(tables)


def _by_layout(
    entries: Sequence[Mapping[bytes, bytes]],
    refuse: Refused,
    required: frozenset[bytes] | None,
) -> dict[Any, list[int]]:
    """The numbers of entries, by their layout; those that are not packed have ``None``."""
    # No object is made for each entry: the garbage collector would look at them again and again.
    groups: dict[Any, list[int]] = {}
    for number, entry in enumerate(entries):
        try:
            layout = entry.layout() if isinstance(entry, PackedFields) else None
            if required is not None and (layout is None or layout not in groups):
                _check(entry.keys() if layout is None else layout.names, required)
        except CorruptLetter as exc:
            refuse(number, exc)
        else:
            groups.setdefault(layout, []).append(number)
    return groups


def write_file(path: Path, groups: Iterable[Sequence[Mapping[bytes, bytes]]]) -> int:
    """Write raw store entries to one Parquet file."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - Spark's live reader writes no files

    rows = 0
    with pq.ParquetWriter(path, schema(), compression="zstd") as writer:
        for group in groups:
            writer.write_table(table(group))
            rows += len(group)
    return rows


def _check(names: AbstractSet[bytes], required: frozenset[bytes]) -> None:
    missing = sorted(required - names)
    if missing:
        names_text = ", ".join(name.decode() for name in missing)
        raise CorruptLetter(f"the entry is not a letter, it lacks {names_text}")


@lru_cache(maxsize=16)
def _part(names: frozenset[str]) -> Any:
    """The schema of the named columns."""
    return pa.schema([f for f in schema() if f.name in names], metadata=schema().metadata)


def _table(chosen: Any, found: Mapping[bytes, Any], length: int) -> Any:
    kinds = field_kinds()
    columns = [_column(kinds[name], found.get(name.encode()), length) for name in chosen.names]
    return pa.Table.from_arrays(columns, schema=chosen)


def _column(kind: Kind, values: Any, length: int) -> Any:
    """A typed column of stored values; ``None`` means that no row has one."""
    if values is None or values.null_count == length:
        return pa.nulls(length, _TYPES[kind])
    if kind is Kind.BYTES:
        return values
    if kind is Kind.INTEGER:
        return _numbers(values)
    if kind is Kind.TIME:
        return pc.cast(_known_times(_numbers(values)), _TYPES[kind])
    return _texts(values)


def _texts(values: Any) -> Any:
    try:
        return pc.cast(values, pa.string())
    except pa.ArrowInvalid:  # a foreign writer's broken UTF-8
        texts = (None if v is None else v.decode("utf-8", "replace") for v in values.to_pylist())
        return pa.array(texts, pa.string())


def _known_times(micros: Any) -> Any:
    """Replace a foreign writer's times outside of the years 1 to 9999 by null."""
    ends = pc.min_max(micros)
    first, last = ends["min"].as_py(), ends["max"].as_py()
    if first is None or (first >= FIRST_MICROS and last <= LAST_MICROS):
        return micros
    known = pc.and_(pc.greater_equal(micros, FIRST_MICROS), pc.less_equal(micros, LAST_MICROS))
    return pc.if_else(known, micros, pa.scalar(None, pa.int64()))


def _numbers(values: Any) -> Any:
    try:
        return pc.cast(pc.cast(values, pa.string()), pa.int64())
    except pa.ArrowInvalid:  # a foreign writer's bad numbers become null
        return pa.array([_number(v) for v in values.to_pylist()], pa.int64())


def _number(value: bytes | None) -> int | None:
    try:
        number = int(value or b"")
    except ValueError:
        return None
    return number if -(2**63) <= number < 2**63 else None


_MAX_COLUMN_BYTES = 2**31 - 1  # offsets are 32-bit


def _layout_columns(
    layout: EntryLayout, rows: Sequence[Sequence[bytes]], wanted: frozenset[bytes]
) -> dict[bytes, Any]:
    """Make Arrow arrays of the parts of entries; ``ValueError`` if one does not match."""
    needed = wanted | {other for name, other in layout.same if name in wanted}
    needed |= {whole for name, whole in layout.places if name in needed}
    found: dict[bytes, Any] = {}
    columns = islice(zip(*rows, strict=True), 1, None, 2)
    for name, values in zip(layout.stored, columns, strict=True):
        if name == INLINE:
            found.update(_joined(values, (b"", *layout.joined), needed))  # b"": the head
        elif name == COMPRESSED and not needed.isdisjoint(layout.compressed):
            texts = [decompressed(value) for value in values]
            found.update(_joined(texts, layout.compressed, needed))
        elif name in needed:
            found[name] = _bytes(values)
    for name, whole in layout.places:
        if name in needed:
            found[name] = _cut(found[whole], found[name])
    found.update({name: found[other] for name, other in layout.same if name in needed})
    return found


def _joined(
    texts: Sequence[bytes], names: Sequence[bytes], needed: frozenset[bytes]
) -> dict[bytes, Any]:
    """Split joined values of all entries into arrays by field."""
    lists = _split(_bytes(texts), SEPARATOR, len(names))
    numbered = zip(_indexes(len(names)), names, strict=True)
    return {name: pc.list_element(lists, number) for number, name in numbered if name in needed}


def _bytes(values: Sequence[bytes]) -> Any:
    """An array of bytes; `pyarrow.array` would import pandas, and read each value twice."""
    ends = list(accumulate(map(len, values), initial=0))
    if ends[-1] > _MAX_COLUMN_BYTES:
        raise ValueError(f"a column of {ends[-1]:,} bytes is larger than 2 GiB")
    bounds, text = (pa.py_buffer(some) for some in (array("i", ends), b"".join(values)))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, bounds, text])


def _cut(whole: Any, places: Any) -> Any:
    """Slice values by their places, ``start:length``.

    An array over the buffer of all values has pairs of a slice and the gap that follows it; Arrow
    copies the first of each pair.
    """
    pairs = _split(places, b":", 2)
    starts, sizes = (
        pc.cast(pc.cast(pc.list_element(pairs, number), pa.string()), pa.int64())
        for number in _indexes(2)
    )
    ends = pc.add(starts, sizes)
    zero = _indexes(1)[0]
    outside = pc.or_(
        pc.or_(pc.less(starts, zero), pc.less(sizes, zero)),
        pc.greater(ends, pc.binary_length(whole)),
    )
    if pc.any(outside).as_py():
        raise ValueError("a place is beyond the end")
    _validity, offsets, text = whole.buffers()  # the arrays of `_column` begin at offset 0
    at = pa.Array.from_buffers(pa.int32(), len(whole), [None, offsets])
    bounds = array("i", bytes(8 * len(whole) + 4))
    bounds[:-1:2] = _integers(pc.add(at, starts))
    bounds[1::2] = _integers(pc.add(at, ends))
    bounds[-1] = bounds[-2]
    laid = pa.Array.from_buffers(pa.binary(), 2 * len(whole), [None, pa.py_buffer(bounds), text])
    return pc.list_element(pa.FixedSizeListArray.from_arrays(laid, 2), zero)


def _split(values: Any, separator: bytes, count: int) -> Any:
    """Split each value into exactly ``count`` values."""
    lists = pc.split_pattern(values, separator)
    counts = pc.min_max(pc.list_value_length(lists)).as_py()
    if counts != {"min": count, "max": count}:
        raise ValueError(f"expected {count} values, got {counts}")
    return lists


@cache
def _indexes(count: int) -> Any:
    """The numbers from 0; from a buffer, since Arrow imports pandas to convert a Python int."""
    numbers = pa.py_buffer(array("q", range(count)))
    return pa.Array.from_buffers(pa.int64(), count, [None, numbers])


def _integers(numbers: Any) -> array[int]:
    """A column without nulls or offset, as C integers."""
    found = array("i")
    found.frombytes(pc.cast(numbers, pa.int32()).buffers()[1])
    return found[: len(numbers)]
