"""Arrow columns from packed entries of one layout, hundreds of entries at a time.

Arrow splits, selects and checks the values, and releases the GIL meanwhile. Python handles each
entry a few times, and never a single value.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from celery_dlq.errors import MissingExtra
from celery_dlq.letters.packed import EntryLayout, EntryPart

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as exc:
    feature = "the export of letters"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc


_MAX_COLUMN_BYTES = 2**31 - 1  # offsets are 32-bit


class OddEntry(Exception):  # noqa: N818 - a signal to the caller
    """An entry does not match its layout; decoding the entries one by one names it."""


def layout_columns(
    layout: EntryLayout, rows: Sequence[Sequence[bytes]], wanted: frozenset[bytes]
) -> dict[bytes, Any]:
    """Make Arrow arrays of bytes from the parts of entries."""
    needed = wanted | {source for name, source in layout.same if name in wanted}
    needed |= {source for name, source in layout.places if name in needed}
    found: dict[bytes, Any] = {}
    try:
        for part, values in zip(layout.pieces, zip(*rows, strict=True), strict=True):
            if part is not None and needed.intersection(part.names):
                found.update(_arrays_of(part, values, layout.separator))
        for name, source in layout.places:
            if name in needed:
                found[name] = _cut(found[source], found[name])
    except (ValueError, pa.ArrowInvalid) as exc:
        raise OddEntry from exc
    found.update({name: found[source] for name, source in layout.same if name in needed})
    return found


def _arrays_of(part: EntryPart, values: Sequence[bytes], separator: bytes) -> dict[bytes, Any]:
    """Split one part of all entries into arrays by field."""
    texts = values if part.decode is None else [part.decode(value) for value in values]
    column = _column(texts)
    if not part.joined:
        return {part.names[0]: column}
    lists = _split(column, separator, len(part.names))
    numbered = zip(_numbers(len(part.names)), part.names, strict=True)
    return {name: pc.list_element(lists, number) for number, name in numbered if name}


def _column(values: Sequence[bytes]) -> Any:
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
        for number in _numbers(2)
    )
    ends = pc.add(starts, sizes)
    zero = _numbers(1)[0]
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
def _numbers(count: int) -> Any:
    """The numbers from 0; from a buffer, since Arrow imports pandas to convert a Python int."""
    numbers = pa.py_buffer(array("q", range(count)))
    return pa.Array.from_buffers(pa.int64(), count, [None, numbers])


def _integers(numbers: Any) -> array[int]:
    """A column without nulls or offset, as C integers."""
    found = array("i")
    found.frombytes(pc.cast(numbers, pa.int32()).buffers()[1])
    return found[: len(numbers)]
