"""Which values are more frequent in one set of messages than in another, beyond chance.

A *feature* is the name of a property, such as ``host`` or ``kwargs.customer.kind``. A message has
pairs of a feature and a value; the value ``None`` means: the argument was given. Arguments are
looked into three levels deep: ``kwargs.order.ship.country``, ``args[0].id``, and ``kwargs.tags[]``
and ``kwargs.items[].sku`` for the items of a list. Whoever may publish writes arguments. So they
are only parsed, and bounded in size and number.

A value is tested by Fisher's exact test (the probability that chance alone makes it as frequent)
and corrected for the number of values by the procedure of Benjamini and Hochberg. Among many
messages hardly any difference is chance, so it must also be `LEAST_DIFFERENCE` or more. At most
`MOST_TESTED` values of one comparison are tested: those that are more frequent inside and stand
out most. The others count as tests without a finding, so the limit can hide a weak finding but
never adds a false one.

Source: Y. Benjamini, Y. Hochberg, "Controlling the False Discovery Rate", J. R.
Statist. Soc. B 57 (1995); R. Bourgon et al., "Independent filtering increases
detection power for high-throughput experiments", PNAS 107 (2010), for why a value's
total frequency may decide whether it is tested.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, sqrt
from typing import Any, NamedTuple, TypeVar

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

SIZE = "size"
"""The feature of the characters of args and kwargs as JSON; only its ranges are compared."""

WHOLE = frozenset({*FIELDS, TASK})
"""Features that are not arguments: their shares are shares of all messages."""

OF_ANY_TASK = frozenset({"release", "host", TASK})
"""Features that say the same of messages of different tasks. All others follow from the task."""

UNREAD: Pair = ("unread", None)
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


def pairs_of(text_of: Callable[[str], str | None], masked: Masked | None = None) -> set[Pair]:
    """The pairs of a message; never raises, whatever its arguments."""
    found: set[Pair] = {
        (feature, value[:MAX_VALUE_CHARS])
        for feature, name in FIELDS.items()
        if (value := text_of(name))
    }
    if task := text_of("task_name"):
        found.add((TASK, task[:MAX_VALUE_CHARS]))
    texts = text_of("args_json"), text_of("kwargs_json")
    if texts[0] is not None and texts[1] is not None:
        found.add((SIZE, str(len(texts[0]) + len(texts[1]))))
    args, kwargs = _parsed(texts[0] or "", list), _parsed(texts[1] or "", dict)
    if args is None or kwargs is None:
        found.add(UNREAD)
    shown = (args or [], kwargs or {})
    for pair in _arguments(*(shown if masked is None else masked(*shown))):
        if len(found) >= MAX_PAIRS - 1:
            found.add(UNREAD)
            break
        found.add(pair)
    return found


def _arguments(args: list[Any], kwargs: dict[str, Any]) -> Iterator[Pair]:
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
                    yield f"{feature}[]", _text(item)
        else:
            yield feature, _text(value)


def _parsed(text: str, kind: type[_Kind]) -> _Kind | None:
    """The arguments; ``None`` if they are of another kind, or too many."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        return None
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):  # not JSON, or nested thousands of levels deep
        return None
    return found if isinstance(found, kind) else None


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

MOST_TESTED = 2_000
"""Values tested in one comparison."""

SAME_TASKS, SAME_QUEUES, SUCCESSES = "same tasks", "same queues", "successes"
"""What letters are compared with: letters of the same tasks, of the same queues; successes."""

_NEGLIGIBLE = 1e-13  # of a sum


VALUE, SET, RANGE, PAIR = "value", "set", "range", "pair"
"""What a finding is: one value, several of a feature, a range of numbers, values of two features"""


class Candidate(NamedTuple):
    """A value that ``a`` of ``n`` messages inside have, and ``c`` of ``m`` outside."""

    feature: str
    value: str
    a: int
    c: int
    n: int
    m: int

    @property
    def distance(self) -> float:
        """The difference of the two shares, in standard errors."""
        share = (self.a + self.c) / (self.n + self.m)
        error = sqrt(share * (1 - share) * (1 / self.n + 1 / self.m))
        return (self.a / self.n - self.c / self.m) / error


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
    neighbour: str | None = None  # The fingerprint of the only other cause
    also: tuple[str, ...] = ()  # What nearly the same letters have, or what follows from it

    @property
    def order(self) -> tuple[float, bool, str, str]:
        """Sorts by the difference of the shares, the largest first."""
        difference = self.share_elsewhere - self.share_here
        return (difference, self.value == GIVEN, self.feature, self.value)


def ranked(
    found: list[Significant], last: Callable[[Significant], bool] = lambda _one: False
) -> list[Significant]:
    """Sort findings, the most telling first: the largest difference of the shares.

    Of nearly equal differences, arguments come first, then the fields in the order of `FIELDS`: a
    new release often has new hosts, and a host has all the letters of its release. ``last`` is
    true for those that come after the others.
    """
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    left, result = sorted(found, key=lambda one: one.order), list[Significant]()
    while left:
        largest = left[0].order[0]
        near = [one for one in left if one.order[0] - largest < LEAST_DIFFERENCE]
        result += sorted(
            near, key=lambda one: (last(one), one.kind in {SET, RANGE}, kinds.get(one.feature, -1))
        )
        left = left[len(near) :]
    return result


def comparable(feature: str, against: str) -> bool:
    """True if a value can explain a difference, false if it follows from the task or the death.

    Messages of other tasks have other queues, publishers and arguments, and a message that died
    has more often been retried than one that succeeded.
    """
    if against == SAME_QUEUES:
        return feature in OF_ANY_TASK
    return against != SUCCESSES or feature != "retries"


def candidates(
    here: Counter[Pair],
    there: Counter[Pair],
    inside: int,
    outside: int,
    against: str,
) -> tuple[list[Candidate], int]:
    """The values to test, and the number of tests they stand for.

    Counted are the messages with each pair here and there, of ``inside`` and ``outside`` in all.
    """
    found, tests = [], 0
    for pair in here.keys() | there.keys():
        feature, value = pair
        a, c = here[pair], there[pair]
        if a + c < LEAST or pair == UNREAD or not comparable(feature, against):
            continue
        n, m = inside, outside
        if value is None:  # among those whose arguments are known
            n, m = max(a, inside - here[UNREAD]), max(c, outside - there[UNREAD])
        elif feature not in WHOLE:  # among those that have the argument
            n, m = here[feature, None], there[feature, None]
        if not n or not m or a + c >= n + m:  # what all messages have explains nothing
            continue
        tests += 1
        if a * m > c * n:
            found.append(Candidate(feature, GIVEN if value is None else value, a, c, n, m))
    found.sort(key=lambda one: (-one.distance, one.feature, one.value))
    return found[:MOST_TESTED], tests


def significant(
    tested: Sequence[Candidate], tests: int, against: str, alpha: float = ALPHA
) -> Iterator[Significant]:
    """The candidates of one comparison that are significant."""
    ordered = sorted(((chance(*one[2:]), one) for one in tested), reverse=True)
    q_value = 1.0
    for place, (p_value, (feature, value, a, c, n, m)) in enumerate(ordered):
        q_value = min(q_value, p_value * tests / (len(ordered) - place))
        here, there = a / n, c / m
        if q_value <= alpha and here - there >= LEAST_DIFFERENCE:
            yield Significant(
                feature=feature,
                value=value,
                against=against,
                letters=a,
                of_letters=n,
                others=c,
                of_others=m,
                share_here=here,
                share_elsewhere=there,
                lift=here / (there or 0.5 / m),
                p_value=p_value,
                q_value=q_value,
            )


def chance(a: int, c: int, n: int, m: int) -> float:
    """Fisher's exact test, one-sided: the probability of ``a`` or more inside by chance."""
    total = a + c
    first = ways(n, a) + ways(m, c) - ways(n + m, total)
    term = terms = 1.0
    for k in range(a, min(n, total)):
        ratio = (n - k) * (total - k) / ((k + 1) * (m - total + k + 1))
        term *= ratio
        terms += term
        if ratio < 1 and term < terms * _NEGLIGIBLE:
            break
    return min(1.0, exp(first) * terms)


def ways(of: int, chosen: int) -> float:
    """The logarithm of the number of ways to choose some of them; minus infinity: none."""
    if not 0 <= chosen <= of:
        return -inf
    return lgamma(of + 1) - lgamma(chosen + 1) - lgamma(of - chosen + 1)
