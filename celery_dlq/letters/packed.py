r"""How a letter's fields lie in a stream entry: small, exact to the byte, and fast to read.

Each field of a letter is stored in one of three ways:

- **plain**: a field of the entry of its own. So are the fields that scripts and people look for
  (``id``, ``reason``, ``fingerprint``, ``dead_lettered_at``, ``body``), fields of later versions,
  and values that hold the byte 1E.
- **inline**: one of the values that the entry's field ``+`` joins, with the byte 1E between them.
- **compressed**: one of the values that the entry's field ``-`` joins and compresses: the
  traceback, the history, and long values that a redrive does not need.

A letter repeats itself, so two shortcuts save what stands in it twice: the texts of the arguments
are parts of the body, their representations and the task's id are parts of the headers. Of such a
value only its place is kept, inline, as ``start:length``. A value that equals another one (the
exception's message equals the description) is not kept at all.

The field ``+`` begins with a head of five lists of letters, one letter a field (see `_FIELDS`):
plain fields, inline values, places, compressed values, equal values. An example (␞ is 1E)::

    +       AFHS[.@CGY.B\.R.Q␞1␞shop.charge␞sold out␞{"task":"shop.charge","id":"0f9f2b1e-4f7e"}
            ␞28:13␞1:22
    id                  8a3c
    reason              failed
    dead_lettered_at    1772600767891011
    fingerprint         ab12
    body                [["order-1", "express"], {}, {}]
    -       the traceback, compressed

Plain are the fields A, F, H, S and [. Inline are ``schema_version`` (@), ``task_name`` (C),
``description`` (G) and ``headers`` (Y). The ``task_id`` (B) is the 13 bytes at 28 of the headers,
``args_json`` (\) the 22 bytes at 1 of the body. The ``traceback`` (R) is compressed, and the
``exception_message`` (Q) equals the description.

Body, headers and properties, which a redrive needs, are compressed only if the letter would take
more than `_MOST_TIMES` the memory of its message. The exporter reads whole columns by an entry's
layout (`EntryLayout`): it splits and slices, and decodes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from celery_dlq.errors import CorruptLetter

INLINE, COMPRESSED = b"+", b"-"
"""The fields of an entry that hold several values: as they are, and compressed."""

_SEPARATOR = b"\x1e"

# The letter of a field in the first line of ``+``: for ever these. A field that comes later is
# kept plain, so that older readers find it.
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

_SHORT = 12  # a value of at most so many bytes takes no more than its place
_LONG = 120  # a value of more bytes is compressed, unless a redrive needs it
_COMPRESSION_RATIO = 3  # compressed values are about so many times smaller
_MOST_TIMES = 1.4  # the memory that an uncompressed letter may take, as a multiple of its message
_MOST_LAYOUTS = 256
_ENTRY_BYTES = 330  # what Redis takes for an entry and its index beside the values

# What letters have in common; never change a byte of it, compressed letters need it.
_COMMON = (
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


class EntryPart(NamedTuple):
    """A part of an entry, which holds one value or several.

    Attributes:
        names: The fields of its values, in order; an empty name marks a value to skip.
        joined: Whether values are joined by the separator (which no value contains).
        decode: Makes the values' text of what is stored; ``None`` if they are stored as they
            are. Raises ``ValueError`` if it cannot.
    """

    names: tuple[bytes, ...]
    joined: bool = False
    decode: Callable[[bytes], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryLayout:
    """How the values of all entries of one kind lie, for readers of whole columns.

    Attributes:
        pieces: The parts of an entry, in order; ``None`` for a part without a value.
        separator: Stands between joined values.
        places: Fields whose value is a place, ``start:length``, in the value of another field.
        same: Fields that have the value of another field.
    """

    pieces: tuple[EntryPart | None, ...]
    separator: bytes
    places: tuple[tuple[bytes, bytes], ...]
    same: tuple[tuple[bytes, bytes], ...]


def packed(fields: Mapping[str, bytes]) -> dict[str, bytes]:
    """Pack the storage form of a letter into the fields of an entry."""
    kept = _Kept.of(fields)
    message = sum(len(fields.get(name, b"")) for name in (*_MESSAGE, "body"))
    if kept.about_bytes() > _MOST_TIMES * message:
        kept.compress(_MESSAGE)
    return kept.entry()


def fields_of(parts: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """Read the storage form of an entry, which is taken apart when a field is asked for.

    An entry that cannot be unpacked is given as it is: no letter, but people can see it.

    Args:
        parts: Names and values in turn, as Redis gives them.
    """
    if parts[0] == INLINE or INLINE in parts[::2]:
        return PackedFields(parts)
    return _pairs(parts)


class PackedFields(Mapping[bytes, bytes]):
    """The storage form of a packed entry.

    Args:
        parts: Names and values in turn, as Redis gives them.
    """

    __slots__ = ("_named", "_parts")

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts
        self._named: dict[bytes, Any] | None = None  # a value is None: not taken apart yet

    def pieces(self) -> tuple[EntryLayout, Sequence[bytes]]:
        """Give the layout, and the values as they are in the entry.

        Entries of one kind give the very same layout, so that columns can be read together.

        Raises:
            CorruptLetter: Its head cannot be read.
        """
        try:
            form = _layout_of(self._parts)[0].form
            if len(self._parts) != len(form.pieces):
                raise ValueError(_TOO_FEW)
        except _UNREADABLE as exc:
            raise _unreadable(exc) from exc
        return form, self._parts

    def fields(self) -> dict[bytes, bytes]:
        """All fields by name.

        Raises:
            CorruptLetter: It cannot be unpacked.
        """
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
        """How many bytes the entry has."""
        return sum(map(len, self._parts))

    def get(self, name: bytes, default: Any = None) -> Any:
        """One field; the compressed ones are taken apart when one of them is asked for."""
        seen = self._seen()
        value = seen.get(name, default)
        return value if value is not None or name not in seen else self._whole().get(name, default)

    def __getitem__(self, name: bytes) -> bytes:
        value: bytes | None = self._seen()[name]
        return value if value is not None else self._whole()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._seen()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole())  # who walks over all of them wants their values

    def __len__(self) -> int:
        return len(self._whole())

    def _seen(self) -> dict[bytes, Any]:
        if self._named is None:
            try:
                layout, values, _ = _split(self._parts)
                for place, source in layout.early_places:
                    values[place] = _cut(values[source], values[place])
                named: dict[bytes, Any] = dict(zip(layout.names, values, strict=False))
                for name, source in layout.early_same:
                    named[name] = values[source]
                named.update(layout.late)
                self._named = named
            except _UNREADABLE:
                self._named = _pairs(self._parts)
        return self._named

    def _whole(self) -> dict[bytes, bytes]:
        if self._named is None or None in self._named.values():
            try:
                self._named = self.fields()
            except CorruptLetter:
                self._named = _pairs(self._parts)
        return self._named


@dataclass(slots=True)
class _Kept:
    """Where each field of a letter is to lie."""

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
            elif name in _ALWAYS_COMPRESSED or (len(value) > _LONG and name not in _MESSAGE):
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
        """Estimate the memory that it takes in Redis."""
        kept = (self.plain, self.inline, self.places)
        compressed = sum(map(len, self.compressed.values())) // _COMPRESSION_RATIO
        return sum(sum(map(len, some.values())) for some in kept) + compressed + _ENTRY_BYTES

    def entry(self) -> dict[str, bytes]:
        parts = (self.plain, self.inline, self.places, self.compressed, self.same)
        head = ".".join("".join(_CODES.get(name, _OTHER) for name in some) for some in parts)
        values = (head.encode(), *self.inline.values(), *self.places.values())
        entry = {INLINE.decode(): _SEPARATOR.join(values), **self.plain}
        if self.compressed:
            joined = _SEPARATOR.join(self.compressed.values())
            compressor = zlib.compressobj(6, wbits=-13, memLevel=5, zdict=_COMMON)
            entry[COMPRESSED.decode()] = compressor.compress(joined) + compressor.flush()
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How to take entries of one kind apart; made from the beginning of ``+``.

    That has five lists of the letters of fields, with full stops between: plain ones (``?`` for
    one that has no letter), values in ``+``, places in ``+``, compressed values, the same ones.

    Attributes:
        names: All fields in this order.
        early: How many are not compressed.
        compressed: How many are.
        places: Index of a value that is a place, and of the value in which it is.
        same: Indexes of the values that fields at the end have.
        early_places: Those places that need no decompression.
        early_same: The same of the fields at the end, by name.
        late: The names for which something is to be decompressed.
        form: The same for whole columns.
    """

    names: tuple[bytes, ...]
    early: int
    compressed: int
    places: tuple[tuple[int, int], ...]
    same: tuple[int, ...]
    early_places: tuple[tuple[int, int], ...]
    early_same: tuple[tuple[bytes, int], ...]
    late: dict[bytes, None]
    form: EntryLayout

    @classmethod
    def of(cls, head: bytes, plain: tuple[bytes, ...], before: int) -> _Layout:
        """The layout of a beginning and the names of the plain fields; some are before it."""
        parts = head.decode("ascii").split(".")
        ours = (name.decode("utf-8", "replace") for name in plain[before:])
        said = "".join(_CODES.get(name, _OTHER) for name in ours)
        if said != parts[0]:
            raise ValueError(f"its fields are not {parts[0]!r}")
        inline, within, compressed, same = (
            tuple(_NAMES[code] for code in part) for part in parts[1:]
        )
        early = plain + inline + within
        names = early + compressed + same
        at = {name: number for number, name in enumerate(names)}
        places = tuple((at[name], at[_WITHIN[name.decode()].encode()]) for name in within)
        sources = tuple(at[_SAME[name.decode()].encode()] for name in same)
        pieces = [EntryPart((name,)) for name in plain]
        pieces.insert(
            before, EntryPart((b"", *inline, *within), joined=True)
        )  # the head is nobody's
        pieces += [EntryPart(compressed, joined=True, decode=_decompressed)] if compressed else []
        late = {names[place] for place, source in places if source >= len(early)}
        late |= {
            name
            for name, source in zip(same, sources, strict=True)
            if source >= len(early) or names[source] in late
        }
        return cls(
            names=names,
            early=len(early),
            compressed=len(compressed),
            places=places,
            same=sources,
            early_places=tuple(pair for pair in places if pair[1] < len(early)),
            early_same=tuple(
                (name, source)
                for name, source in zip(same, sources, strict=True)
                if name not in late
            ),
            late=dict.fromkeys([*compressed, *late]),
            form=EntryLayout(
                pieces=tuple(one for part in pieces for one in (None, part)),
                separator=_SEPARATOR,
                places=tuple((names[place], names[source]) for place, source in places),
                same=tuple((name, names[at]) for name, at in zip(same, sources, strict=True)),
            ),
        )


_layouts: dict[bytes, _Layout] = {}  # of entries with the fields of version 1 only
_TOO_FEW = "it has not as many fields as its beginning says"


def _layout_of(parts: Sequence[bytes]) -> tuple[_Layout, int]:
    """The layout, and where ``+`` is."""
    at = 0 if parts[0] == INLINE else 2 * parts[::2].index(INLINE)
    head = parts[at + 1].partition(_SEPARATOR)[0]
    layout = _layouts.get(head)
    if layout is None or at:
        layout = _laid_out(head, tuple(parts[::2]), at // 2)
    return layout, at


def _split(parts: Sequence[bytes]) -> tuple[_Layout, list[bytes], bytes]:
    """The layout, the values that are not compressed, and those that are."""
    layout, at = _layout_of(parts)
    values = [*parts[1:at:2], *parts[at + 3 :: 2]]
    data = values.pop() if layout.compressed else b""
    values += parts[at + 1].split(_SEPARATOR)[1:]
    if len(values) != layout.early:
        raise ValueError("it has not as many values as its beginning says")
    return layout, values, data


@lru_cache(maxsize=256)
def _laid_out(head: bytes, stored: tuple[bytes, ...], before: int) -> _Layout:
    """The layout of an entry; ``before`` are fields that something else put before ours."""
    plain = (*stored[:before], *stored[before + 1 :])
    if plain[-1:] == (COMPRESSED,):
        plain = plain[:-1]
    layout = _Layout.of(head, plain, before)
    if bool(layout.compressed) != (stored[-1] == COMPRESSED):
        raise ValueError("its compressed field is not where it should be")
    if not before and _OTHER.encode() not in head and len(_layouts) < _MOST_LAYOUTS:
        _layouts[head] = layout
    return layout


def _decompressed(data: bytes) -> bytes:
    """The compressed values, joined.

    Raises:
        ValueError: They cannot be decompressed.
    """
    reader = zlib.decompressobj(wbits=-15, zdict=_COMMON)
    try:
        text = reader.decompress(data)
    except zlib.error as exc:
        raise ValueError(*exc.args) from exc
    if not reader.eof:
        raise ValueError("it is cut off")
    return text


def _compressed_values(data: bytes, count: int) -> list[bytes]:
    values = _decompressed(data).split(_SEPARATOR)
    if len(values) != count:
        raise ValueError("it is cut off")
    return values


def _place(value: bytes, whole: bytes) -> bytes:
    """``start:length`` of a value in another one; nothing if it is short or not there."""
    at = whole.find(value) if len(value) > _SHORT else -1
    return b"%d:%d" % (at, len(value)) if at >= 0 else b""


def _cut(whole: bytes, place: bytes) -> bytes:
    start, length = place.split(b":")
    at, size = int(start), int(length)
    if at < 0 or at + size > len(whole):
        raise ValueError("a place in it is beyond its end")
    return whole[at : at + size]


def _pairs(parts: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _unreadable(exc: Exception) -> CorruptLetter:
    return CorruptLetter(f"expected a dead letter, got an entry that cannot be unpacked ({exc!r})")
