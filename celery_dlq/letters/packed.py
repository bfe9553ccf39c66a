r"""The layout of a letter in a stream entry: compact, exact to the byte, and fast to read.

Each field of a letter is stored in one of three ways:

- **plain**: a field of the entry. These are the fields that scripts and people look for (``id``,
  ``reason``, ``fingerprint``, ``dead_lettered_at``, ``body``), fields of later versions, and values
  that contain the byte 1E.
- **inline**: one of the values joined in the entry's field ``+``, separated by the byte 1E.
- **compressed**: one of the values joined and compressed in the entry's field ``-``: the
  traceback, the history, and long values that a redrive does not need.

Values that a letter contains twice are stored once. The texts of the arguments are parts of the
body; their representations and the task's id are parts of the headers. Such a value is replaced
by its place, ``start:length``, which is stored inline. A value that equals another one (the
exception's message and the description) is not stored.

The field ``+`` begins with a head of five lists of letters, one letter per field (see `_FIELDS`):
plain fields, inline values, places, compressed values, values equal to another. An example, where
␞ is the byte 1E::

    +       AFHS[.@CGY.B\.R.Q␞1␞shop.charge␞sold out␞{"task":"shop.charge","id":"0f9f2b1e-4f7e"}
            ␞28:13␞1:22
    id                  8a3c
    reason              failed
    dead_lettered_at    1772600767891011
    fingerprint         ab12
    body                [["order-1", "express"], {}, {}]
    -       the traceback, compressed

A, F, H, S and [ are plain. ``schema_version`` (@), ``task_name`` (C), ``description`` (G) and
``headers`` (Y) are inline. The ``task_id`` (B) is the 13 bytes at 28 of the headers, ``args_json``
(\) the 22 bytes at 1 of the body. The ``traceback`` (R) is compressed, and the
``exception_message`` (Q) equals the description.

The body is never compressed. Headers and properties, which a redrive needs too, are compressed only
if the letter would take more than `_MAX_MEMORY_RATIO` times the memory of its message. The exporter
reads whole columns by the layout of the entries (`EntryLayout`): it only splits and slices.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from celery_dlq.errors import CorruptLetter

INLINE, COMPRESSED = b"+", b"-"
"""The two fields of an entry that hold several values."""

_SEPARATOR = b"\x1e"

# A field's index gives its letter in the head of ``+``: the order must never change. Fields that
# the record gets later stay plain, so that older readers find them.
_FIELDS = (
    "schema_version",
    "id",
    "task_id",
    "task_name",
    "source_queue",
    "dead_letter_queue",
    "reason",
    "description",
    "dead_lettered_at",
    "published_at",
    "first_delivered_at",
    "deliveries",
    "retries",
    "redrives",
    "max_deliveries",
    "max_retries",
    "exception_type",
    "exception_message",
    "traceback",
    "fingerprint",
    "history",
    "exchange",
    "routing_key",
    "content_type",
    "content_encoding",
    "headers",
    "properties",
    "body",
    "args_json",
    "kwargs_json",
    "argsrepr",
    "kwargsrepr",
    "root_id",
    "parent_id",
    "group_id",
    "origin",
    "worker_hostname",
    "worker_pid",
    "eta",
    "expires",
    "release",
    "sentry_event_id",
    "native_death",
)
_OTHER = "?"
_CODES = {name: chr(ord("@") + number) for number, name in enumerate(_FIELDS)}
_NAMES = {code: name.encode() for name, code in _CODES.items()}

_PLAIN = ("id", "reason", "fingerprint", "dead_lettered_at", "body")
_ALWAYS_COMPRESSED = frozenset({"traceback", "history", "native_death"})
_WITHIN = {
    "args_json": "body",
    "kwargs_json": "body",
    "argsrepr": "headers",
    "kwargsrepr": "headers",
    "task_id": "headers",
}
_SAME = {"root_id": "task_id", "exception_message": "description"}
_MESSAGE = ("headers", "properties")

_SHORT_BYTES = 12  # a shorter value is stored again: its place would take as much
_LONG_BYTES = 120  # a longer value is compressed, unless a redrive needs it
_COMPRESSION_RATIO = 3  # estimated
_MAX_MEMORY_RATIO = 1.4  # memory of a letter whose headers are inline / memory of its message
_MAX_CACHED_LAYOUTS = 256
_OVERHEAD_BYTES = 330  # memory of an entry and its index in Redis, without the values

# The dictionary of the compression. Never change a byte: stored letters need it.
_DICTIONARY = (
    b'"exception_type":"builtins.,"exception_message":","outcome":"worker_lost'
    b'Traceback (most recent call last):\n  File "/usr/local/lib/python3.11/site-packages/'
    b'celery/app/trace.py", line 479, in trace_task\n    R = retval = fun(*args, **kwargs)\n'
    b'               ^^^^^^^^^^^^^^^^^^^^\n  File "celery/app/trace.py", line 779, in '
    b"__protected_call__\n    return self.run(*args, **kwargs)\n           ^^^^^^^^^^^^^^^^^^^^^\n"
    b'[{"number":1,"retries":0,"started_at":"2026-01-01T00:00:00.000000+00:00","ended_at":"2026-'
    b'","worker_hostname":"celery@","worker_pid":,"outcome":"failed","exception_type":null,'
    b'"exception_message":null}]{"correlation_id":"","reply_to":"","delivery_mode":2,'
    b'"delivery_info":{"exchange":"","routing_key":"celery"},"priority":0,"body_encoding":"base64",'
    b'"delivery_tag":"{"lang":"py","task":"","id":"","shadow":null,"eta":null,"expires":null,'
    b'"group":null,"group_index":null,"retries":0,"timelimit":[null,null],"root_id":"",'
    b'"parent_id":null,"argsrepr":"()","kwargsrepr":"{}","origin":"gen@","ignore_result":false,'
    b'"replaced_task_nesting":0,"stamped_headers":null,"stamps":{}}application/jsonutf-8'
    b"schema_version,task_id,source_queue,dead_letter_queue,description,first_delivered_at,"
    b"deliveries,retries,max_deliveries,max_retries,exception_message,traceback,history,exchange,"
    b"routing_key,content_type,content_encoding,headers,properties,@args_json,@kwargs_json,"
    b"argsrepr,kwargsrepr,root_id,origin,worker_pid\n1,36,6,10,20,16,1,1,1,1,"
)

_UNREADABLE = (zlib.error, ValueError, LookupError)
_NOTHING: Mapping[bytes, int] = {}


class EntryPart(NamedTuple):
    """A part of an entry: one value, or several."""

    # The fields that its values belong to, in order; an empty name marks a value to skip
    names: tuple[bytes, ...]
    joined: bool = False  # Whether values are joined by the separator (which no value contains)
    # Decompresses the values; `None` if they are not compressed. Raises `ValueError` for corrupt
    # data
    decode: Callable[[bytes], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryLayout:
    """The layout that entries of one kind share, for readers of whole columns."""

    # The parts of an entry, in order; `None` for a part without a value (a name)
    pieces: tuple[EntryPart | None, ...]
    separator: bytes  # The byte between joined values
    # Fields whose value is a place, `start:length`, in the value of another field
    places: tuple[tuple[bytes, bytes], ...]
    same: tuple[tuple[bytes, bytes], ...]  # Fields with the value of another field, and that field


def packed(fields: Mapping[str, bytes]) -> dict[str, bytes]:
    """Pack the storage form of a letter into the fields of an entry."""
    kept = _Kept.of(fields)
    message = sum(len(fields.get(name, b"")) for name in (*_MESSAGE, "body"))
    if kept.about_bytes() > _MAX_MEMORY_RATIO * message:
        kept.compress(_MESSAGE)
    return kept.entry()


def fields_of(parts: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """Read the fields of an entry; it is unpacked when a field is read.

    The fields of an entry that cannot be unpacked are those of the entry, so that people can
    look at it.
    """
    if parts[0] == INLINE or INLINE in parts[::2]:
        return PackedFields(parts)
    return _pairs(parts)


class PackedFields(Mapping[bytes, bytes]):
    """The fields of a packed entry.

    A field is looked up by itself, without building a dictionary of all. Looking up a compressed
    one decompresses all of them; one that cannot be read counts as missing.
    """

    __slots__ = ("_all", "_at", "_index", "_parts", "_values")

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts
        self._index: _Index | None = None  # until it is split
        self._at: Mapping[bytes, int] = _NOTHING  # the index's, because `get` is called so often
        self._values: Sequence[bytes] = ()
        self._all: dict[bytes, bytes] | None = None

    def pieces(self) -> tuple[EntryLayout, Sequence[bytes]]:
        """The layout, and the parts of the entry.

        Entries of one kind share one layout object, so that columns can be read together.
        """
        try:
            at = _inline_at(self._parts)
            head = self._parts[at + 1].partition(_SEPARATOR)[0]
            layout = _layout_of(head, self._parts, at).entry_layout
            if len(self._parts) != len(layout.pieces):
                raise ValueError("the number of fields differs from the head")
        except _UNREADABLE as exc:
            raise _unreadable(exc) from exc
        return layout, self._parts

    def fields(self) -> dict[bytes, bytes]:
        """Unpack all fields."""
        try:
            layout, values, data = _split(self._parts)
            if layout.compressed:
                values += _compressed_values(data, layout.compressed)
            for place, source in layout.places:
                values[place] = _cut(values[source], values[place])
            for source in layout.same:
                values.append(values[source])
            return dict(zip(layout.names, values, strict=True))
        except _UNREADABLE as exc:
            raise _unreadable(exc) from exc

    def stored_bytes(self) -> int:
        """The size of the entry, in bytes."""
        return sum(map(len, self._parts))

    def get(self, name: bytes, default: Any = None) -> Any:
        """One field, or the default."""
        at = self._at.get(name)
        return self._elsewhere(name, default) if at is None else self._values[at]

    def names(self) -> frozenset[bytes]:
        """The names of the fields; nothing is decompressed."""
        return (self._index or self._split()).names

    def __getitem__(self, name: bytes) -> bytes:
        value: bytes | None = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole())  # iterating is followed by reading the values

    def __len__(self) -> int:
        return len(self._whole())

    def items(self) -> ItemsView[bytes, bytes]:
        """All fields, without looking up each: half of what a letter costs to read."""
        return self._whole().items()

    def _elsewhere(self, name: bytes, default: Any) -> Any:
        """One field whose value is not one of `_values`, or before they are split."""
        if self._index is None:
            self._split()
            return self.get(name, default)
        if name in self._index.places:
            place, source = self._index.places[name]
            try:
                return _cut(self._values[source], self._values[place])
            except ValueError:
                return default
        return self._whole().get(name, default) if name in self._index.names else default

    def _split(self) -> _Index:
        try:
            layout, values, _ = _split(self._parts)
        except _UNREADABLE:
            return self._as_stored()
        return self._take(layout.index, values)

    def _whole(self) -> dict[bytes, bytes]:
        if self._all is None:
            try:
                self._all = self.fields()
            except CorruptLetter:
                self._all = _pairs(self._parts)
                self._as_stored()
        return self._all

    def _as_stored(self) -> _Index:
        """Have the entry's own fields from now on, for it cannot be unpacked."""
        at = {name: number for number, name in enumerate(self._parts[::2])}
        return self._take(_Index(at, {}, frozenset(at)), self._parts[1::2])

    def _take(self, index: _Index, values: Sequence[bytes]) -> _Index:
        self._index, self._at, self._values = index, index.at, values
        return index


class _Index(NamedTuple):
    """Where the fields of an entry are that need no decompression."""

    at: Mapping[bytes, int]  # The index of a field's value
    # The index of a field's place, and of the value that it points into
    places: Mapping[bytes, tuple[int, int]]
    names: frozenset[bytes]  # All fields, also the compressed ones


@dataclass(slots=True)
class _Kept:
    """The way each field of a letter is stored."""

    plain: dict[str, bytes]
    inline: dict[str, bytes]
    compressed: dict[str, bytes]
    places: dict[str, bytes]
    same: list[str]

    @classmethod
    def of(cls, fields: Mapping[str, bytes]) -> _Kept:
        kept = cls({}, {}, {}, {}, [])
        for name, value in fields.items():
            if name in _PLAIN or name not in _CODES or _SEPARATOR in value:
                kept.plain[name] = value
            elif name in _SAME and fields.get(_SAME[name]) == value:
                kept.same.append(name)
            elif name in _WITHIN and (place := _place(value, fields.get(_WITHIN[name], b""))):
                kept.places[name] = place
            elif name in _ALWAYS_COMPRESSED or (len(value) > _LONG_BYTES and name not in _MESSAGE):
                kept.compressed[name] = value
            else:
                kept.inline[name] = value
        return kept

    def compress(self, names: Sequence[str]) -> None:
        """Compress fields that are inline."""
        for name in names:
            if name in self.inline:
                self.compressed[name] = self.inline.pop(name)

    def about_bytes(self) -> int:
        """Estimate the memory of the entry in Redis."""
        kept = (self.plain, self.inline, self.places)
        compressed = sum(map(len, self.compressed.values())) // _COMPRESSION_RATIO
        return sum(sum(map(len, some.values())) for some in kept) + compressed + _OVERHEAD_BYTES

    def entry(self) -> dict[str, bytes]:
        parts = (self.plain, self.inline, self.places, self.compressed, self.same)
        head = ".".join("".join(_CODES.get(name, _OTHER) for name in some) for some in parts)
        values = (head.encode(), *self.inline.values(), *self.places.values())
        entry = {INLINE.decode(): _SEPARATOR.join(values), **self.plain}
        if self.compressed:
            joined = _SEPARATOR.join(self.compressed.values())
            compressor = zlib.compressobj(6, wbits=-13, memLevel=5, zdict=_DICTIONARY)
            entry[COMPRESSED.decode()] = compressor.compress(joined) + compressor.flush()
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Instructions for unpacking entries of one kind, made from the head of ``+``.

    The head has five lists of letters, separated by full stops: plain fields (``?`` for one
    without a letter), inline values, places, compressed values, values equal to another.
    """

    names: tuple[bytes, ...]  # All fields, in the order of the head
    early: int  # Number of values that are not compressed
    compressed: int  # Number of values that are
    places: tuple[tuple[int, int], ...]  # Index of a place, and of the value that it points into
    same: tuple[int, ...]  # Indexes of the values that the fields at the end equal
    index: _Index  # Where the values are that need no decompression
    entry_layout: EntryLayout  # The same for readers of whole columns

    @classmethod
    def of(cls, head: bytes, plain: tuple[bytes, ...], before: int) -> _Layout:
        """Parse a head; the first ``before`` plain fields precede ``+``."""
        parts = head.decode("ascii").split(".")
        packed_names = (name.decode("utf-8", "replace") for name in plain[before:])
        codes = "".join(_CODES.get(name, _OTHER) for name in packed_names)
        if codes != parts[0]:
            raise ValueError(f"the head lists the fields {parts[0]!r}, the entry has {codes!r}")
        inline, within, compressed, same = (
            tuple(_NAMES[code] for code in part) for part in parts[1:]
        )
        early = plain + inline + within
        names = early + compressed + same
        at = {name: number for number, name in enumerate(names)}
        places = tuple((at[name], at[_WITHIN[name.decode()].encode()]) for name in within)
        sources = tuple(at[_SAME[name.decode()].encode()] for name in same)
        pieces = [EntryPart((name,)) for name in plain]
        pieces.insert(before, EntryPart((b"", *inline, *within), joined=True))  # b"": the head
        pieces += [EntryPart(compressed, joined=True, decode=_decompress)] if compressed else []
        # Places in compressed values, and fields that equal a late one, are late themselves.
        direct = {name: at[name] for name in (*plain, *inline)}
        within_early = {names[one[0]]: one for one in places if one[1] < len(early)}
        for name, source in zip(same, sources, strict=True):
            if names[source] in direct:
                direct[name] = source
            elif names[source] in within_early:
                within_early[name] = within_early[names[source]]
        return cls(
            names=names,
            early=len(early),
            compressed=len(compressed),
            places=places,
            same=sources,
            index=_Index(direct, within_early, frozenset(names)),
            entry_layout=EntryLayout(
                pieces=tuple(one for part in pieces for one in (None, part)),
                separator=_SEPARATOR,
                places=tuple((names[place], names[source]) for place, source in places),
                same=tuple((name, names[at]) for name, at in zip(same, sources, strict=True)),
            ),
        )


_layouts: dict[bytes, _Layout] = {}  # by head; only entries without fields of later versions


def _inline_at(parts: Sequence[bytes]) -> int:
    """The index of the name ``+``."""
    return 0 if parts[0] == INLINE else 2 * parts[::2].index(INLINE)


def _layout_of(head: bytes, parts: Sequence[bytes], at: int) -> _Layout:
    """The layout of an entry with this head in its field ``+`` at an index."""
    layout = _layouts.get(head)
    if layout is None or at:
        layout = _laid_out(head, tuple(parts[::2]), at // 2)
    return layout


def _split(parts: Sequence[bytes]) -> tuple[_Layout, list[bytes], bytes]:
    """The layout, the values that are not compressed, and the compressed data."""
    at = _inline_at(parts)
    head, *inline = parts[at + 1].split(_SEPARATOR)
    layout = _layout_of(head, parts, at)
    values = [*parts[1:at:2], *parts[at + 3 :: 2]]
    data = values.pop() if layout.compressed else b""
    values += inline
    if len(values) != layout.early:
        raise ValueError("the number of values differs from the head")
    return layout, values, data


@lru_cache(maxsize=256)
def _laid_out(head: bytes, stored: tuple[bytes, ...], before: int) -> _Layout:
    """The layout of an entry; ``before`` fields of other writers precede ``+``."""
    plain = (*stored[:before], *stored[before + 1 :])
    if plain[-1:] == (COMPRESSED,):
        plain = plain[:-1]
    layout = _Layout.of(head, plain, before)
    if bool(layout.compressed) != (stored[-1] == COMPRESSED):
        raise ValueError("the compressed field is missing, or unexpected")
    if not before and _OTHER.encode() not in head and len(_layouts) < _MAX_CACHED_LAYOUTS:
        _layouts[head] = layout
    return layout


def _decompress(data: bytes) -> bytes:
    """Decompress the joined values."""
    reader = zlib.decompressobj(wbits=-15, zdict=_DICTIONARY)
    try:
        text = reader.decompress(data)
    except zlib.error as exc:
        raise ValueError(*exc.args) from exc
    if not reader.eof:
        raise ValueError("the compressed data are cut off")
    return text


def _compressed_values(data: bytes, count: int) -> list[bytes]:
    values = _decompress(data).split(_SEPARATOR)
    if len(values) != count:
        raise ValueError("the number of compressed values differs from the head")
    return values


def _place(value: bytes, whole: bytes) -> bytes:
    """``start:length`` of a value in another one; empty if it is short or not there."""
    at = whole.find(value) if len(value) > _SHORT_BYTES else -1
    return b"%d:%d" % (at, len(value)) if at >= 0 else b""


def _cut(whole: bytes, place: bytes) -> bytes:
    start, length = place.split(b":")
    at, size = int(start), int(length)
    if at < 0 or at + size > len(whole):
        raise ValueError("a place is beyond its end")
    return whole[at : at + size]


def _pairs(parts: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _unreadable(exc: Exception) -> CorruptLetter:
    return CorruptLetter(f"the entry cannot be unpacked, it is corrupt or not a letter ({exc!r})")
