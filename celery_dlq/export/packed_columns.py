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
from celery_dlq.letters.packed import COMPRESSED, INLINE, SEPARATOR, EntryLayout, decompressed

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
    needed = wanted | {other for name, other in layout.same if name in wanted}
    needed |= {whole for name, whole in layout.places if name in needed}
    found: dict[bytes, Any] = {}
    try:
        for name, values in zip(layout.stored, zip(*rows, strict=True), strict=True):
            if name == INLINE:
                found.update(_joined(values, (b"", *layout.joined), needed))  # b"": the head
            elif name == COMPRESSED and not needed.isdisjoint(layout.compressed):
                texts = [decompressed(value) for value in values]
                found.update(_joined(texts, layout.compressed, needed))
            elif name in needed:
                found[name] = _column(values)
        for name, whole in layout.places:
            if name in needed:
                found[name] = _cut(found[whole], found[name])
    except (ValueError, pa.ArrowInvalid) as exc:
        raise OddEntry from exc
    found.update({name: found[other] for name, other in layout.same if name in needed})
    return found


def _joined(
    texts: Sequence[bytes], names: Sequence[bytes], needed: frozenset[bytes]
) -> dict[bytes, Any]:
    """Split joined values of all entries into arrays by field."""
    lists = _split(_column(texts), SEPARATOR, len(names))
    numbered = zip(_numbers(len(names)), names, strict=True)
    return {name: pc.list_element(lists, number) for number, name in numbered if name in needed}


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
