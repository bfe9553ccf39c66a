r"""Conditions on the arguments and headers of a message, such as ``kwargs.tenant=42``; paths.

::

    condition   root part+ operator value
    root        args | kwargs | headers
    part        .name | [number] | ["any name, as JSON writes it"]
    operator    = | != | < | <= | > | >= | ~
    value       text, or a text in double quotes, as JSON writes it
    assignment  root part+ = value, which may be any JSON

``.0`` and ``[0]`` mean the same. White space around the operator and at both ends is ignored.

``=`` holds for a text that is the value, and for a number, ``true``, ``false`` or ``null`` that
is it in JSON: ``tenant=42`` finds ``42``, ``42.0`` and ``"42"``, because hardly anybody remembers
which of them a publisher sends. A value in quotes finds only texts. ``!=`` holds wherever ``=``
does not, also where there is nothing at the path, and for a list or an object.

``<``, ``<=``, ``>`` and ``>=`` compare a number with numbers, and with texts that are decimal
numbers. They compare any other value with texts by code points, which is the order of ISO 8601
times. ``~`` holds for a text that contains the value.

Times, UUIDs, decimals and bytes, which JSON tags (``__type__``), are compared as the text in the
tag. Only ``args_json``, ``kwargs_json`` and ``headers`` are looked at. A condition on arguments
does not hold, not even with ``!=``, for a letter without them: its body is no JSON of
Celery, or is larger than 1 MiB.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from celery_dlq.errors import DLQError

MAX_CONDITIONS = 10
MAX_CHARS = 200
MAX_DEPTH = 20

_FIELDS = {"args": "args_json", "headers": "headers", "kwargs": "kwargs_json"}
_ROOT = re.compile(r"\s*(args|kwargs|headers)")
_PART = re.compile(r'\.([^\s.\[\]=!<>~"]+)|\[([0-9]+)\]|\[("(?:[^"\\]|\\.)*")\]')
# Of a pattern of paths, in which ``*`` is any name and ``**`` any number of them.
_ANY_ROOT = re.compile(r"\s*(args|kwargs|headers|\*\*)")
_ANY_PART = re.compile(_PART.pattern.replace("[0-9]+", r"[0-9]+|\*"))
_OPERATOR = re.compile(r"\s*([=!<>~]+)\s*")
_INDEX = re.compile(r"0|[1-9][0-9]*")
_DECIMAL = re.compile(r"-?[0-9]{1,30}(\.[0-9]{1,30})?")
_CONSTANTS = {True: "true", False: "false", None: "null"}
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_OPERATORS = ("=", "!=", *_ORDERS, "~")
_UNCLOSED = "a text that ends with a double quote"
_TAGS = {"__type__", "__value__"}
_NOTHING = object()
_EXAMPLES = {
    "condition": "conditions look like kwargs.tenant=42, args[0].id!=7, headers.x-tenant~acme",
    "assignment": "assignments look like kwargs.tenant=42, args[0].id=7, headers.x-tenant=acme",
    "path": "paths look like kwargs.tenant, args[0].id, headers.x-tenant",
    "pattern": "patterns look like kwargs.card, args[0].token, **.password",
}

Path = tuple[tuple[str, int | None], ...]
"""Names; each with the index that it is in a list, or ``None``."""

_decode = json.JSONDecoder().decode


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition."""

    root: str
    path: Path
    test: Callable[[Any], bool]  # Whether it holds for the value at the path

    def holds(self, value: Any) -> bool:
        """True if the condition holds for the value of its root."""
        for name, index in self.path:
            if isinstance(value, dict):
                value = value.get(name, _NOTHING)
            elif isinstance(value, list) and index is not None and index < len(value):
                value = value[index]
            else:
                value = _NOTHING
        return self.test(_untagged(value) if isinstance(value, dict) else value)


def checked(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Check conditions."""
    given = [texts] if isinstance(texts, str) else list(texts)
    for text in given:
        if not isinstance(text, str):
            raise DLQError(f"expected conditions such as 'kwargs.tenant=42', got {text!r}")
    found = tuple(sorted(set(given)))
    if len(found) > MAX_CONDITIONS:
        raise DLQError(f"expected at most {MAX_CONDITIONS} conditions, got {len(found)}")
    _by_field(found)
    return found


def all_hold(texts: tuple[str, ...], text_of: Callable[[str], str]) -> bool:
    """True if all conditions hold for a letter."""
    return judge_all(texts, text_of) is True


def judge_all(texts: tuple[str, ...], text_of: Callable[[str], str]) -> bool | None:
    """Whether all conditions hold for a letter; ``None`` if its arguments would have to be known.

    Neither a match nor a miss: whoever asks counts it, and says so.
    """
    known = True
    for field, conditions in _by_field(texts):
        try:
            value = _decode(text_of(field) or "null")
        except (ValueError, RecursionError):
            value = None
        if value is None and field != "headers":
            known = False
        elif value is None or not all(condition.holds(value) for condition in conditions):
            return False
    return True if known else None


@lru_cache(maxsize=64)
def _by_field(texts: tuple[str, ...]) -> tuple[tuple[str, tuple[Condition, ...]], ...]:
    """The parsed conditions on each field."""
    found = sorted(map(_parsed_condition, texts), key=lambda condition: condition.root)
    groups = groupby(found, key=lambda condition: _FIELDS[condition.root])
    return tuple((field, tuple(conditions)) for field, conditions in groups)


def _parsed_condition(text: str) -> Condition:
    if len(text) > MAX_CHARS:
        raise DLQError(
            f"expected a condition of at most {MAX_CHARS} characters, got {len(text)} in "
            f"{text[:40]!r}…"
        )
    root, path, at = _read_path(text, "condition")
    sign, at = _read_operator(text, at, _OPERATORS, "condition")
    return Condition(root, path, _test_of(text, sign, at))


def assignment(text: str) -> tuple[str, Any]:
    """Parse ``kwargs.tenant=42``: a path, and a value that is JSON or else plain text."""
    end = _read_path(text, "assignment")[2]
    at = _read_operator(text, end, ("=",), "assignment")[1]
    given = text[at:].rstrip()
    try:
        return text[:end].strip(), json.loads(given, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if given.startswith('"'):
            raise _malformed(text, at, _UNCLOSED, "assignment") from None
        return text[:end].strip(), given


def path_of(text: str, kind: str = "path") -> tuple[str, Path]:
    """Parse a path, or a ``pattern`` of paths, alone: its root, and the names below it."""
    root, path, at = _read_path(text, kind)
    if text[at:].strip():
        raise _malformed(text, at, '.name, [number], ["name"] or its end', kind)
    return root, path


def _read_path(text: str, kind: str) -> tuple[str, Path, int]:
    """The root and the names of the path that begins a text, and where it ends."""
    any_root, any_part = (_ANY_ROOT, _ANY_PART) if kind == "pattern" else (_ROOT, _PART)
    root = any_root.match(text)
    if root is None:
        raise _malformed(text, 0, "args, kwargs or headers", kind)
    names, at = [], root.end()
    while found := any_part.match(text, at):
        try:
            names.append(found[1] or found[2] or json.loads(found[3]))
        except ValueError:
            raise _malformed(text, at, "a name as JSON writes it", kind) from None
        at = found.end()
    if not names:
        raise _malformed(text, at, '.name, [number] or ["name"]', kind)
    if len(names) > MAX_DEPTH:
        raise DLQError(
            f"expected a path of at most {MAX_DEPTH} names, got {len(names)} in the {kind} {text!r}"
        )
    path = tuple((name, int(name) if _INDEX.fullmatch(name) else None) for name in names)
    return root[1], path, at


def _read_operator(text: str, at: int, operators: tuple[str, ...], kind: str) -> tuple[str, int]:
    """The operator at a place, and where the value begins."""
    found, several = _OPERATOR.match(text, at), len(operators) > 1
    one = f"one of {' '.join(operators)}" if several else operators[0]
    if found is None:
        raise _malformed(text, at, f'.name, [number], ["name"] or {one}', kind)
    if found[1] not in operators:
        expected = f"{one}, and in double quotes a value that begins so,"
        raise _malformed(text, found.start(1), expected, kind)
    return found[1], found.end()


def _test_of(text: str, sign: str, at: int) -> Callable[[Any], bool]:
    """The test of the value at the path."""
    wanted = _literal(text, at)
    if not wanted.text and sign not in {"=", "!="}:
        raise _malformed(text, at, f"a value after {sign}")
    if sign == "=":
        return wanted.equals
    if sign == "!=":
        return lambda value: not wanted.equals(value)
    if sign == "~":
        return lambda value: isinstance(value, str) and wanted.text in value
    order = _ORDERS[sign]
    return lambda value: wanted.compares(order, value)


class _Literal(NamedTuple):
    """The value of a condition."""

    text: str
    number: float | None  # `None` if it is none, or is in quotes
    quoted: bool

    def equals(self, value: Any) -> bool:
        if isinstance(value, str):
            return value == self.text
        if self.quoted:
            return False
        if value is None or isinstance(value, bool):
            return _CONSTANTS[value] == self.text
        return self.number is not None and isinstance(value, (int, float)) and value == self.number

    def compares(self, order: Callable[[Any, Any], bool], value: Any) -> bool:
        if self.number is None:
            return isinstance(value, str) and order(value, self.text)
        if isinstance(value, str) and _DECIMAL.fullmatch(value):
            value = float(value) if "." in value else int(value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and order(value, self.number)


def _literal(text: str, at: int) -> _Literal:
    given = text[at:].rstrip()
    try:
        value = json.loads(given, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if given.startswith('"'):
            raise _malformed(text, at, _UNCLOSED) from None
        return _Literal(given, None, quoted=False)
    if isinstance(value, (list, dict)):
        raise _malformed(text, at, "one value, not a list or an object,")
    if isinstance(value, str):
        return _Literal(value, None, quoted=True)
    number = None if value is None or isinstance(value, bool) else value
    return _Literal(given, number, quoted=False)


def _refuse_constant(name: str) -> None:
    """Read NaN and Infinity as texts: JSON has no such numbers."""
    raise ValueError(name)


def _untagged(value: dict[str, Any]) -> Any:
    """The text in a tag; kombu writes a UUID as an object."""
    if value.keys() != _TAGS:
        return value
    inner = value["__value__"]
    if isinstance(inner, dict) and isinstance(inner.get("hex"), str):
        try:
            return str(UUID(inner["hex"]))
        except ValueError:
            return value
    return inner


def _malformed(text: str, at: int, expected: str, kind: str = "condition") -> DLQError:
    got = repr(text[at : at + 20]) if text[at:] else "its end"
    return DLQError(
        f"expected {expected} at character {at + 1} of the {kind} {text!r}, got {got}; "
        f"{_EXAMPLES[kind]}"
    )
