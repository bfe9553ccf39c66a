"""Messages in groups, and whether a property is more frequent in one group than in the others.

A group has the messages of one cause, or successes. A property is a value, a set of values, a
range of numbers, or two values at once. Each other cause is a rival that weighs as much as any
other, whatever its size, and a property must be more frequent here than in more than half of the
rivals: one neighbour that is all of another release makes no finding of the release that it lacks.
That chance does it is tested rival by rival, and the tests are put together as a partial
conjunction.

Releases, hosts and publishers come and go. They are compared between messages of the same time.

Source: Y. Benjamini, R. Heller, "Screening for Partial Conjunction Hypotheses", Biometrics 64
(2008); W. Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", J. Amer.
Statist. Assoc. 58 (1963), for the bound of a test in strata.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from math import exp, isfinite, log
from typing import NamedTuple

from celery_dlq.letters.comparison import SIZE, UNREAD, WHOLE, Pair, chance

IN_TIME = frozenset({"release", "host", "origin"})
"""Features that are compared between messages of the same time."""

LEAST_SPREAD = 1.25
"""A rival whose values are so many times as concentrated as the cause's deviates itself."""

_LEAST_CONCENTRATION = 0.02
_MOST_STRATA = 24
_STRATUM = 20  # letters
_FEW = 20  # messages; causes of fewer are one rival
_ENOUGH = 300  # messages of a rival of several causes, where there are many
_MOST_NUMBERS = 4_000  # of all rivals, from which the ends of a range are chosen

Holds = Callable[["Group"], int]
"""The messages of a group that have a property, as bits."""


class Group:
    """Messages, ordered by time, and which of them have each pair."""

    __slots__ = (
        "_halves",
        "_masks",
        "_numbers",
        "_spread",
        "index",
        "name",
        "pairs",
        "size",
        "times",
    )

    def __init__(self, name: str, messages: Iterable[tuple[float | None, frozenset[Pair]]]) -> None:
        self.name = name
        timed = sorted(messages, key=lambda one: (one[0] is None, one[0] or 0.0))
        self.size = len(timed)
        self.times = [at for at, _pairs in timed if at is not None]
        self.pairs = [pairs for _at, pairs in timed]
        self.index: dict[Pair, list[int]] = defaultdict(list)
        for number, pairs in enumerate(self.pairs):
            for pair in pairs:
                self.index[pair].append(number)
        self.index = dict(self.index)
        self._masks: dict[Pair, int] = {}
        self._numbers: dict[str, tuple[list[float], list[int]]] = {}
        self._spread: dict[str, list[int]] = {}
        even = _bits(range(0, self.size, 2), self.size)
        self._halves = (even, self.all ^ even)

    @property
    def all(self) -> int:
        """All messages, as bits."""
        return (1 << self.size) - 1

    def half(self, number: int) -> int:
        """Every second message in time."""
        return self._halves[number]

    def count(self, pair: Pair) -> int:
        """The messages that have a pair."""
        found = self.index.get(pair)
        return len(found) if found else 0

    def mask(self, pair: Pair) -> int:
        """The messages that have a pair, as bits."""
        found = self._masks.get(pair)
        if found is None:
            found = self._masks[pair] = _bits(self.index.get(pair, ()), self.size)
        return found

    def any_of(self, pairs: Iterable[Pair]) -> int:
        """The messages that have one of the pairs, as bits."""
        numbers = (number for pair in pairs for number in self.index.get(pair, ()))
        return _bits(numbers, self.size)

    def known(self, feature: str, value: str | None = "") -> int:
        """The messages that could have a value of a feature, as bits."""
        if feature in WHOLE:
            return self.all
        if value is None:
            return self.all & ~self.mask(UNREAD) | self.mask((feature, None))
        if feature == SIZE:
            return _bits(self.numbers(SIZE)[1], self.size)
        return self.mask((feature, None))

    def concentration(self, feature: str) -> float:
        """The probability that two messages have the same value of a feature."""
        if not self._spread:
            for (each, value), holders in self.index.items():
                if value is not None:
                    found = self._spread.setdefault(each, [0, 0])
                    found[0] += len(holders) * (len(holders) - 1)
                    found[1] += len(holders)
        same, all_ = self._spread.get(feature, (0, 0))
        return same / (all_ * (all_ - 1)) if all_ > 1 else 0.0

    def numbers(self, feature: str) -> tuple[list[float], list[int]]:
        """The values of a feature that are numbers, sorted, and their messages."""
        return self._numbers.get(feature, ([], []))

    def read_numbers(self, features: frozenset[str]) -> None:
        """Parse the numbers of some features, once for all comparisons."""
        found: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for (feature, value), holders in self.index.items():
            if value is not None and feature in features:
                number = number_of(value)
                if number is not None:
                    found[feature].extend((number, holder) for holder in holders)
        for feature, rows in found.items():
            rows.sort()
            self._numbers[feature] = ([row[0] for row in rows], [row[1] for row in rows])

    def between(self, feature: str, low: float, high: float) -> int:
        """The messages with a number in a range, both ends included, as bits."""
        values, holders = self.numbers(feature)
        first, last = bisect_left(values, low), bisect_right(values, high)
        return _bits(holders[first:last], self.size)

    def during(self, start: float, end: float) -> int:
        """The messages of a time, its end excluded, as bits."""
        first, last = bisect_left(self.times, start), bisect_left(self.times, end)
        return ((1 << last) - 1) ^ ((1 << first) - 1)


def _bits(numbers: Iterable[int], size: int) -> int:
    found = bytearray((size >> 3) + 1)
    for number in numbers:
        found[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(found, "little")


def number_of(value: str) -> float | None:
    """The number that a value is written as."""
    if not value or value[0] not in "-0123456789":
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if isfinite(found) else None


Rival = Sequence[Group]
"""Groups that are compared with as one."""


def rivals_of(groups: Sequence[Group]) -> list[Rival]:
    """Put causes together: the small ones, and of many those that have few messages."""
    total = sum(one.size for one in groups)
    large = sum(one.size >= _FEW for one in groups)
    number = max(min(large, 5), min(large, total // _ENOUGH), 1)
    found: list[list[Group]] = [[] for _ in range(min(number, len(groups)))]
    sizes = [0] * len(found)
    for one in sorted(groups, key=lambda one: (-one.size, one.name)):
        place = sizes.index(min(sizes))
        found[place].append(one)
        sizes[place] += one.size
    return list(found)


def times_of(group: Group) -> list[Holds]:
    """Spans of time with equally many of the group's messages, and some time around them."""
    times = group.times
    if not times:
        return []
    number = max(1, min(_MOST_STRATA, len(times) // _STRATUM))
    margin = (times[-1] - times[0]) / 10 / number or 60.0
    cuts = [times[len(times) * one // number] for one in range(1, number)]
    ends = [times[0] - margin, *sorted(set(cuts) - {times[0]}), times[-1] + margin]
    return [partial(Group.during, start=start, end=end) for start, end in pairwise(ends)]


class Counts(NamedTuple):
    """``a`` of ``n`` messages here have a property, and ``c`` of ``m`` there."""

    a: int
    n: int
    c: int
    m: int


@dataclass(frozen=True, slots=True)
class Contrast:
    """A property here and in the rivals.

    ``share`` and ``elsewhere`` are the shares; the latter is the median rival's, of two the larger
    one. ``chance`` is the probability that chance makes it more frequent than in more than half of
    the rivals.
    """

    here: tuple[int, int]
    there: tuple[int, int]
    share: float
    elsewhere: float
    chance: float

    @property
    def difference(self) -> float:
        """Of the shares."""
        return self.share - self.elsewhere


def contrast(
    here: Group,
    rivals: Sequence[Rival],
    holds: Holds,
    known: Holds,
    *,
    strata: Sequence[Holds] = (),
    half: int | None = None,
) -> Contrast | None:
    """Compare a property of ``known`` messages, stratum by stratum.

    ``None``: there is nothing to compare with. With ``half`` only every second message counts.
    """

    def bits(group: Group) -> tuple[int, int]:
        base = known(group) if half is None else known(group) & group.half(half)
        return holds(group) & base, base

    own = bits(here)
    found = []
    for rival in rivals:
        others = [(one, *bits(one)) for one in rival]
        counts = _counts(here, own, others, strata)
        if counts:
            found.append(_of(counts))
    if not found:
        return None
    found.sort(key=lambda one: one[2])
    most = len(found) // 2
    p_value = min(1.0, (len(found) - most) * sorted(one[3] for one in found)[most])
    return Contrast(
        (own[0].bit_count(), own[1].bit_count()),
        (sum(one[0] for one in found), sum(one[1] for one in found)),
        found[most][4],
        found[most][2],
        p_value,
    )


def _counts(
    here: Group,
    own: tuple[int, int],
    others: Sequence[tuple[Group, int, int]],
    strata: Sequence[Holds],
) -> list[Counts]:
    """Counts here and in a rival, of each stratum that both have; without strata at once."""
    found = []
    for stratum in strata or (_whole,):
        inside = stratum(here)
        n = (own[1] & inside).bit_count()
        if not n:
            continue
        c = m = 0
        for one, has, base in others:
            inside_there = stratum(one)
            c += (has & inside_there).bit_count()
            m += (base & inside_there).bit_count()
        if m:
            found.append(Counts((own[0] & inside).bit_count(), n, c, m))
    return found


def _whole(group: Group) -> int:
    return group.all


def _of(strata: list[Counts]) -> tuple[int, int, float, float, float]:
    """Those that have it and all, the share as of the same times, the chance, the share here."""
    n = sum(one.n for one in strata)
    share = sum(one.a for one in strata) / n
    elsewhere = sum(one.n * one.c / one.m for one in strata) / n
    if len(strata) == 1:
        a, n, c, m = strata[0]
        p_value = chance(a, c, n, m) if a * m > c * n else 1.0
    else:
        p_value = _bound(strata)
    return sum(one.c for one in strata), sum(one.m for one in strata), elsewhere, p_value, share


def _bound(strata: Iterable[Counts]) -> float:
    """An upper bound of the probability that so many or more have it here, stratum by stratum.

    With its margins fixed, a stratum's number is a sum of independent trials, and so is the sum.
    """
    a, expected, trials = 0, 0.0, 0
    for one in strata:
        holders = one.a + one.c
        a += one.a
        expected += one.n * holders / (one.n + one.m)
        trials += min(one.n, holders)
    if a <= expected or not trials:
        return 1.0
    p, q = a / trials, min(expected / trials, 1.0)
    divergence = p * log(p / q) + ((1 - p) * log((1 - p) / (1 - q)) if p < 1 else 0.0)
    return exp(-trials * divergence)


def deviates(rival: Rival, here: Group, feature: str) -> bool:
    """True if a rival has fewer values of a feature than the cause: it differs, not the cause."""
    there = sum(one.concentration(feature) * one.size for one in rival)
    there /= sum(one.size for one in rival)
    return there > LEAST_SPREAD * here.concentration(feature) + _LEAST_CONCENTRATION


def narrower(rival: Rival, here: Group, feature: str) -> bool:
    """True if most of a rival's numbers are closer together than those of the cause."""
    own = _width(here.numbers(feature)[0])
    there = [_width(one.numbers(feature)[0]) for one in rival]
    return min(there) * LEAST_SPREAD < own


def _width(numbers: Sequence[float]) -> float:
    return numbers[len(numbers) * 9 // 10] - numbers[len(numbers) // 10] if numbers else 0.0


def widest(own: Sequence[float], others: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The range that holds most of the own numbers beyond the others' mean share (Kadane)."""
    sized = [one for one in others if one]
    if not own or not sized:
        return None
    most = max(1, _MOST_NUMBERS // len(sized))
    rows = [(value, 1 / len(own)) for value in own]
    for one in sized:
        step = max(1, len(one) // most)
        some = one[::step]
        weight = -1 / len(some) / len(sized)
        rows += [(value, weight) for value in some]
    rows.sort()
    best, found = 0.0, None
    total, start = 0.0, None
    for value, each in groupby(rows, key=lambda row: row[0]):
        weight = sum(row[1] for row in each)
        if start is None or total <= 0:
            total, start = 0.0, value
        total += weight
        if total > best:
            best, found = total, (start, value)
    return found
