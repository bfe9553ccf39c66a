"""Which values are more frequent in one set of messages than in another, beyond chance.

A *feature* is the name of a property, such as ``host`` or ``kwargs.customer.kind``. A message has
pairs of a feature and a value; the value ``None`` means: the argument was given. Arguments are
looked into three levels deep: ``kwargs.order.ship.country``, ``args[0].id``, and ``kwargs.tags[]``
and ``kwargs.items[].sku`` for the items of a list. Whoever may publish writes arguments. So they
are only parsed, and bounded in size and number.

`celery_dlq.letters.properties` tests which of them set a cause apart.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, inf, lgamma
from typing import Any, TypeVar

from celery_dlq.letters.replacing import MARKER

FeatureValue = tuple[str, str | None]
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

SIZE = "size"
"""The feature of the characters of args and kwargs as JSON; only its ranges are compared."""

WHOLE = frozenset({*FIELDS, TASK})
"""Features that are not arguments: their shares are shares of all messages."""

OF_ANY_TASK = frozenset({"release", "host", TASK})
"""Features that say the same of messages of different tasks. All others follow from the task."""

UNREAD: FeatureValue = ("unread", None)
"""The pair of a message whose arguments, all or some, cannot be read or are too large."""

GIVEN = "(given)"
"""How the value ``None`` is shown: the argument was given, whatever its value."""

MAX_VALUE_CHARS = 200
"""Longer values are cut, and count as equal if their beginnings are."""

DEPTH = 3
"""Levels of arguments that are looked into; deeper values are compared as JSON."""

MAX_ARGUMENTS_CHARS = 64 * 1024
"""Args or kwargs with more characters of JSON are not looked into."""

MAX_PAIRS = 200
"""Pairs of one message; further ones are left out."""


class _Number(str):
    """A number as its publisher wrote it: a float would change long ones."""

    __slots__ = ()


_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def pairs_of(
    text_of: Callable[[str], str | None], masked: Masked | None = None
) -> set[FeatureValue]:
    """The pairs of a message; never raises, whatever its arguments."""
    found: set[FeatureValue] = {
        (feature, value[:MAX_VALUE_CHARS])
        for feature, name in FIELDS.items()
        if (value := text_of(name))
    }
    if task := text_of("task_name"):
        found.add((TASK, task[:MAX_VALUE_CHARS]))
    texts = text_of("args_json"), text_of("kwargs_json")
    if texts[0] and texts[1]:
        found.add((SIZE, str(len(texts[0]) + len(texts[1]))))
    args, kwargs = _parsed_arguments(texts[0] or "", list), _parsed_arguments(texts[1] or "", dict)
    if args is None or kwargs is None:
        found.add(UNREAD)
    shown = (args or [], kwargs or {})
    for pair in _arguments(*(shown if masked is None else masked(*shown))):
        if pair[1] == MARKER:  # what is hidden may be any value
            continue
        if len(found) >= MAX_PAIRS - 1:
            found.add(UNREAD)
            break
        found.add(pair)
    return found


def _arguments(args: list[Any], kwargs: dict[str, Any]) -> Iterator[FeatureValue]:
    """The pairs of arguments, level by level: a wide one hides no other."""
    waiting: deque[tuple[str, Any, int]] = deque()
    waiting.extend((f"kwargs.{name}", value, 1) for name, value in kwargs.items())
    waiting.extend((f"args[{place}]", value, 1) for place, value in enumerate(args))
    while waiting:
        name, value, depth = waiting.popleft()
        feature = name[:MAX_VALUE_CHARS]
        yield feature, None
        if isinstance(value, dict) and depth < DEPTH:
            waiting.extend((f"{feature}.{each}", part, depth + 1) for each, part in value.items())
        elif isinstance(value, list):
            for item in value:
                yield f"{feature}[]", None
                if isinstance(item, dict) and depth < DEPTH:
                    parts = item.items()
                    waiting.extend((f"{feature}[].{one}", part, depth + 1) for one, part in parts)
                else:
                    yield f"{feature}[]", _value_text(item)
        else:
            yield feature, _value_text(value)


def _parsed_arguments(text: str, kind: type[_Kind]) -> _Kind | None:
    """The arguments; ``None`` if they are of another kind, or too many."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        return None
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):  # not JSON, or nested thousands of levels deep
        return None
    return found if isinstance(found, kind) else None


def _value_text(value: Any) -> str:
    """A value as text; objects and lists as JSON."""
    if isinstance(value, str):
        return value[:MAX_VALUE_CHARS]
    text = ""
    for piece in _json_pieces(value):
        text += piece
        if len(text) >= MAX_VALUE_CHARS:  # also ends deep ones: every level is a character
            break
    return text[:MAX_VALUE_CHARS]


def _json_pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value, numbers as they were written."""
    if isinstance(value, dict):
        for place, (name, part) in enumerate(value.items()):
            yield f"{',' if place else '{'}{_quoted(name)}:"
            yield from _json_pieces(part)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield "," if place else "["
            yield from _json_pieces(item)
        yield "]" if value else "[]"
    elif isinstance(value, _Number):
        yield value
    else:
        yield _quoted(value)


_quoted = json.JSONEncoder(ensure_ascii=False).encode


ALPHA = 0.005
"""The tolerated share of false findings among all findings of a cause."""

LEAST_DIFFERENCE = 0.1
"""Of two shares: a smaller one is no finding, and does not put one finding before another."""

LEAST = 5
"""Values of fewer messages, both sides together, are not tested."""

MIN_OTHERS = 20
"""With fewer others of the same tasks, hosts and releases are compared within the queues as well.

Nor is it then said that nothing stands out.
"""

SAME_TASKS, SAME_QUEUES, SUCCESSES = "same tasks", "same queues", "successes"
"""What letters are compared with: letters of the same tasks, of the same queues; successes."""

_NEGLIGIBLE = 1e-13  # of a sum


VALUE, SET, RANGE, PAIR = "value", "set", "range", "pair"
"""What a finding is: one value, several of a feature, a range of numbers, values of two features"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Significant:
    """A value that is more frequent among the letters than chance makes it."""

    feature: str
    value: str
    against: str  # What the letters were compared with
    letters: int  # Letters that have it
    of_letters: int  # Letters that could
    others: int
    of_others: int
    share_here: float  # The share of the letters that have it
    share_elsewhere: float  # The share of the others that have it
    # The first share divided by the second; if no other has it, as if half of one had
    lift: float
    p_value: float  # The probability that chance makes it as frequent
    q_value: float  # The same after correction for all tests
    kind: str = VALUE
    values: tuple[str, ...] = ()  # Of a set, the most frequent first, at most 20
    parts: tuple[tuple[str, str], ...] = ()  # Of a pair: both features and values
    low: str | None = None  # Of a range: its ends, both in it; `None`: it has none
    high: str | None = None
    causes: int = 0  # Other causes that it was compared with; 0: successes, or not known
    neighbour: str | None = None  # The fingerprint of the only cause to compare with
    also: tuple[str, ...] = ()  # What nearly the same letters have, or what follows from it

    @property
    def order(self) -> tuple[float, bool, str, str]:
        """Sorts by the difference of the shares, the largest first."""
        difference = self.share_elsewhere - self.share_here
        return (difference, self.value == GIVEN, self.feature, self.value)


def ranked_findings(found: list[Significant]) -> list[Significant]:
    """Sort findings, the most telling first: the largest difference of the shares.

    Successes show what is usual, so what was compared with them comes before the rest. Of
    nearly equal differences, arguments come first, then the fields in the order of `FIELDS`: a
    new release often has new hosts, and a host has all the letters of its release. A value
    comes before a set and a range, and these before that an argument was given.
    """
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    left, result = sorted(found, key=lambda one: one.order), list[Significant]()
    while left:
        largest = left[0].order[0]
        near = [one for one in left if one.order[0] - largest < LEAST_DIFFERENCE]
        result += sorted(near, key=lambda one: (_weight_of(one), kinds.get(one.feature, -1)))
        left = left[len(near) :]
    return sorted(result, key=lambda one: one.against != SUCCESSES)


def _weight_of(one: Significant) -> int:
    return 2 if one.value == GIVEN else one.kind in {SET, RANGE}


def comparable(feature: str, against: str) -> bool:
    """True if a value can explain a difference, false if it follows from the task or the death.

    Messages of other tasks have other queues, publishers and arguments, and a message that died
    has more often been retried than one that succeeded.
    """
    if against == SAME_QUEUES:
        return feature in OF_ANY_TASK
    return feature != TASK and (against != SUCCESSES or feature != "retries")


def fisher_probability(a: int, c: int, n: int, m: int) -> float:
    """Fisher's exact test, one-sided: the probability of ``a`` or more inside by chance."""
    total = a + c
    first = log_combinations(n, a) + log_combinations(m, c) - log_combinations(n + m, total)
    term = terms = 1.0
    for k in range(a, min(n, total)):
        ratio = (n - k) * (total - k) / ((k + 1) * (m - total + k + 1))
        term *= ratio
        terms += term
        if ratio < 1 and term < terms * _NEGLIGIBLE:
            break
    return min(1.0, exp(first) * terms)


def log_combinations(of: int, chosen: int) -> float:
    """The logarithm of the number of ways to choose some of them; minus infinity: none."""
    if not 0 <= chosen <= of:
        return -inf
    return lgamma(of + 1) - lgamma(chosen + 1) - lgamma(of - chosen + 1)
