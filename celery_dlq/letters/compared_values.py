"""What messages are compared by: release, host …, and every value of their arguments.

A *feature* is the name of a property, such as ``host`` or ``kwargs.customer.kind``. A message has
pairs of a feature and a value; the value ``None`` means: the argument was given. Arguments are
looked into one level deep: ``kwargs.customer.kind``, ``args[0].id``, and ``kwargs.tags[]`` for the
items of a list.

Whoever may publish writes arguments. So they are only parsed, and bounded in size and number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Pair = tuple[str, str | None]
Masked = Callable[[list[Any], dict[str, Any]], tuple[list[Any], dict[str, Any]]]
"""Returns args and kwargs with what nobody may see replaced."""

_Kind = TypeVar("_Kind", list[Any], dict[str, Any])

QUEUE = "queue"

FIELDS = {
    "release": "release",
    QUEUE: "source_queue",
    "origin": "origin",
    "host": "worker_hostname",
    "retries": "retries",
}
"""Features that every message has, and their fields, the most telling first."""

TASK = "task"
"""The feature of the task's name; for letters that were not chosen by their cause."""

WHOLE = frozenset({*FIELDS, TASK})
"""Features that are not arguments: their shares are shares of all messages."""

OF_ANY_TASK = frozenset({"release", "host", TASK})
"""Features that say the same of messages of different tasks. All others follow from the task."""

GIVEN = "(given)"
"""How the value ``None`` is shown: the argument was given, whatever its value."""

MAX_VALUE_CHARS = 200
"""Longer values are cut, and count as equal if their beginnings are."""

MAX_ARGUMENTS_CHARS = 64 * 1024
"""Args or kwargs with more characters of JSON are not looked into."""

MAX_PAIRS = 200
"""Pairs of one message; further ones are left out."""


class _Number(str):
    """A number as its publisher wrote it: a float would change long ones."""

    __slots__ = ()


_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def pairs_of(text_of: Callable[[str], str], masked: Masked | None = None) -> set[Pair]:
    """The pairs of a message; never raises, whatever its arguments."""
    found: set[Pair] = {
        (feature, value[:MAX_VALUE_CHARS])
        for feature, name in FIELDS.items()
        if (value := text_of(name))
    }
    found.add((TASK, text_of("task_name")[:MAX_VALUE_CHARS]))
    args, kwargs = _parsed(text_of("args_json"), list), _parsed(text_of("kwargs_json"), dict)
    if masked is not None:
        args, kwargs = masked(args, kwargs)
    for pair in _arguments(args, kwargs):
        if len(found) >= MAX_PAIRS:
            break
        found.add(pair)
    return found


def _arguments(args: list[Any], kwargs: dict[str, Any]) -> Iterator[Pair]:
    for name, value in kwargs.items():
        yield from _argument(f"kwargs.{name}"[:MAX_VALUE_CHARS], value)
    for place, value in enumerate(args):
        yield from _argument(f"args[{place}]", value)


def _argument(feature: str, value: Any) -> Iterator[Pair]:
    yield feature, None
    if isinstance(value, dict):
        for name, part in value.items():
            path = f"{feature}.{name}"[:MAX_VALUE_CHARS]
            yield path, None
            yield path, _text(part)
    elif isinstance(value, list):
        for item in value:
            yield f"{feature}[]", None
            yield f"{feature}[]", _text(item)
    else:
        yield feature, _text(value)


def _parsed(text: str, kind: type[_Kind]) -> _Kind:
    """The arguments; none if they are of another kind, or too many."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        return kind()
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):  # not JSON, or nested thousands of levels deep
        return kind()
    return found if isinstance(found, kind) else kind()


def _text(value: Any) -> str:
    """A value as text; objects and lists as JSON."""
    if isinstance(value, str):
        return value[:MAX_VALUE_CHARS]
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) >= MAX_VALUE_CHARS:  # also ends deep ones: every level is a character
            break
    return text[:MAX_VALUE_CHARS]


def _pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value, numbers as they were written."""
    if isinstance(value, dict):
        for place, (name, part) in enumerate(value.items()):
            yield f"{',' if place else '{'}{_quoted(name)}:"
            yield from _pieces(part)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield "," if place else "["
            yield from _pieces(item)
        yield "]" if value else "[]"
    elif isinstance(value, _Number):
        yield value
    else:
        yield _quoted(value)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
