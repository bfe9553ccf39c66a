"""The one validator of what users write: settings, keys of policies, options.

A check takes what to call the value in an error and the value, and returns the value in the one
form that the package works with; what it cannot use is a `SettingsError` of one line: *expected X
to be Y, got Z*. Durations are seconds inside; a number, a timedelta or a text such as ``30m`` at
the edge.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.letters.json_codec import safe_repr

T = TypeVar("T")
Check = Callable[[str, object], T]

MAX_INTEGER = 10**15
MAX_DURATION_SECONDS = 1000 * 366 * 86400.0
_SHOWN_CHARS = 200
_OFF = ("off", "none", "null")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def shown(value: object) -> str:
    """A value for a message: one line, short, and without what could be a password of a URL."""
    one_line = " ".join(safe_repr(value, _SHOWN_CHARS).split())
    return re.sub(r"""(^|//|[\s'"\[({,;])([a-z0-9+]+://)?[^\s'"]*@""", r"\1\2**@", one_line)


def expected(where: str, what: str, got: object) -> SettingsError:
    """The error about a value that cannot be used."""
    return SettingsError(f"expected {where} to be {what}, got {shown(got)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


def check_names(
    what: str,
    names: Iterable[str],
    known: Collection[str],
    error: type[DLQError] = DLQError,
) -> None:
    """Refuse a name that is not known, with the one that is meant."""
    for name in names:
        if name not in known:
            raise error(f"expected only known {what}, got {shown(name)}; {suggestion(name, known)}")


def is_off(value: object) -> bool:
    """True for what ends a key: ``False``, ``off``, ``none`` or ``null``."""
    return value is False or (isinstance(value, str) and value.strip().lower() in _OFF)


def integer(least: int, most: int = MAX_INTEGER, why: str = "") -> Check[int]:
    """A check of a whole number from ``least`` to ``most``."""

    def check(where: str, value: object) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if most < MAX_INTEGER:
            what = f"a whole number of {least} to {most}{why}"
        elif whole and value > most:  # type: ignore[operator]
            what = f"a whole number up to {most:,}"
        else:
            what = f"a whole number of {least} or more"
        if not whole or not least <= value <= most:  # type: ignore[operator]
            raise expected(where, what, value)
        return value  # type: ignore[return-value]

    return check


def number(least: float, most: float, what: str) -> Check[float]:
    """A check of a number from ``least`` to ``most``, which is called ``what``."""

    def check(where: str, value: object) -> float:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not least <= value <= most:  # type: ignore[operator]
            raise expected(where, what, value)
        return float(value)  # type: ignore[arg-type]

    return check


share = number(0, 1, "a share from 0 to 1, e.g. 0.001")


def duration(what: str, fits: Callable[[float], bool] = lambda _: True) -> Check[float]:
    """A check of a duration in seconds that is never negative, and is called ``what``."""

    def check(where: str, value: object) -> float:
        given = value
        if isinstance(value, timedelta):
            given = value.total_seconds()
        elif isinstance(value, str):
            given = duration_seconds(value)
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            forms = "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d"
            raise expected(where, forms, value)
        # Also refuses NaN and infinity.
        if not 0 <= given <= MAX_DURATION_SECONDS or not fits(given):
            raise expected(where, f"a duration of {what}", value)
        return float(given)

    return check


seconds = duration("0 or more seconds")
positive_seconds = duration("more than 0 seconds", lambda given: given > 0)


def duration_seconds(given: str) -> float | None:
    """Seconds of a text such as ``90``, ``30s``, ``5m``, ``2h``, ``7d``, ``1w``; else ``None``.

    Also ``None`` for more than a thousand years, which no date of Python could be moved by.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", given.strip(), re.ASCII)
    value = None if found is None else float(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    return None if value is None or value > MAX_DURATION_SECONDS else value


def age_seconds(given: str) -> float | None:
    """As `duration_seconds`, where a number without a unit may be a year, and is no age."""
    return duration_seconds(given) if given.strip()[-1:].isalpha() else None


def true_or_false(where: str, value: object) -> bool:
    """Check ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise expected(where, "True or False", value)
    return value


def name_text(where: str, value: object) -> str:
    """Check a name: text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise expected(where, "a name (text that is not empty)", value)
    return value


def key_name(what: str) -> Check[str]:
    """A check of a name that is a part of Redis keys, where braces mark the hash slot."""

    def check(where: str, value: object) -> str:
        found = name_text(where, value)
        if "{" in found or "}" in found:
            raise expected(where, f"a {what} without braces", value)
        return found

    return check


queue_name = key_name("queue name")


def one_of(choices: Iterable[T]) -> Check[T]:
    """A check of one of some choices, which users write as text."""
    known = {str(choice): choice for choice in choices}

    def check(where: str, value: object) -> T:
        if isinstance(value, str) and str(value) in known:
            return known[str(value)]
        error = expected(where, f"one of {', '.join(known)}", value)
        hint = suggestion(value, known) if isinstance(value, str) else ""
        raise SettingsError(f"{error}; {hint}") if hint.startswith("did") else error

    return check


def some_of(choices: Iterable[T], what: str) -> Check[frozenset[T]]:
    """A check of a collection of some choices, which users write as text."""
    known = {str(choice): choice for choice in choices}

    def check(where: str, value: object) -> frozenset[T]:
        if isinstance(value, str) or not isinstance(value, Collection):
            raise expected(where, f"a list of {what}", value)
        check_names(f"{what} in {where}", map(str, value), known, SettingsError)
        return frozenset(known[str(item)] for item in value)

    return check


def mapping(
    keys: Mapping[str, Check[Any]],
    *,
    required: Collection[str] = (),
    what: str = "",
) -> Check[dict[str, Any]]:
    """A check of a mapping with known keys, each with its own check; ``None`` is left out."""

    def check(where: str, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise expected(where, what or f"a mapping of {', '.join(keys)}", value)
        check_names(f"keys in {where}", value, keys, SettingsError)
        for key in required:
            if value.get(key) is None:
                raise expected(where, f"a mapping with {key!r}", value)
        return {
            key: keys[key](f"{where}[{key!r}]", one)
            for key, one in value.items()
            if one is not None
        }

    return check


def qualified_name(cls: type) -> str:
    """``module.QualName`` of a class; built-ins without their module."""
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"
