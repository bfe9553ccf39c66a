"""A clock that is wrong: Python imports this before all else where its folder is on PYTHONPATH.

``CHAOS_SKEW`` says by how many seconds. What Python's own functions say of the date is wrong;
clocks that only measure (``time.monotonic``) are right, as where a clock was set wrongly.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import Any

SKEW = float(os.environ.get("CHAOS_SKEW") or 0.0)

_DATETIME, _TIME, _TIME_NS = dt.datetime, time.time, time.time_ns


class _Kind(type):
    def __instancecheck__(cls, thing: object) -> bool:  # also what C code makes
        return isinstance(thing, _DATETIME)


class _Wrong(_DATETIME, metaclass=_Kind):
    __slots__ = ()

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def today(cls) -> Any:
        return cls.now()

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(dt.timezone.utc).replace(tzinfo=None)


if SKEW:
    _Wrong.__name__ = _Wrong.__qualname__ = "datetime"
    _Wrong.__module__ = "datetime"
    dt.datetime = _Wrong  # type: ignore[misc]
    time.time = lambda: _TIME() + SKEW
    time.time_ns = lambda: _TIME_NS() + int(SKEW * 1e9)
