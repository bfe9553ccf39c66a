"""Messages in groups, and whether a property is more frequent in one group than in the others.

A group has the messages of one cause, or successes. A property is a value, a set of values, a
range of numbers, or two values at once. Each other cause is a rival that weighs as much as any
other, whatever its size, and a property must be more frequent here than in more than half of the
rivals. So one neighbour that is all of another release makes no finding of the release that it
lacks. The tests, rival by rival, are put together as a partial conjunction.

Releases, hosts and publishers come and go. They are compared between messages of the same time.

Source: Y. Benjamini, R. Heller, "Screening for Partial Conjunction Hypotheses", Biometrics 64
(2008); W. Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", J. Amer.
Statist. Assoc. 58 (1963), for the bound of a test in strata.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from math import exp, isfinite, log
from typing import NamedTuple

from celery_dlq.letters.comparison import (
    SIZE,
    UNREAD,
    WHOLE,
    FeatureValue,
    fisher_probability,
    log_combinations,
)

_MOST_STRATA = 24
_STRATUM = 5  # letters
_SAME_TIME = 60.0  # seconds
_FEW = 20  # messages; causes of fewer are one rival
_ENOUGH = 300  # messages of a rival of several causes, where there are many
_LEAST_RIVALS = 5  # where there are so many causes
_MOST_NUMBERS = 4_000  # of all rivals, from which the ends of a range are chosen
_MOST_RANKED = 300  # numbers of a group that are compared with time
_FOLLOWS_TIME = 0.5  # the correlation of ranks
_SEVERAL = 3  # messages with a value
_BEYOND = 0.25  # of the numbers, one in ten of equal ones
_MOST_TRIALS = 60  # of a test in strata that is exact
_MOSTLY = 0.6  # of the messages

PART = 0.05
"""Of a smaller share it is not known whether it is a part."""


class CauseGroup:
    """Messages, ordered by time, and which of them have each pair."""

    __slots__ = (
        *("_even", "_masks", "_numbers", "_read", "_tasks", "_usual", "_values"),
        *("all", "index", "name", "size", "times"),
    )

    def __init__(
        self, name: str, messages: Iterable[tuple[float | None, str, frozenset[FeatureValue]]]
    ) -> None:
        self.name = name
        timed = sorted(messages, key=lambda one: (one[0] is None, one[0] or 0.0))
        self.size = len(timed)
        self.times = [at for at, _task, _pairs in timed if at is not None]
        self._tasks = [task for _at, task, _pairs in timed]
        index: dict[FeatureValue, list[int]] = defaultdict(list)
        for number, (_at, _task, pairs) in enumerate(timed):
            for pair in pairs:
                index[pair].append(number)
        self.index: Mapping[FeatureValue, list[int]] = dict(index)
        self._masks: dict[FeatureValue, int] = {}
        self._numbers: dict[str, tuple[list[float], list[int]]] = {}
        self._usual: dict[str, str] | None = None
        self._values: dict[str, list[FeatureValue]] | None = None
        self._even = bits_of(range(0, self.size, 2), self.size)
        self.all = (1 << self.size) - 1
        """All messages, as bits."""
        self._read = self.all & ~self.with_pair(UNREAD)

    def of_task(self, task: str) -> int:
        """The messages of a task, as bits."""
        return bits_of((n for n, name in enumerate(self._tasks) if name == task), self.size)

    def half_of(self, number: int) -> int:
        """Every second message in time, from the first or the second one on, as bits."""
        return self.all ^ self._even if number else self._even

    def count_of(self, pair: FeatureValue) -> int:
        """The number of messages that have a pair."""
        return len(self.index.get(pair, ()))

    def with_pair(self, pair: FeatureValue) -> int:
        """The messages that have a pair, as bits."""
        found = self._masks.get(pair)
        if found is None:
            found = self._masks[pair] = bits_of(self.index.get(pair, ()), self.size)
        return found

    def with_any_of(self, pairs: Iterable[FeatureValue]) -> int:
        """The messages that have one of the pairs, as bits."""
        return bits_of((one for pair in pairs for one in self.index.get(pair, ())), self.size)

    def could_have(self, feature: str, *, given: bool = False) -> int:
        """The messages that could have a value of a feature, as bits.

        With ``given`` those that could have the argument.
        """
        if feature in WHOLE:
            return self.all
        if feature == SIZE:
            if (SIZE, None) not in self._masks:
                self._masks[SIZE, None] = bits_of(self.numbers(SIZE)[1], self.size)
            return self._masks[SIZE, None]
        having = self.with_pair((feature, None))
        return having | self._read if given else having

    def values_of(self, feature: str) -> list[FeatureValue]:
        """The values of a feature that messages have."""
        if self._values is None:
            found: dict[str, list[FeatureValue]] = defaultdict(list)
            for pair in self.index:
                if pair[1] is not None:
                    found[pair[0]].append(pair)
            self._values = dict(found)
        return self._values.get(feature, [])

    def share_of(self, feature: str, value: str) -> float:
        """The share of the messages with a value, of those that could."""
        could = self._with_feature(feature)
        return self.count_of((feature, value)) / could if could else 0.0

    def usual_value(self, feature: str) -> str | None:
        """The value of a feature that nearly all messages have that could."""
        if self._usual is None:
            self._usual = {
                name: value
                for (name, value), holders in self.index.items()
                if value is not None
                and name != SIZE
                and len(holders) >= (1 - PART) * self._with_feature(name)
            }
        return self._usual.get(feature)

    def _with_feature(self, feature: str) -> int:
        return self.size if feature in WHOLE else self.count_of((feature, None))

    def numbers(self, feature: str) -> tuple[list[float], list[int]]:
        """The values of a feature that are numbers, sorted, and their messages."""
        return self._numbers.get(feature, ([], []))

    def read_numbers(self, features: frozenset[str]) -> None:
        """Parse the values of some features, once for all comparisons."""
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
        return bits_of(holders[bisect_left(values, low) : bisect_right(values, high)], self.size)

    def rank_with_time(self, feature: str) -> float:
        """The correlation of a feature's numbers with time, of ranks: ids may be counted up."""
        numbers, holders = self.numbers(feature)
        step = max(1, len(holders) // _MOST_RANKED)
        some, count = holders[::step], len(holders[::step])
        if 2 * len(set(numbers[::step])) <= count or count <= 1:
            return 0.0  # of few values the ranks are not known
        places = sorted(range(count), key=some.__getitem__)
        apart = sum((place - rank) ** 2 for rank, place in enumerate(places))
        return 1 - 6 * apart / (count * (count * count - 1))

    def during(self, start: float, end: float) -> int:
        """The messages of a span of time, its end excluded, as bits."""
        first, last = bisect_left(self.times, start), bisect_left(self.times, end)
        return ((1 << last) - 1) ^ ((1 << first) - 1)


def bits_of(numbers: Iterable[int], size: int) -> int:
    """A set of numbers below ``size`` as bits."""
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


Rival = tuple[CauseGroup, ...]
"""Groups that are compared with as one."""

HasProperty = Callable[[CauseGroup], int]
"""The messages of a group that have a property, as bits."""


def rivals_of(groups: Sequence[CauseGroup]) -> list[Rival]:
    """Put causes together: the small ones, and of many those that have few messages.

    No large cause is put together with small ones alone, which it would outweigh.
    """
    large = [one for one in groups if one.size >= _FEW]
    small = [one for one in groups if one.size < _FEW]
    enough = sum(one.size for one in large) // _ENOUGH
    found = _even_rivals(large, max(_LEAST_RIVALS, enough))
    some = sum(one.size for one in small)
    if some >= _FEW // 2 or not large:
        found += _even_rivals(small, max(1, min(3, some // _FEW)))
    return found


def _even_rivals(groups: Sequence[CauseGroup], number: int) -> list[Rival]:
    """At most so many rivals, of nearly equal numbers of messages."""
    found: list[list[CauseGroup]] = [[] for _ in range(min(number, len(groups)))]
    sizes = [0] * len(found)
    for one in sorted(groups, key=lambda one: (-one.size, one.name)):
        place = sizes.index(min(sizes))
        found[place].append(one)
        sizes[place] += one.size
    return [tuple(one) for one in found]


class Stratum:
    """Messages that are compared with each other alone: of a span of time, or of a task."""

    __slots__ = ("_found", "_holds")

    def __init__(self, holds: HasProperty) -> None:
        self._holds = holds
        self._found: dict[Rival, int] = {}

    def messages_of(self, rival: Rival) -> int:
        """Its messages of the groups of a rival, as bits, those of one group after another's."""
        found = self._found.get(rival)
        if found is None:
            found = 0
            for one in rival:
                found = found << one.size | self._holds(one)
            self._found[rival] = found
        return found


def times_of(group: CauseGroup) -> list[Stratum]:
    """Spans of time with equally many of the group's messages, and some time around them."""
    times = group.times
    if not times:
        return []
    number = max(1, min(_MOST_STRATA, len(times) // _STRATUM))
    margin = max((times[-1] - times[0]) / 10 / number, _SAME_TIME)
    cuts = {times[len(times) * one // number] for one in range(1, number)}
    ends = [times[0] - margin, *sorted(cuts - {times[0]}), times[-1] + margin]
    return [
        Stratum(partial(CauseGroup.during, start=start, end=end)) for start, end in pairwise(ends)
    ]


class Fourfold(NamedTuple):
    """``a`` of ``n`` messages here have a property, and ``c`` of ``m`` there."""

    a: int
    n: int
    c: int
    m: int


class RivalShares(NamedTuple):
    """A property here and in a rival: the shares there are those of the same strata."""

    rival: Rival
    here: float
    there: float
    strata: tuple[Fourfold, ...]

    @property
    def chance(self) -> float:
        """The probability that chance makes it as frequent here."""
        if self.here <= self.there:
            return 1.0
        if len(self.strata) == 1:
            a, n, c, m = self.strata[0]
            return fisher_probability(a, c, n, m)
        return _tail_bound(self.strata)

    @property
    def holders(self) -> int:
        """The messages of the rival that have it."""
        return sum(one.c for one in self.strata)

    @property
    def others(self) -> int:
        """The messages of the rival that could have it."""
        return sum(one.m for one in self.strata)


@dataclass(frozen=True, slots=True)
class Contrast:
    """A property of ``letters`` of ``of_letters``, here and in the rivals."""

    letters: int
    of_letters: int
    rivals: tuple[RivalShares, ...]  # Those with the smallest share first

    @property
    def _median(self) -> RivalShares:
        """The median rival; of two the one with the larger share."""
        return self.rivals[len(self.rivals) // 2]

    @property
    def here(self) -> float:
        """The share of the letters, of the times and tasks that were compared."""
        return self._median.here

    @property
    def there(self) -> float:
        """The share of the median rival."""
        return self._median.there

    @property
    def difference(self) -> float:
        """Of the shares."""
        return self.here - self.there

    @property
    def chance(self) -> float:
        """The probability that chance makes it more frequent than in more than half of them."""
        most = len(self.rivals) // 2
        ordered = sorted(one.chance for one in self.rivals)
        return min(1.0, (len(ordered) - most) * ordered[most])

    @property
    def holders(self) -> int:
        """The others that have it."""
        return sum(one.holders for one in self.rivals)

    @property
    def others(self) -> int:
        """The others that could."""
        return sum(one.others for one in self.rivals)


def contrast(
    group: CauseGroup,
    rivals: Iterable[Rival],
    holds: HasProperty,
    known: HasProperty,
    *,
    strata: Sequence[Stratum] = (),
    half: int | None = None,
) -> Contrast | None:
    """Compare a property of the messages that could have it, stratum by stratum.

    With ``half`` only every second message counts. ``None``: there is nothing to compare with.
    """

    def having(some: Rival) -> tuple[int, int]:
        has = could = 0
        for one in some:
            base = known(one) if half is None else known(one) & one.half_of(half)
            has = has << one.size | holds(one) & base
            could = could << one.size | base
        return has, could

    here = (group,)
    own = having(here)
    found = []
    for rival in rivals:
        same = [(one.messages_of(here), one.messages_of(rival)) for one in strata]
        counts = _counts(own, having(rival), same or [(-1, -1)])
        if counts:
            found.append(against(rival, counts))
    found.sort(key=lambda one: one.there)
    if not found:
        return None
    return Contrast(own[0].bit_count(), own[1].bit_count(), tuple(found))


def _counts(
    own: tuple[int, int], others: tuple[int, int], strata: Iterable[tuple[int, int]]
) -> list[Fourfold]:
    """Counts here and in a rival, of each stratum that both have."""
    found = []
    for here, there in strata:
        n = (own[1] & here).bit_count()
        m = (others[1] & there).bit_count()
        if n and m:
            a, c = (own[0] & here).bit_count(), (others[0] & there).bit_count()
            found.append(Fourfold(a, n, c, m))
    return found


def against(rival: Rival, strata: Sequence[Fourfold]) -> RivalShares:
    """Compare by counts in strata."""
    n = sum(one.n for one in strata)
    here = sum(one.a for one in strata) / n
    there = sum(one.n * one.c / one.m for one in strata) / n
    return RivalShares(rival, here, there, tuple(strata))


def _tail_probability(strata: Iterable[Fourfold], least: int) -> float:
    """The probability of so many or more, by the distribution of the sum."""
    found = [1.0]
    for a, n, c, m in strata:
        of_all = log_combinations(n + m, a + c)
        each = [
            exp(log_combinations(n, k) + log_combinations(m, a + c - k) - of_all)
            for k in range(min(n, a + c) + 1)
        ]
        sums = [0.0] * (len(found) + len(each) - 1)
        for place, before in enumerate(found):
            for k, one in enumerate(each, place):
                sums[k] += before * one
        found = sums
    return min(1.0, sum(found[least:]))


def _tail_bound(strata: Sequence[Fourfold]) -> float:
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
    if trials <= _MOST_TRIALS:
        return _tail_probability(strata, a)
    p, q = a / trials, min(expected / trials, 1.0)
    divergence = p * log(p / q) + ((1 - p) * log((1 - p) / (1 - q)) if p < 1 else 0.0)
    return exp(-trials * divergence)


def usual_of(rival: Rival, feature: str) -> str | None:
    """The value of a feature that nearly all messages of a rival have."""
    values = {one.usual_value(feature) for one in rival}
    return values.pop() if len(values) == 1 else None


def repeats(rival: Rival, feature: str) -> float:
    """How often two messages of a rival have the same value of a feature, of all pairs of them."""
    counts = Counter[FeatureValue]()
    for one in rival:
        counts.update({pair: one.count_of(pair) for pair in one.values_of(feature)})
    total = sum(counts.values())
    pairs = total * (total - 1)
    return sum(count * (count - 1) for count in counts.values()) / pairs if pairs else 0.0


def is_inside(rival: Rival, group: CauseGroup, feature: str) -> bool:
    """True if a rival's numbers are a part of the cause's: then it is the rival that is special."""
    numbers, _holders = group.numbers(feature)
    for one in rival:
        others, _holders = one.numbers(feature)
        few = int(len(others) * PART)
        if not others:
            continue
        below = bisect_left(numbers, others[few]) / len(numbers)
        above = 1 - bisect_right(numbers, others[-1 - few]) / len(numbers)
        if _BEYOND < below + above < 1 - PART or min(below, above) > _BEYOND:
            return True
    return False


def is_around(rival: Rival, group: CauseGroup, holds: HasProperty, feature: str) -> bool:
    """True if a rival has numbers below and above those of the cause that have a property."""
    inside_range = holds(group)
    values, holders = group.numbers(feature)
    own = [value for value, one in zip(values, holders, strict=True) if inside_range >> one & 1]
    others = [value for one in rival for value in one.numbers(feature)[0]]
    return bool(others) and min(others) < own[0] and own[-1] < max(others)


def counted_up(groups: Iterable[CauseGroup], feature: str) -> bool:
    """True if the numbers of a feature grow or fall with time: ids are counted up."""
    sizes = [(one, len(one.numbers(feature)[0])) for one in groups]
    total = sum(size for _one, size in sizes)
    mean = sum(one.rank_with_time(feature) * size for one, size in sizes) / max(total, 1)
    return total >= _FEW and abs(mean) >= _FOLLOWS_TIME


def changes_with_time(groups: Iterable[CauseGroup], feature: str) -> bool:
    """True if most values of a feature are of a small part of the time: dates, campaigns."""
    short = several = 0
    for one in groups:
        whole = middle_width(one.times)
        for pair in one.values_of(feature):
            count = one.count_of(pair)
            if count >= _SEVERAL and count <= one.size * (1 - PART):
                times = [one.times[place] for place in one.index[pair] if place < len(one.times)]
                several += count
                short += count * (2 * middle_width(times) < whole)
    return several >= _FEW // 2 and short > _MOSTLY * several


def middle_width(ordered: Sequence[float]) -> float:
    """The width of the range of four fifths of some times."""
    tenth = len(ordered) // 10
    return ordered[-1 - tenth] - ordered[tenth] if ordered else 0.0


def telling_range(
    own: Sequence[float], others: Iterable[Sequence[float]]
) -> tuple[float, float] | None:
    """The range that holds most of the own numbers beyond the others' mean share (Kadane)."""
    sized = [one for one in others if one]
    if not own or not sized:
        return None
    most = max(1, _MOST_NUMBERS // len(sized))
    rows = [(value, 1 / len(own)) for value in own]
    for one in sized:
        some = one[:: max(1, len(one) // most)]
        weight = -1 / len(some) / len(sized)
        rows += [(value, weight) for value in some]
    rows.sort()
    best, found, total, start = 0.0, None, 0.0, rows[0][0]
    for value, each in groupby(rows, key=lambda row: row[0]):
        if total <= 0:
            total, start = 0.0, value
        total += sum(row[1] for row in each)
        if total > best:
            best, found = total, (start, value)
    return found
