"""Which properties of a cause's letters other messages have less often.

1. Each value is tested. Sets of values are chosen in one half of the messages and tested in the
   other, or tested by how often letters of the cause share a value. Ranges of numbers count as
   many tests as there are ranges, pairs of values as many as there are pairs.
2. The correction is for all of them. What follows from the time, or from a stronger finding, is
   none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import sqrt
from typing import Any, NamedTuple

from celery_dlq.letters.comparison import (
    GIVEN,
    LEAST,
    LEAST_DIFFERENCE,
    MIN_OTHERS,
    PAIR,
    RANGE,
    SAME_QUEUES,
    SET,
    SIZE,
    SUCCESSES,
    TASK,
    UNREAD,
    VALUE,
    FeatureValue,
    Significant,
    comparable,
    fisher_probability,
    ranked_findings,
)
from celery_dlq.letters.contrasts import (
    PART,
    CauseGroup,
    Contrast,
    HasProperty,
    Rival,
    RivalShares,
    Stratum,
    contrast,
    is_around,
    is_inside,
    repeats,
    telling_range,
    usual_of,
)
from celery_dlq.letters.explanation import name_of

IN_TIME = frozenset({"release", "host", "origin"})
"""Features that are compared between messages of the same time."""

ENOUGH_SUCCESSES = 50
"""With so many successes nothing else is compared: they are what is usual."""

_MOST_IN_SET = 100  # values
_MOST_SHOWN = 20  # values of a set
_LEAST_LIFT = 3  # of each value of a set
_LEAST_EACH = 2.25  # letters with each value of a set; twice is also what is redriven
_FEW_LETTERS = 100
_LEAST_OF_PAIR = 0.3  # the share of the letters that have one of its values
_MOST_PAIRED = 8  # values
_ALIKE = 0.25
_NARROWER = 1.5  # times as often two messages have the same value
_NEARLY_NEVER = 0.01  # two messages have the same value
_RARE = 0.1
_MOST_FINDINGS = 10
_MOST_ALSO = 5
_CLEARLY = 2.0  # standard errors
_SELECT, _TEST = 0, 1  # halves


class Side(NamedTuple):
    """What a cause is compared with."""

    against: str
    rivals: Sequence[Rival]

    @property
    def groups(self) -> list[CauseGroup]:
        """The causes of all rivals."""
        return [group for rival in self.rivals for group in rival]

    @property
    def messages(self) -> int:
        """How many there are."""
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Property:
    feature: str
    value: str
    holds: HasProperty
    known: HasProperty
    kind: str = VALUE
    in_time: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


class _Tested(NamedTuple):
    """A property that differs, perhaps by chance."""

    chance: float
    of: _Property
    side: Side
    contrast: Contrast
    q_value: float = 1.0

    @property
    def rivals(self) -> list[Rival]:
        """Those that it was compared with at last."""
        return [one.rival for one in self.contrast.rivals]

    @property
    def others(self) -> Rival:
        """All of them as one."""
        return tuple(group for rival in self.rivals for group in rival)


class CauseTests:
    """The tests of one cause.

    Args:
        here: Its letters.
        sides: What it is compared with, the best background first.
        totals: All messages with each pair.
        numeric: The features whose values are numbers, without those that are counted up.
        times: Spans of time in which the cause has letters.
        tasks: What has the messages of each task, if there are several.
        changes: Says whether most values of a feature are of a small part of the time.
        alpha: The tolerated share of false findings.
    """

    def __init__(
        self,
        here: CauseGroup,
        sides: Sequence[Side],
        *,
        totals: Counter[FeatureValue],
        numeric: Sequence[str],
        times: Sequence[Stratum],
        tasks: Sequence[Stratum],
        changes: Callable[[str], bool],
        alpha: float,
    ) -> None:
        self._here = here
        self._sides = sides
        self._totals = totals
        self._numeric = numeric
        self._times = times
        self._tasks = tasks
        self._changes = changes
        self._alpha = alpha
        self._tests = 0
        self._usual_of: dict[tuple[Rival, str], str | None] = {}
        self.not_compared: set[str] = set()

    def findings(self) -> tuple[Significant, ...]:
        """What is beyond chance, the most telling first."""
        tested = [*self._single_values(), *self._value_sets(), *self._number_ranges()]
        found = [one for one in self._corrected(tested) if self._holds_in_time(one)]
        return tuple(self._distinct([*self._value_pairs(found), *found]))

    def _corrected(self, tested: Sequence[_Tested]) -> list[_Tested]:
        """What stays after the correction of Benjamini and Hochberg."""
        ordered = sorted(tested, key=lambda one: (-one.chance, one.of.feature, one.of.value))
        found, q_value = [], 1.0
        for place, one in enumerate(ordered):
            q_value = min(q_value, one.chance * self._tests / (len(ordered) - place))
            if q_value <= self._alpha:
                found.append(one._replace(q_value=q_value))
        return found

    def _compared(self, of: _Property, *, half: int | None = None) -> _Tested | None:
        """A property that differs from the best background that there is."""
        able = [side for side in self._sides if comparable(of.feature, side.against)]
        for side in able:
            tasks = () if side.against == SAME_QUEUES else self._tasks
            strata = self._times if of.in_time else tasks
            found = contrast(self._here, side.rivals, of.holds, of.known, strata=strata, half=half)
            if found is None or (
                side.against == SUCCESSES and found.others < ENOUGH_SUCCESSES and len(able) > 1
            ):
                continue
            if of.in_time and self._times and found.others < MIN_OTHERS:
                continue
            judged = self._telling_contrast(of, side, found)
            return _Tested(judged.chance, of, side, judged) if judged else None
        if able:
            self.not_compared.add(of.feature)
        return None

    def _telling_contrast(self, of: _Property, side: Side, found: Contrast) -> Contrast | None:
        """The contrast with those rivals that can show that it is this cause that differs.

        A rival that has fewer values of the feature lacks this one for a reason of its own.
        """
        if side.against == SUCCESSES:
            return found if found.difference >= LEAST_DIFFERENCE else None
        special = self._special(of, found)
        left = tuple(one for one in found.rivals if one.there >= one.here or one not in special)
        if not left:
            return None
        found = replace(found, rivals=left)
        if len(left) == 1:
            return found if self._is_special(of, found) else None
        if found.difference >= LEAST_DIFFERENCE:
            return found
        return self._without_twin(of, found)

    def _special(self, of: _Property, found: Contrast) -> list[RivalShares]:
        """Rivals that have only a part of the cause's values of a feature, and differ by that.

        A value that most rivals have, each nearly alone, is what is usual.
        """
        if of.kind == RANGE:
            return [one for one in found.rivals if is_inside(one.rival, self._here, of.feature)]
        if of.kind == PAIR or of.feature == TASK or self._here.usual_value(of.feature) is not None:
            return []
        usual = {one: self._usual_value(one.rival, of.feature) for one in found.rivals}
        most, number = Counter(usual.values()).most_common(1)[0]
        agreed = most is not None and 2 * number > len(usual) > 1 and not of.in_time
        if most is not None and agreed and self._here.share_of(of.feature, most) >= PART:
            return []
        return [one for one in usual if self._is_part(one.rival, of, agreed=agreed)]

    def _is_part(self, rival: Rival, of: _Property, *, agreed: bool) -> bool:
        """True if a rival has only a part of the values that the cause has, or fewer of them.

        A rival of one host has the releases of that host alone.
        """
        if of.kind == SET and not (agreed or of.in_time):
            own = _NARROWER * repeats((self._here,), of.feature) + _NEARLY_NEVER
            return (
                self._usual_value(rival, of.feature) is not None or repeats(rival, of.feature) > own
            )
        features = {of.feature, "host"} if of.feature == "release" else {of.feature}
        return any(
            self._here.usual_value(one) is None and self._here.count_of((one, value)) > 0
            for one in features
            if (value := self._usual_value(rival, one)) is not None
        )

    def _usual_value(self, rival: Rival, feature: str) -> str | None:
        """What is asked for each value of a feature, and of each rival."""
        key = (rival, feature)
        if key not in self._usual_of:
            self._usual_of[key] = usual_of(rival, feature)
        return self._usual_of[key]

    def _is_special(self, of: _Property, found: Contrast) -> bool:
        """True if of two causes that differ it is this one that is special.

        Few messages elsewhere have what it has, or nearly all letters here, and some there.
        """
        if found.difference < LEAST_DIFFERENCE:
            return False
        if of.kind == RANGE and not found.holders:
            return is_around(found.rivals[0].rival, self._here, of.holds, of.feature)
        if of.kind == RANGE and found.here < 1 - PART:
            return False
        small = found.there <= 1 - found.here
        part = found.here < 1 - PART or (found.here < 1 and not found.holders)
        if part and of.kind in {VALUE, SET} and of.feature != TASK:
            return small and self._alike_but(of, found.rivals[0].rival)
        return small or (found.here >= 1 - PART and found.there <= 1 / 2)

    def _alike_but(self, of: _Property, rival: Rival) -> bool:
        """True if the letters without a property are as the rival's: only it makes them differ.

        If they have one value alone, either cause may be the special one.
        """
        rest = of.known(self._here) & ~of.holds(self._here)
        size = rest.bit_count()
        could = sum(one.could_have(of.feature).bit_count() for one in rival)
        counts = Counter[FeatureValue]()
        for one in rival:
            counts.update({pair: one.count_of(pair) for pair in one.values_of(of.feature)})
        if not counts or not size:
            return True
        own = [
            (self._here.with_pair(pair) & rest).bit_count()
            for pair in self._here.values_of(of.feature)
        ]
        pair, number = counts.most_common(1)[0]
        beyond = number / could - (self._here.with_pair(pair) & rest).bit_count() / size
        return beyond <= _ALIKE and (size <= 1 or max(own) < (1 - PART) * size)

    def _without_twin(self, of: _Property, found: Contrast) -> Contrast | None:
        """The contrast without rivals that have it as well: one cause of several fingerprints."""
        if of.kind != VALUE or self._here.usual_value(of.feature) != of.value:
            return None
        left = tuple(one for one in found.rivals if 0 < one.there <= _RARE)
        twins = [one for one in found.rivals if one.there >= 1 - PART]
        if not len(twins) <= len(left) == len(found.rivals) - len(twins):
            return None
        return replace(found, rivals=left)

    def _single_values(self) -> Iterator[_Tested]:
        """Test each value of each feature by itself."""
        sizes: dict[tuple[str, bool], int] = {}
        for pair, holders in self._here.index.items():
            feature, value = pair
            if self._totals[pair] < LEAST or pair == UNREAD or feature == SIZE:
                continue
            self._tests += 1
            given = value is None
            known = partial(CauseGroup.could_have, feature=feature, given=given)
            if (feature, given) not in sizes:
                sizes[feature, given] = known(self._here).bit_count()
            if len(holders) < LEAST_DIFFERENCE * sizes[feature, given]:
                continue
            found = self._compared(
                _Property(
                    feature=feature,
                    value=GIVEN if value is None else value,
                    holds=partial(CauseGroup.with_pair, pair=pair),
                    known=known,
                    in_time=feature in IN_TIME,
                )
            )
            if found:
                yield found

    def _value_sets(self) -> Iterator[_Tested]:
        """Test values of a feature that only together are more frequent."""
        features: dict[str, list[FeatureValue]] = defaultdict(list)
        for pair, holders in self._here.index.items():
            feature, value = pair
            if value is not None and feature not in {TASK, SIZE} and len(holders) > 1:
                features[feature].append(pair)
        for feature, pairs in features.items():
            if len(pairs) > 1:
                self._tests += 1
                found = self._value_set(feature, pairs)
                if found:
                    yield found

    def _value_set(self, feature: str, pairs: Sequence[FeatureValue]) -> _Tested | None:
        side = next((one for one in self._sides if comparable(feature, one.against)), None)
        if side is None:
            return None

        def of(chosen: Sequence[FeatureValue], **details: Any) -> _Property:
            return _Property(
                feature=feature,
                value=f"{len(chosen)} values",
                holds=partial(CauseGroup.with_any_of, pairs=tuple(chosen)),
                known=partial(CauseGroup.could_have, feature=feature),
                kind=SET,
                in_time=feature in IN_TIME,
                details=details,
            )

        final = self._frequent_values(feature, pairs, side, None)
        if len(final) <= 1:
            return None
        shown = tuple(str(value) for _feature, value in final[:_MOST_SHOWN])
        found = self._compared(of(final, values=shown))
        if not found or not self._several(found, final):
            return None
        proofs = [self._repeated(feature, found)]
        # Of all values: those of several letters would be chosen by the other half as well.
        chosen = self._frequent_values(feature, self._here.values_of(feature), side, _SELECT)
        if len(chosen) > 1:
            # Without the most frequent value: that is a finding of its own.
            rest = [self._compared(of(chosen[skip:]), half=_TEST) for skip in (0, 1)]
            if all(rest):
                proofs.append(max(one.chance for one in rest if one))
        return found._replace(chance=min(1.0, 2 * min(proofs)))

    def _several(self, found: _Tested, values: Sequence[FeatureValue]) -> bool:
        """True if several values make the difference, and each has several letters."""
        letters = found.contrast.letters
        rest = letters - self._here.count_of(values[0])
        return (
            rest >= LEAST_DIFFERENCE * found.contrast.of_letters
            and letters >= _LEAST_EACH * len(values)
        )

    def _repeated(self, feature: str, found: _Tested) -> float:
        """The probability that letters share values by chance, if they do as those of rivals.

        Of letters with a value that others of the cause have as well every second one counts:
        two of them are of one draw. Rivals count with any value of the cause.
        """
        own = self._here.could_have(feature)
        values = self._here.values_of(feature)
        repeated = [pair for pair in values if self._here.count_of(pair) > 1]
        a = (self._here.with_any_of(repeated) & own).bit_count()
        a -= max(self._here.count_of(pair) for pair in repeated)
        any_value = partial(CauseGroup.with_any_of, pairs=values)
        known = partial(CauseGroup.could_have, feature=feature)
        met = contrast(self._here, found.rivals, any_value, known)
        if met is None:
            return 1.0
        n = own.bit_count()
        tails = sorted(
            fisher_probability(max(0, a // 2), one.holders, n // 2, one.others)
            if a * one.others > one.holders * n
            else 1.0
            for one in met.rivals
        )
        most = len(tails) // 2
        return min(1.0, (len(tails) - most) * tails[most])

    def _frequent_values(
        self, feature: str, pairs: Sequence[FeatureValue], side: Side, half: int | None
    ) -> list[FeatureValue]:
        """The values that are much more frequent here, the most frequent first."""
        here = self._here.all if half is None else self._here.half_of(half)
        n = (self._here.could_have(feature) & here).bit_count()
        rivals = [
            (one, inside, size)
            for one in side.groups
            for inside in [one.all if half is None else one.half_of(half)]
            for size in [(one.could_have(feature) & inside).bit_count()]
            if size
        ]
        least = 1 if half is None or n < _FEW_LETTERS else 2
        found = []
        for pair in pairs:
            a = (self._here.with_pair(pair) & here).bit_count()
            if a < least:
                continue
            share = sum(
                (one.with_pair(pair) & inside).bit_count() / size
                for one, inside, size in rivals
                if pair in one.index
            )
            if rivals and a / n > _LEAST_LIFT * share / len(rivals):
                found.append((-a, str(pair[1])))
        found.sort()
        return [(feature, value) for _a, value in found[:_MOST_IN_SET]]

    def _number_ranges(self) -> Iterator[_Tested]:
        """Test ranges of numbers."""
        for feature in self._numeric:
            own, _holders = self._here.numbers(feature)
            side = next((one for one in self._sides if comparable(feature, one.against)), None)
            if not own or side is None:
                continue
            self._tests += 1
            others = [one.numbers(feature)[0] for one in side.groups]
            ends = telling_range(own, others)
            if ends is None or ends[0] == ends[1]:
                continue
            found = self._compared(self._number_range(feature, ends, others))
            if found:
                distinct = len({value for numbers in (own, *others) for value in numbers})
                ranges = distinct * (distinct + 1) / 2
                by_chance = max(found.chance, self._without_most_frequent(found))
                yield found._replace(chance=min(1.0, by_chance * ranges))

    def _number_range(
        self, feature: str, ends: tuple[float, float], others: Sequence[Sequence[float]]
    ) -> _Property:
        """A range; it has no end where no other message has a number beyond it."""
        own, _holders = self._here.numbers(feature)
        low, high = (f"{end:.15g}" for end in ends)
        first = min((numbers[0] for numbers in others if numbers), default=ends[0])
        last = max((numbers[-1] for numbers in others if numbers), default=ends[1])
        lowest = None if first >= ends[0] and own[0] >= ends[0] else low
        highest = None if last <= ends[1] and own[-1] <= ends[1] else high
        if lowest is None and highest is None:
            lowest, highest = low, high
        value = f"{low} to {high}"
        if lowest is None or highest is None:
            value = f"{high} or less" if lowest is None else f"{low} or more"
        return _Property(
            feature=feature,
            value=value,
            holds=partial(CauseGroup.between, feature=feature, low=ends[0], high=ends[1]),
            known=partial(CauseGroup.could_have, feature=feature),
            kind=RANGE,
            details={"low": lowest, "high": highest},
        )

    def _without_most_frequent(self, found: _Tested) -> float:
        """The chance of a range without its most frequent value: that is a finding of its own."""
        inside = found.of.holds(self._here)
        values = self._here.values_of(found.of.feature)
        most = max(
            (pair for pair in values if inside >> self._here.index[pair][0] & 1),
            key=self._here.count_of,
        )

        def known(group: CauseGroup) -> int:
            return found.of.known(group) & ~group.with_pair(most)

        rest = contrast(self._here, found.rivals, found.of.holds, known, strata=self._tasks)
        return rest.chance if rest and rest.difference >= LEAST_DIFFERENCE else 1.0

    def _value_pairs(self, found: Sequence[_Tested]) -> list[_Tested]:
        """The two values of which each makes the other more telling, if there are such."""
        single = [
            one
            for one in sorted(found, key=lambda one: -one.contrast.difference)
            if one.of.kind == VALUE and one.contrast.here >= _LEAST_OF_PAIR
        ][:_MOST_PAIRED]
        several = [*combinations(single, 2)]
        met = [self._value_pair(first, second, len(several)) for first, second in several]
        best = sorted((one for one in met if one), key=lambda one: -one.contrast.difference)
        return best[:1]

    def _value_pair(self, first: _Tested, second: _Tested, tests: int) -> _Tested | None:
        if first.of.feature == second.of.feature or first.side.against != second.side.against:
            return None
        of = _Property(
            feature=f"{first.of.feature} and {second.of.feature}",
            value=f"{first.of.value} and {second.of.value}",
            holds=_with_both(first.of.holds, second.of.holds),
            known=_with_both(first.of.known, second.of.known),
            kind=PAIR,
            in_time=first.of.in_time or second.of.in_time,
            details={"parts": tuple((one.of.feature, one.of.value) for one in (first, second))},
        )
        strata = self._times if of.in_time else self._tasks
        rivals = first.rivals
        whole = contrast(self._here, rivals, of.holds, of.known, strata=strata)
        shares = [(one.contrast.here, one.contrast.there) for one in (first, second)]
        if (
            whole is None
            or whole.here < (1 - _RARE) * min(here for here, _there in shares)
            or whole.there >= min(there for _here, there in shares)
        ):
            return None
        chances = []
        for base, other in ((first, second), (second, first)):
            met = contrast(self._here, [first.others], other.of.holds, base.of.holds, strata=strata)
            if met is None or met.difference < LEAST_DIFFERENCE:
                return None
            chances.append(met.chance * tests)
        if max(chances) > self._alpha:
            return None
        return _Tested(max(chances), of, first.side, whole, max(chances))

    def _holds_in_time(self, one: _Tested) -> bool:
        """False if others of the same time have the property as often, or none can be compared.

        Arguments may change with time: a date, a campaign, an id that is counted up.
        """
        if one.of.in_time or not self._times:
            return True
        parts = [feature for feature, _value in one.of.details.get("parts", ())]
        changes = any(self._changes(feature) for feature in parts or [one.of.feature])
        same = contrast(self._here, one.rivals, one.of.holds, one.of.known, strata=self._times)
        if same is None or same.others < MIN_OTHERS:
            return not changes
        error = sqrt(max(same.there * (1 - same.there), 1 / same.others) / same.others)
        changes = changes or same.there - one.contrast.there > _CLEARLY * error
        return not changes or (same.difference >= LEAST_DIFFERENCE and same.chance <= self._alpha)

    def _distinct(self, found: Sequence[_Tested]) -> list[Significant]:
        """Put findings together of which one follows from the other."""
        made = [(_finding(one), one) for one in found]
        order = _before_their_parts(ranked_findings([each for each, _one in made]))
        kept: list[tuple[Significant, _Tested, list[str]]] = []
        for each in order:
            one = next(tested for known, tested in made if known is each)
            for main, stronger, also in kept:
                if (each.feature, each.value) in main.parts:
                    break
                if self._follows(one, stronger):
                    name = name_of(each)
                    if each.kind != PAIR and name not in also and len(also) < _MOST_ALSO:
                        also.append(name)
                    break
            else:
                if len(kept) < _MOST_FINDINGS:
                    kept.append((each, one, []))
        return [replace(each, also=tuple(also)) for each, _one, also in kept]

    def _follows(self, one: _Tested, stronger: _Tested) -> bool:
        """True if a finding is none where the stronger one is held constant.

        The values of a set were chosen by the letters: in a range of them it is more frequent.
        """
        has = one.of.holds(self._here)
        kinds = {one.of.kind, stronger.of.kind}
        if one.of.feature == stronger.of.feature and kinds == {SET, RANGE}:
            rest = has & ~stronger.of.holds(self._here)
            return rest.bit_count() < LEAST_DIFFERENCE * has.bit_count()

        def without(group: CauseGroup) -> int:
            return group.all & ~stronger.of.holds(group)

        met = contrast(
            self._here,
            [one.others],
            one.of.holds,
            one.of.known,
            strata=(Stratum(stronger.of.holds), Stratum(without)),
        )
        return met is None or met.difference < LEAST_DIFFERENCE or met.chance > self._alpha


def _before_their_parts(found: Sequence[Significant]) -> list[Significant]:
    """Findings in their order, pairs just before the first of their values."""
    result = [one for one in found if one.kind != PAIR]
    for pair in found:
        if pair.kind == PAIR:
            places = [
                place for place, one in enumerate(result) if (one.feature, one.value) in pair.parts
            ]
            result.insert(min(places, default=0), pair)
    return result


def _with_both(first: HasProperty, second: HasProperty) -> HasProperty:
    return lambda group: first(group) & second(group)


def _finding(one: _Tested) -> Significant:
    found = one.contrast
    alone = one.side.against != SUCCESSES and len(found.rivals) == len(found.rivals[0].rival) == 1
    return Significant(
        feature=one.of.feature,
        value=one.of.value,
        kind=one.of.kind,
        against=one.side.against,
        letters=found.letters,
        of_letters=found.of_letters,
        others=found.holders,
        of_others=found.others,
        share_here=found.here,
        share_elsewhere=found.there,
        lift=found.here / (found.there or 0.5 / found.others),
        p_value=one.chance,
        q_value=one.q_value,
        causes=sum(len(met.rival) for met in found.rivals) * (one.side.against != SUCCESSES),
        neighbour=found.rivals[0].rival[0].name if alone else None,
        **one.of.details,
    )
