"""Reads the entries that `celery_dlq.letters.packing` lays out; exact to the byte, and fast.

The exporter reads whole columns by the layout of the entries (`EntryLayout`): it only splits and
slices. A worker reads no entry.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters.packing import (
    CODES,
    COMPRESSED,
    DICTIONARY,
    INLINE,
    OTHER,
    SAME_AS,
    SEPARATOR,
    WITHIN,
)
from celery_dlq.letters.record import DeadLetter

_MAX_LAYOUTS = 256
_NAMES = {code: name.encode() for name, code in CODES.items()}
# The same as the first block of deflated data: cheaper than to give it to each new decompressor.
_SIZE = len(DICTIONARY)
_FIRST = struct.pack("<BHH", 0, _SIZE, _SIZE ^ 0xFFFF) + DICTIONARY

_UNREADABLE = (zlib.error, ValueError, LookupError)


def codes_of(names: Iterable[str]) -> str:
    """The letters in a head of some fields, and of those that their values are parts or copies of.

    A reader who wants only these fields can do without the values of all others.
    """
    needed = set(names)
    while True:
        others = {one[name] for name in needed for one in (WITHIN, SAME_AS) if name in one}
        if others <= needed:
            return "".join(sorted({CODES.get(name, OTHER) for name in needed}))
        needed |= others


def fields_of(parts: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """Read the fields of an entry; it is unpacked when a field is read.

    The fields of an entry that cannot be unpacked are those of the entry, so that people can
    look at it.
    """
    if parts[0] == INLINE or INLINE in parts[::2]:
        return PackedFields(parts)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryLayout:
    """Where the fields of entries of one kind are; such entries share one object."""

    stored: tuple[bytes, ...]  # The fields of the entry, `+` and `-` among them
    names: frozenset[bytes]  # All fields
    at: Mapping[bytes, int]  # The indexes of the values that are there as they are
    joined: tuple[bytes, ...] = ()  # The fields in `+`: inline values, then places
    early: tuple[bytes, ...] = ()  # Both of these
    compressed: tuple[bytes, ...] = ()  # The fields in `-`
    # Fields with a place, and the fields they are parts of
    places: tuple[tuple[bytes, bytes], ...] = ()
    # Fields with the value of another field, and that field
    same: tuple[tuple[bytes, bytes], ...] = ()
    # Of places in values that are there as they are: their own index, the value's
    cuts: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)


class PackedFields(Mapping[bytes, bytes]):
    """The fields of a packed entry.

    A field is looked up by itself, without building a dictionary of all. Looking up a compressed
    one decompresses all of them; one that cannot be read counts as missing.
    """

    _layout: EntryLayout | None = None  # until it is split
    _at: Mapping[bytes, int] = MappingProxyType({})  # the layout's: `get` is called so often
    _values: Sequence[bytes] = ()
    _all: dict[bytes, bytes] | None = None

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts  # names and values in turn, as they are stored

    def layout(self) -> EntryLayout:
        """What the names and values of `parts` are, for readers of whole columns."""
        try:
            stored = tuple(self.parts[::2])
            head = self.parts[2 * stored.index(INLINE) + 1].partition(SEPARATOR)[0]
            return _layout_of(stored, head)
        except _UNREADABLE as exc:
            raise _unreadable(exc) from exc

    def head(self) -> bytes:
        """The head in `+`, if that is the first field, as it is in what `packed` makes."""
        parts = self.parts
        return parts[1].partition(SEPARATOR)[0] if parts[0] == INLINE else b""

    def fields(self) -> dict[bytes, bytes]:
        """Unpack all fields."""
        try:
            layout, values = _split_parts(self.parts)
            found = dict(zip(layout.early, values, strict=True))
            del found[INLINE]
            if layout.compressed:
                late = decompressed(found.pop(COMPRESSED)).split(SEPARATOR)
                found.update(zip(layout.compressed, late, strict=True))
            for name, whole in layout.places:
                found[name] = _slice_of(found[whole], found[name])
            for name, other in layout.same:
                found[name] = found[other]
        except _UNREADABLE as exc:
            raise _unreadable(exc) from exc
        return found

    def stored_bytes(self) -> int:
        """The size of the entry, in bytes."""
        return sum(map(len, self.parts))

    def get(self, name: bytes, default: Any = None) -> Any:
        """One field, or the default."""
        at = self._at.get(name)
        return self._elsewhere(name, default) if at is None else self._values[at]

    def names(self) -> frozenset[bytes]:
        """The names of the fields; nothing is decompressed."""
        return (self._layout or self._open_layout()).names

    def __getitem__(self, name: bytes) -> bytes:
        value: bytes | None = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all_fields())  # iterating is followed by reading the values

    def __len__(self) -> int:
        return len(self._all_fields())

    def items(self) -> ItemsView[bytes, bytes]:
        """All fields, without looking up each: half of what a letter costs to read."""
        return self._all_fields().items()

    def _elsewhere(self, name: bytes, default: Any) -> Any:
        """One field that is a place or compressed; or any, before the entry is split."""
        layout = self._layout
        if layout is None:
            self._open_layout()
            return self.get(name, default)
        if name in layout.cuts:
            place, whole = layout.cuts[name]
            try:
                return _slice_of(self._values[whole], self._values[place])
            except ValueError:
                return default
        return self._all_fields().get(name, default) if name in layout.names else default

    def _open_layout(self) -> EntryLayout:
        try:
            self._layout, self._values = _split_parts(self.parts)
        except _UNREADABLE:
            return self._as_stored()
        self._at = self._layout.at
        return self._layout

    def _as_stored(self) -> EntryLayout:
        """Have the entry's own fields from now on, for it cannot be unpacked."""
        stored = tuple(self.parts[::2])
        self._at = {name: number for number, name in enumerate(stored)}
        self._values = self.parts[1::2]
        self._layout = EntryLayout(stored=stored, names=frozenset(stored), at=self._at)
        return self._layout

    def _all_fields(self) -> dict[bytes, bytes]:
        if self._all is None:
            try:
                self._all = self.fields()
            except CorruptLetter:
                self._as_stored()
                self._all = dict(zip(self._at, self._values, strict=True))
        return self._all


def _split_parts(parts: Sequence[bytes]) -> tuple[EntryLayout, list[bytes]]:
    """The layout; and the values of the entry's own fields, then those joined in ``+``."""
    stored = tuple(parts[::2])
    head, *joined = parts[2 * stored.index(INLINE) + 1].split(SEPARATOR)
    layout = _layout_of(stored, head)
    if len(joined) != len(layout.joined):
        raise ValueError("the number of values differs from the head")
    return layout, [*parts[1::2], *joined]


_layouts: dict[bytes, EntryLayout] = {}  # by head, the latest one


def _layout_of(stored: tuple[bytes, ...], head: bytes) -> EntryLayout:
    """The layout of an entry; names are compared, because to hash them all costs more."""
    layout = _layouts.get(head)
    if layout is None or layout.stored != stored:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        layout = _layouts[head] = _laid_out(stored, head)
    return layout


@lru_cache(maxsize=_MAX_LAYOUTS)
def _laid_out(stored: tuple[bytes, ...], head: bytes) -> EntryLayout:
    """The layout of an entry with these fields and this head in ``+``."""
    _plain_codes, *others = head.decode("ascii").split(".")
    inline, within, compressed, same = (tuple(_NAMES[code] for code in part) for part in others)
    if bool(compressed) != (COMPRESSED in stored):
        raise ValueError("the compressed field is missing, or unexpected")
    early = stored + inline + within
    indexes = {name: number for number, name in enumerate(early)}
    at = {name: number for name, number in indexes.items() if name not in within}
    places = tuple((name, WITHIN[name.decode()].encode()) for name in within)
    # Places in compressed values, and fields that equal one of these, are read with all fields.
    cuts = {name: (indexes[name], at[whole]) for name, whole in places if whole in at}
    others_of = tuple((name, SAME_AS[name.decode()].encode()) for name in same)
    at |= {name: at[other] for name, other in others_of if other in at}
    cuts |= {name: cuts[other] for name, other in others_of if other in cuts}
    return EntryLayout(
        stored=stored,
        joined=inline + within,
        early=early,
        compressed=compressed,
        places=places,
        same=others_of,
        names=frozenset((*early, *compressed, *same)) - {INLINE, COMPRESSED},
        at=at,
        cuts=cuts,
    )


def decompressed(data: bytes) -> bytes:
    """The joined values of ``-``; ``ValueError`` if the data are corrupt."""
    try:
        return zlib.decompress(_FIRST + data, wbits=-15)[_SIZE:]
    except zlib.error as exc:
        raise ValueError(*exc.args) from exc


def _slice_of(whole: bytes, place: bytes) -> bytes:
    begin, _, size = place.partition(b":")
    start, length = int(begin), int(size)
    if start < 0 or start + length > len(whole):
        raise ValueError("a place is beyond its end")
    return whole[start : start + length]


def _unreadable(exc: Exception) -> CorruptLetter:
    return CorruptLetter(f"the entry cannot be unpacked, it is corrupt or not a letter ({exc!r})")


def letter_from(fields: Mapping[bytes, bytes]) -> DeadLetter:
    """Make a letter of its storage form as stores give it, with names as bytes.

    Raises:
        CorruptLetter: It is none.
    """
    named = {name.decode("utf-8", "replace"): value for name, value in fields.items()}
    return DeadLetter.from_fields(named)
