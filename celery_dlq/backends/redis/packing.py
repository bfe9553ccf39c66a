"""How a letter's fields lie in its stream entry: small, and back again byte by byte.

A letter repeats itself: the texts of args and kwargs stand in the body too, most of the
rest is JSON and a traceback. So what scripts, filters and people need at a glance stays
plain, a text that stands in the body is kept as its place there, and all other fields
share one compressed field. Whoever reads a stream without this module finds plain
fields beside ``~``; entries without ``~`` are read as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from celery_dlq.errors import CorruptLetter

PACKED = b"~"
"""The one field that holds the others: a line of names, a line of lengths, the values."""

_PLAIN = frozenset({
    "id", "task_name", "reason", "fingerprint", "dead_lettered_at", "exception_type",
    "worker_hostname", "redrives", "body",
})  # fmt: skip
_IN_BODY = ("args_json", "kwargs_json")
_PLACE = "@"  # before the name of a field whose value is ``start:length`` in the body

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


def packed(fields: Mapping[str, bytes]) -> dict[str, bytes]:
    """The entry of a letter's storage form."""
    body = fields.get("body", b"")
    entry: dict[str, bytes] = {}
    rest: dict[str, bytes] = {}
    for name, value in fields.items():
        if name in _PLAIN:
            entry[name] = value
        elif name in _IN_BODY and value and (at := body.find(value)) >= 0:
            rest[_PLACE + name] = b"%d:%d" % (at, len(value))
        else:
            rest[_quoted(name)] = value
    if rest:
        entry[PACKED.decode()] = _compressed(rest)
    return entry


def unpacked(entry: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The storage form of an entry; an entry that was not packed is given back as it is.

    Raises:
        CorruptLetter: Its packed field cannot be read.
    """
    if PACKED not in entry:
        return entry
    fields = dict(entry)
    try:
        places, parts = _parts(fields.pop(PACKED))
        fields.update(parts)
        for name in places:
            at, _, length = fields.pop(b"@" + name).partition(b":")
            start = int(at)
            fields[name] = entry[b"body"][start : start + int(length)]
    except (zlib.error, ValueError, KeyError) as exc:
        message = f"expected a dead letter, got an entry that cannot be unpacked ({exc!r})"
        raise CorruptLetter(message) from exc
    return fields


def readable(entry: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """As `unpacked`, but what cannot be unpacked is given back as it is."""
    try:
        return unpacked(entry)
    except CorruptLetter:
        return entry


def _compressed(fields: Mapping[str, bytes]) -> bytes:
    names = ",".join(fields).encode("utf-8", "surrogateescape")
    sizes = ",".join(str(len(value)) for value in fields.values()).encode()
    press = zlib.compressobj(6, wbits=-15, zdict=_COMMON)
    return press.compress(b"\n".join((names, sizes, b"".join(fields.values())))) + press.flush()


def _parts(data: bytes) -> tuple[tuple[bytes, ...], dict[bytes, bytes]]:
    """Which fields are places in the body, and all fields with their values."""
    reader = zlib.decompressobj(wbits=-15, zdict=_COMMON)
    text = reader.decompress(data)
    names_line, _, rest = text.partition(b"\n")
    sizes_line, _, values = rest.partition(b"\n")
    names, places = _names(names_line)
    ends = list(accumulate(map(int, sizes_line.split(b","))))
    if not reader.eof or len(ends) != len(names) or ends[-1] != len(values):
        message = "it is cut off"
        raise ValueError(message)
    starts = [0, *ends]
    return places, {
        name: values[start:end] for name, start, end in zip(names, starts, ends, strict=False)
    }


@lru_cache(maxsize=256)
def _names(line: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The names of a line, of which letters of one kind have the same."""
    names = line.split(b",")
    places = tuple(name[1:] for name in names if name[:1] == b"@")
    return tuple(name if name[:1] == b"@" else _unquoted(name) for name in names), places


@lru_cache(maxsize=256)
def _quoted(name: str) -> str:
    """A field of a later version may have what separates names here in its own."""
    for character, code in (("%", "%25"), (",", "%2C"), ("\n", "%0A"), (_PLACE, "%40")):
        name = name.replace(character, code)
    return name


def _unquoted(name: bytes) -> bytes:
    for code, character in ((b"%40", b"@"), (b"%0A", b"\n"), (b"%2C", b","), (b"%25", b"%")):
        name = name.replace(code, character)
    return name
