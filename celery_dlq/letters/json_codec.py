"""Lossless JSON text: bytes, times, decimals and UUIDs survive a round trip.

Message headers may hold values that JSON does not know (AMQP tables carry bytes
and timestamps). They are encoded as ``{"__type__": …, "__value__": …}``. A value of
any other type is encoded as its ``repr`` with the type ``repr``: an operator can read it, and
no letter is lost because of it.
"""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import date, datetime, time, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

from celery_dlq.letters.printable import shortened

_TAG, _VALUE = "__type__", "__value__"
_FRACTION = re.compile(r"(?<=:[0-9]{2})[.,]([0-9]+)")


def _base64_of(value: Any) -> str:
    return base64.b64encode(bytes(value)).decode("ascii")


# Of each tag: the types, how a value is written, and how it is read. A datetime is a date, too.
_TAGS: dict[str, tuple[tuple[type, ...], Any, Any]] = {
    "bytes": ((bytes, bytearray, memoryview), _base64_of, partial(base64.b64decode, validate=True)),
    "datetime": ((datetime,), datetime.isoformat, datetime.fromisoformat),
    "date": ((date,), date.isoformat, date.fromisoformat),
    "time": ((time,), time.isoformat, time.fromisoformat),
    "decimal": ((Decimal,), str, Decimal),
    "uuid": ((UUID,), str, UUID),
    "float": ((), repr, float),  # NaN and infinities
    "repr": ((), repr, str),
}


def dumps(value: object) -> str:
    """Encode a value as compact JSON text; never raises, whatever the value."""
    try:
        return _dump_json(value)
    except ValueError:  # NaN and infinities are not JSON; or a structure contains itself
        try:
            return _dump_json(_floats_tagged(value))
        except (TypeError, ValueError, RecursionError):
            return _dump_json({_TAG: "repr", _VALUE: safe_repr(value)})
    except (TypeError, RecursionError):  # keys of odd types, or too deep
        return _dump_json({_TAG: "repr", _VALUE: safe_repr(value)})


def moment(text: str) -> datetime:
    """Parse an ISO 8601 time of any publisher.

    Publishers in other languages write fractions of one, seven or nine digits, and ``Z``;
    Python 3.10 parses only three or six digits, and no ``Z``.
    """
    text = text.replace("Z", "+00:00")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromisoformat(_FRACTION.sub(lambda found: f".{found[1][:6]:0<6}", text))


def instant(text: str) -> datetime:
    """Parse an ISO 8601 time; one without a zone is UTC."""
    return with_zone(moment(text))


def with_zone(value: datetime) -> datetime:
    """Return a time with its zone; one without a zone is UTC, as in databases and in AMQP."""
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


def loads(text: str) -> Any:
    """Decode what `dumps` wrote."""
    return json.loads(text, object_hook=_untagged)


def safe_repr(value: object, limit: int = 10_000) -> str:
    """``repr`` that never raises and never exceeds ``limit``."""
    try:
        text = repr(value)
    except Exception as exc:  # noqa: BLE001 - that is the point of this function
        text = f"<unprintable {type(value).__name__}: repr raised {type(exc).__name__}>"
    return shortened(text, limit)


def _dump_json(value: object) -> str:
    return _ENCODER.encode(value)


def _floats_tagged(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", _VALUE: repr(value)}
    if isinstance(value, dict):
        return {key: _floats_tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_floats_tagged(item) for item in value]
    return value


def _tagged_value(value: object) -> object:
    for tag, (types, encode, _decode) in _TAGS.items():
        if isinstance(value, types):
            return {_TAG: tag, _VALUE: encode(value)}
    if isinstance(value, (set, frozenset)):
        return list(value)
    return {_TAG: "repr", _VALUE: safe_repr(value)}


def _untagged(value: dict[str, Any]) -> Any:
    if len(value) != 2 or _TAG not in value or _VALUE not in value:  # noqa: PLR2004 - the two tags
        return value
    try:
        return _TAGS[value[_TAG]][2](value[_VALUE])
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return value


_ENCODER = json.JSONEncoder(
    default=_tagged_value, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
