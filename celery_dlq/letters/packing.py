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

The field ``+`` begins with a head of five lists of letters, one letter per field, in the order of
`celery_dlq.letters.record.DeadLetter`: plain fields, inline values, places, compressed values,
values equal to another. An example, where ␞ is the byte 1E::

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

Up to `_FIXED_CODES_BYTES` are deflated by fixed codes, which an export inflates in half the time.
The body is never compressed. Headers and properties, which a redrive needs too, are compressed only
if the letter would take more than `_MAX_MEMORY_RATIO` times the memory of its message.
`celery_dlq.letters.packed` reads entries.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from itertools import islice

from celery_dlq.letters.record import Use, record_fields

INLINE, COMPRESSED = b"+", b"-"
"""The two fields of an entry that hold several values."""

SEPARATOR = b"\x1e"
"""The byte between joined values."""

# A field's index in the record gives its letter in the head. Later fields of the record stay plain,
# so that older releases find them.
_FIELDS = dict(islice(record_fields().items(), 43))
CODES = {name: chr(ord("@") + number) for number, name in enumerate(_FIELDS)}
OTHER = "?"

_INLINE = frozenset(name for name, one in _FIELDS.items() if not one.use & Use.PLAIN)
_MESSAGE = tuple(name for name, one in _FIELDS.items() if one.use & Use.MESSAGE)
_FOR_PEOPLE = frozenset(name for name, one in _FIELDS.items() if one.use & Use.COMPRESSED)
WITHIN = {name: one.within for name, one in _FIELDS.items() if one.within}
SAME_AS = {name: one.same_as for name, one in _FIELDS.items() if one.same_as}

_SHORT_BYTES = 12  # a shorter value is stored again: its place would take as much
_LONG_BYTES = 120  # a longer value is compressed, unless a redrive needs it
_FIXED_CODES_BYTES = 1000  # own codes make such a text 5 % shorter, and slow to inflate
_COMPRESSION_RATIO = 3  # estimated
_MAX_MEMORY_RATIO = 1.4  # memory of a letter whose headers are inline / memory of its message
_OVERHEAD_BYTES = 330  # memory of an entry and its index in Redis, without the values

# The dictionary of the compression. Never change a byte: stored letters need it.
DICTIONARY = (
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
    """Pack the storage form of a letter into the fields of an entry."""
    groups: tuple[dict[str, bytes], ...] = ({}, {}, {}, {}, {})
    plain, inline, places, compressed, same = groups
    for name, value in fields.items():
        if name not in _INLINE or SEPARATOR in value:
            plain[name] = value
        elif name in SAME_AS and fields.get(SAME_AS[name]) == value:
            same[name] = value
        elif name in WITHIN and (place := _place_of(value, fields.get(WITHIN[name], b""))):
            places[name] = place
        elif name in _FOR_PEOPLE or (len(value) > _LONG_BYTES and name not in _MESSAGE):
            compressed[name] = value
        else:
            inline[name] = value
    message = sum(len(fields.get(name, b"")) for name in (*_MESSAGE, "body"))
    if _about_bytes(plain, inline, places, compressed) > _MAX_MEMORY_RATIO * message:
        compressed |= {name: inline.pop(name) for name in _MESSAGE if name in inline}
    head = ".".join("".join([CODES.get(name, OTHER) for name in group]) for group in groups)
    values = (head.encode(), *inline.values(), *places.values())
    entry = {INLINE.decode(): SEPARATOR.join(values), **plain}
    if compressed:
        text = SEPARATOR.join(compressed.values())
        codes = zlib.Z_FIXED if len(text) <= _FIXED_CODES_BYTES else zlib.Z_DEFAULT_STRATEGY
        compressor = zlib.compressobj(6, wbits=-13, memLevel=5, strategy=codes, zdict=DICTIONARY)
        entry[COMPRESSED.decode()] = compressor.compress(text) + compressor.flush()
    return entry


def _about_bytes(*groups: Mapping[str, bytes]) -> int:
    """Estimate the memory of an entry in Redis; the values of the last group are compressed."""
    *early, compressed = (sum(map(len, group.values())) for group in groups)
    return sum(early) + compressed // _COMPRESSION_RATIO + _OVERHEAD_BYTES


def _place_of(value: bytes, whole: bytes) -> bytes:
    """``start:length`` of a value in another one; empty if it is short or not there."""
    at = whole.find(value) if len(value) > _SHORT_BYTES else -1
    return b"%d:%d" % (at, len(value)) if at >= 0 else b""
