"""What explains a cause: the time, and what its letters have that other messages lack.

`explain_causes` gets a sample of messages and exact counts over time. It knows neither Spark nor
Redis: the triage gives it a sample of files, ``dlq differences`` the newest letters of a queue.
All say what it says.

1. A cause is compared with successes of its task where there are enough: they are what is usual.
   Otherwise with each other cause of the task, which all weigh the same.
2. Each value is tested. Sets of values and ranges of numbers are chosen in one half of the
   messages and tested in the other.
3. Two values that only together set the letters apart become a pair. What follows from a stronger
   finding is named beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from celery_dlq.letters.comparison import (
    ALPHA,
    GIVEN,
    LEAST,
    LEAST_DIFFERENCE,
    MIN_OTHERS,
    OF_ANY_TASK,
    PAIR,
    RANGE,
    SAME_QUEUES,
    SAME_TASKS,
    SET,
    SIZE,
    SUCCESSES,
    TASK,
    UNREAD,
    VALUE,
    WHOLE,
    Pair,
    Significant,
    comparable,
    ranked,
)
from celery_dlq.letters.contrasts import (
    IN_TIME,
    Contrast,
    Group,
    Holds,
    Rival,
    contrast,
    deviates,
    narrower,
    number_of,
    rivals_of,
    times_of,
    widest,
)
from celery_dlq.letters.course import Course, Moment, Timing, timings
from celery_dlq.letters.explanation import Explanation, OfTask, Shared

SAMPLE = 2_000
"""Messages of one cause, or successes of one task, that are enough."""

_ENOUGH_SUCCESSES = 50
_MOST_IN_SET = 100
_MOST_SHOWN = 20  # values of a set
_LEAST_LIFT = 3
_LEAST_SHARE = 0.1
_MOST_FINDINGS = 10
_MOST_ALSO = 5
_SELECT, _TEST = 0, 1  # halves


class Message(NamedTuple):
    """A letter or a success, and what it is compared by.

    ``cause`` is the fingerprint; ``None``: a message that succeeded. ``at`` is the time of its
    death or success, in seconds since 1970 in UTC. ``pairs`` are `pairs_of` it.
    """

    cause: str | None
    task: str
    queue: str
    at: float | None
    pairs: frozenset[Pair]


def explain_causes(
    messages: Iterable[Message],
    courses: Mapping[str, Course],
    wanted: Collection[str],
    *,
    ends_at: float | None = None,
    alpha: float = ALPHA,
    cut: bool = False,
) -> dict[str, Explanation]:
    """Explain causes by a sample of letters and successes that are compared together.

    Args:
        messages: Letters of all causes of a task, of each at most `SAMPLE`, drawn by chance, and
            successes of the task. Where a task has few others, letters of other tasks of its queues
            as well.
        courses: The course of each cause, of all its letters.
        wanted: The fingerprints to explain.
        ends_at: When the data end; by default with the last message.
        alpha: The tolerated share of false findings.
        cut: True if older messages were not read.
    """
    unit = _Unit(messages)
    moments = unit.moments()
    known = {
        name: Course.of(moments[name], letters=group.size) for name, group in unit.letters.items()
    }
    courses = {**known, **courses}
    times = timings(courses, moments, unit.letters.keys() & wanted, ends_at=ends_at, alpha=alpha)
    return {
        name: unit.explained(name, courses[name], times[name], alpha, cut=cut)
        for name in wanted
        if name in times
    }


class _Side(NamedTuple):
    """What a cause is compared with."""

    against: str
    rivals: list[Rival]

    @property
    def messages(self) -> int:
        return sum(group.size for rival in self.rivals for group in rival)


class _Tested(NamedTuple):
    """A finding that may be chance: ``chance`` is the probability."""

    chance: float
    found: Significant
    holds: Holds
    known: Holds
    side: _Side


class _Unit:
    """Messages that are compared together."""

    def __init__(self, messages: Iterable[Message]) -> None:
        by_cause: dict[str | None, list[Message]] = defaultdict(list)
        for one in messages:
            by_cause[one.cause].append(one)
        good = by_cause.pop(None, [])
        self.tasks = {name: Counter(one.task for one in some) for name, some in by_cause.items()}
        self.queues = {name: {one.queue for one in some} for name, some in by_cause.items()}
        self.letters = {
            str(name): Group(str(name), ((one.at, one.pairs) for one in some))
            for name, some in by_cause.items()
        }
        self.good_tasks = Counter(one.task for one in good)
        self.good = {
            task: Group("", ((one.at, one.pairs) for one in good if one.task == task))
            for task in self.good_tasks
        }
        groups = [*self.letters.values(), *self.good.values()]
        self.totals = Counter[Pair]()
        for group in groups:
            self.totals.update({pair: len(some) for pair, some in group.index.items()})
        self.numeric = _numeric(groups)
        for group in groups:
            group.read_numbers(self.numeric)

    def explained(
        self,
        name: str,
        course: Course,
        timing: Timing,
        alpha: float,
        *,
        cut: bool,
    ) -> Explanation:
        """Explain a cause."""
        here = self.letters[name]
        sides = self.sides(name)
        own = self.tasks[name]
        same = [one for one in sides if one.against != SAME_QUEUES]
        others = {
            task: max(
                sum(counts[task] for other, counts in self.tasks.items() if other != name),
                self.good_tasks[task],
            )
            for task in own
        }
        comparison = _Comparison(self, here, sides, [*own], alpha)
        findings = comparison.findings()
        return Explanation(
            letters=here.size,
            shared=_shared(here, sides),
            findings=findings,
            compared={side.against: side.messages for side in sides},
            compared_letters={side.against: here.size for side in sides},
            tasks={task: OfTask(count, others[task]) for task, count in own.items()},
            unread=here.count(UNREAD)
            + sum(group.count(UNREAD) for side in same for rival in side.rivals for group in rival),
            cut=cut,
            selected=course.letters,
            timing=timing,
            again=course.again,
        )

    def moments(self) -> dict[str | None, list[Moment]]:
        """The times of the letters of each cause, and of the successes."""
        found: dict[str | None, list[Moment]] = {
            name: moments_of(group) for name, group in self.letters.items()
        }
        found[None] = [one for group in self.good.values() for one in moments_of(group)]
        return found

    def others(self, name: str) -> list[Group]:
        """The other causes of the same tasks."""
        own = self.tasks[name].keys()
        return [
            group
            for other, group in self.letters.items()
            if other != name and own & self.tasks[other].keys()
        ]

    def sides(self, name: str) -> list[_Side]:
        """What a cause is compared with, the best background first."""
        own = self.tasks[name]
        good = [self.good[task] for task in own if task in self.good]
        same = self.others(name)
        found = []
        if good:
            found.append(_Side(SUCCESSES, [good]))
        if same:
            found.append(_Side(SAME_TASKS, rivals_of(same)))
        if sum(one.size for one in same) < MIN_OTHERS:
            near = [
                group
                for other, group in self.letters.items()
                if other != name and group not in same and self.queues[other] & self.queues[name]
            ]
            if near:
                found.append(_Side(SAME_QUEUES, rivals_of(near)))
        return found


class _Comparison:
    """The tests of one cause."""

    def __init__(
        self, unit: _Unit, here: Group, sides: Sequence[_Side], tasks: Sequence[str], alpha: float
    ) -> None:
        self.unit = unit
        self.here = here
        self.sides = sides
        self.alpha = alpha
        self.times = times_of(here)
        self.by_task: list[Holds] = (
            [partial(Group.mask, pair=(TASK, task)) for task in tasks] if len(tasks) > 1 else []
        )
        self.tests = 0

    def findings(self) -> tuple[Significant, ...]:
        """What is beyond chance, the most telling first."""
        tested = [*self.single(), *self.sets(), *self.ranges()]
        found = self.corrected(tested)
        return tuple(self.distinct([*self.pairs(found), *found]))

    def corrected(self, tested: Sequence[_Tested]) -> list[_Tested]:
        """What stays after the correction of Benjamini and Hochberg."""
        ordered = sorted(tested, key=lambda one: (-one.chance, one.found.feature, one.found.value))
        found, q_value = [], 1.0
        for place, one in enumerate(ordered):
            q_value = min(q_value, one.chance * self.tests / (len(ordered) - place))
            if q_value <= self.alpha:
                found.append(one._replace(found=replace(one.found, q_value=q_value)))
        return found

    def sides_for(self, feature: str) -> Iterator[_Side]:
        """The sides that a feature can be compared with; of successes enough are enough."""
        for side in self.sides:
            if not comparable(feature, side.against):
                continue
            if side.against == SUCCESSES:
                if side.messages >= _ENOUGH_SUCCESSES or len(self.sides) == 1:
                    yield side
                    return
                continue
            rivals = [one for one in side.rivals if not deviates(one, self.here, feature)]
            if rivals:
                yield _Side(side.against, rivals)

    def strata(self, feature: str) -> Sequence[Holds]:
        return self.times if feature in IN_TIME else self.by_task

    def single(self) -> Iterator[_Tested]:
        """Single values."""
        sides: dict[str, list[_Side]] = {}
        for pair, holders in self.here.index.items():
            feature, value = pair
            total = self.unit.totals[pair]
            if total < LEAST or pair == UNREAD or feature == SIZE:
                continue
            self.tests += 1
            known = partial(Group.known, feature=feature, value=value)
            if len(holders) < _LEAST_SHARE * known(self.here).bit_count():
                continue
            if feature not in sides:
                sides[feature] = list(self.sides_for(feature))
            holds = partial(Group.mask, pair=pair)
            for side in sides[feature][:1]:
                one = contrast(self.here, side.rivals, holds, known, strata=self.strata(feature))
                if one and self.telling(one, side):
                    shown = GIVEN if value is None else value
                    yield self.tested(one, side, holds, known, feature=feature, value=shown)

    def telling(self, one: Contrast, side: _Side) -> bool:
        """True if the shares differ enough, and it is this cause that differs."""
        alone = side.against != SUCCESSES and len(side.rivals) == 1
        return one.difference >= LEAST_DIFFERENCE and (
            not alone or one.share == 1 or one.there[0] > 0
        )

    def tested(
        self,
        one: Contrast,
        side: _Side,
        holds: Holds,
        known: Holds,
        *,
        chance: float | None = None,
        **values: object,
    ) -> _Tested:
        """A finding, not yet corrected."""
        p_value = one.chance if chance is None else chance
        found = Significant(
            against=side.against,
            letters=one.here[0],
            of_letters=one.here[1],
            others=one.there[0],
            of_others=one.there[1],
            share_here=one.share,
            share_elsewhere=one.elsewhere,
            lift=one.share / (one.elsewhere or 0.5 / one.there[1]),
            p_value=p_value,
            q_value=p_value,
            causes=0 if side.against == SUCCESSES else sum(len(rival) for rival in side.rivals),
            neighbour=side.rivals[0][0].name
            if side.against != SUCCESSES and len(side.rivals) == len(side.rivals[0]) == 1
            else None,
            **values,  # type: ignore[arg-type]
        )
        return _Tested(p_value, found, holds, known, side)

    def features(self) -> dict[str, list[Pair]]:
        """The values that the letters have, by argument."""
        found: dict[str, list[Pair]] = defaultdict(list)
        for pair in self.here.index:
            if pair[1] is not None and pair != UNREAD and pair[0] not in {TASK, SIZE}:
                found[pair[0]].append(pair)
        return found

    def sets(self) -> Iterator[_Tested]:
        """Values of a feature that together have more of the letters."""
        for feature, pairs in self.features().items():
            if len(pairs) < 2:
                continue
            self.tests += 1
            for side in [*self.sides_for(feature)][:1]:
                chosen = self.chosen(feature, pairs, side, _SELECT)
                if len(chosen) < 2:
                    continue
                known = partial(Group.known, feature=feature)
                strata = self.strata(feature)
                proof = contrast(
                    self.here,
                    side.rivals,
                    partial(Group.any_of, pairs=chosen),
                    known,
                    strata=strata,
                    half=_TEST,
                )
                if not proof or not self.telling(proof, side):
                    continue
                final = self.chosen(feature, pairs, side, None)
                holds = partial(Group.any_of, pairs=final)
                one = contrast(self.here, side.rivals, holds, known, strata=strata)
                best = max(self.here.count(pair) for pair in final) if final else 0
                if one and self.telling(one, side) and one.here[0] - best >= 0.1 * one.here[1]:
                    names = tuple(str(pair[1]) for pair in final)
                    yield self.tested(
                        one,
                        side,
                        holds,
                        known,
                        chance=proof.chance,
                        feature=feature,
                        value=f"{len(names)} values",
                        kind=SET,
                        values=names[:_MOST_SHOWN],
                    )

    def chosen(
        self, feature: str, pairs: Sequence[Pair], side: _Side, half: int | None
    ) -> list[Pair]:
        """The values that are much more frequent here, the most frequent first."""
        found = []
        here = self.here.all if half is None else self.here.half(half)
        n = (self.here.known(feature) & here).bit_count()
        groups = [group for rival in side.rivals for group in rival]
        bits = [(group, group.all if half is None else group.half(half)) for group in groups]
        sizes = [(group.known(feature) & mask).bit_count() for group, mask in bits]
        least = 1 if n < 100 else 2
        for pair in pairs:
            if self.here.count(pair) < least:
                continue
            a = (self.here.mask(pair) & here).bit_count()
            if a < least:
                continue
            shares = [
                (group.mask(pair) & mask).bit_count() / m if pair in group.index else 0.0
                for (group, mask), m in zip(bits, sizes, strict=True)
                if m
            ]
            if shares and a / n > _LEAST_LIFT * sum(shares) / len(shares):
                found.append((-a, pair))
        return [pair for _a, pair in sorted(found)[:_MOST_IN_SET]]

    def ranges(self) -> Iterator[_Tested]:
        """Ranges of numbers."""
        for feature in sorted(self.unit.numeric):
            if not self.here.numbers(feature)[0]:
                continue
            self.tests += 1
            for side in [*self.sides_for(feature)][:1]:
                rivals = [
                    one
                    for one in side.rivals
                    if side.against == SUCCESSES or not narrower(one, self.here, feature)
                ]
                if not rivals:
                    continue
                side = _Side(side.against, rivals)
                ends = self.widest(feature, side, _SELECT)
                if ends is None:
                    continue
                known = partial(Group.known, feature=feature)
                between = partial(Group.between, feature=feature, low=ends[0], high=ends[1])
                proof = contrast(self.here, rivals, between, known, half=_TEST)
                if not proof or not self.telling(proof, side):
                    continue
                ends = self.widest(feature, side, None) or ends
                holds = partial(Group.between, feature=feature, low=ends[0], high=ends[1])
                one = contrast(self.here, rivals, holds, known)
                if one and self.telling(one, side):
                    low, high = (f"{end:g}" if abs(end) < 1e6 else f"{end:.0f}" for end in ends)
                    yield self.tested(
                        one,
                        side,
                        holds,
                        known,
                        chance=proof.chance,
                        feature=feature,
                        value=f"{low} to {high}",
                        kind=RANGE,
                        low=low,
                        high=high,
                    )

    def widest(self, feature: str, side: _Side, half: int | None) -> tuple[float, float] | None:
        """The range with most of the letters beyond the others."""

        def numbers(group: Group) -> list[float]:
            values, holders = group.numbers(feature)
            if half is None:
                return values
            return [
                value for value, holder in zip(values, holders, strict=True) if holder % 2 == half
            ]

        groups = [group for rival in side.rivals for group in rival]
        return widest(numbers(self.here), [numbers(group) for group in groups])

    def pairs(self, found: Sequence[_Tested]) -> list[_Tested]:
        """Two values of which each makes the other more telling."""
        single = [one for one in found if one.found.kind == VALUE and one.found.share_here >= 0.3]
        single.sort(key=lambda one: one.found.order)
        best: list[_Tested] = []
        for place, first in enumerate(single[:8]):
            for second in single[place + 1 : 8]:
                if first.side.against != second.side.against:
                    continue
                if first.found.feature == second.found.feature:
                    continue
                one = self.pair(first, second)
                if one:
                    best.append(one)
        best.sort(key=lambda one: one.found.order)
        return best[:1]

    def pair(self, first: _Tested, second: _Tested) -> _Tested | None:
        rivals = first.side.rivals

        def both(group: Group) -> int:
            return first.holds(group) & second.holds(group)

        def known(group: Group) -> int:
            return first.known(group) & second.known(group)

        whole = contrast(self.here, rivals, both, known)
        if whole is None:
            return None
        weaker = min(first.found.share_elsewhere, second.found.share_elsewhere)
        stronger = min(first.found.share_here, second.found.share_here)
        if whole.share < 0.9 * stronger or whole.elsewhere > weaker / 2:
            return None
        worst = 0.0
        for base, other in ((first, second), (second, first)):
            inside = contrast(self.here, rivals, other.holds, base.holds, half=_TEST)
            if inside is None or inside.difference < LEAST_DIFFERENCE:
                return None
            worst = max(worst, inside.chance)
        if worst > self.alpha:
            return None
        names = (first.found, second.found)
        return self.tested(
            whole,
            first.side,
            both,
            known,
            chance=worst,
            feature=" and ".join(one.feature for one in names),
            value=" and ".join(one.value for one in names),
            kind=PAIR,
            parts=tuple((one.feature, one.value) for one in names),
        )

    def distinct(self, found: Sequence[_Tested]) -> list[Significant]:
        """Put findings together of which one follows from the other."""
        by_finding = {id(one.found): one for one in found}
        order = ranked([one.found for one in found])
        order.sort(key=lambda one: one.kind != PAIR)
        kept: list[tuple[_Tested, list[str]]] = []
        for each in order:
            one = by_finding[id(each)]
            for other, also in kept:
                if self.follows(one, other):
                    if len(also) < _MOST_ALSO:
                        also.append(
                            one.found.feature
                            if one.found.value == GIVEN
                            else f"{one.found.feature} = {one.found.value}"
                        )
                    break
            else:
                if len(kept) < _MOST_FINDINGS:
                    kept.append((one, []))
        return [replace(one.found, also=tuple(dict.fromkeys(also))) for one, also in kept]

    def follows(self, one: _Tested, stronger: _Tested) -> bool:
        """True if a finding is no longer one where the stronger finding is held constant."""

        def without(group: Group) -> int:
            return group.all ^ stronger.holds(group)

        inside = contrast(
            self.here, one.side.rivals, one.holds, one.known, strata=(stronger.holds, without)
        )
        return inside is None or inside.difference < LEAST_DIFFERENCE or inside.chance > self.alpha


def _numeric(groups: Iterable[Group]) -> frozenset[str]:
    """The features whose values are numbers, nearly all of them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for group in groups:
        for feature, value in group.index:
            if value is not None:
                found[feature][number_of(value) is None] += 1
    return frozenset(
        feature
        for feature, (numbers, others) in found.items()
        if numbers > 9 * others and numbers > 2 and (feature == SIZE or feature not in WHOLE)
    )


def moments_of(group: Group) -> list[Moment]:
    """The times of messages, with their releases."""
    releases: dict[int, str] = {}
    for (feature, value), holders in group.index.items():
        if feature == "release" and value is not None:
            releases.update(dict.fromkeys(holders, value))
    return [Moment(at, releases.get(number)) for number, at in enumerate(group.times)]


def _shared(here: Group, sides: Sequence[_Side]) -> tuple[Shared, ...]:
    """The values that all letters have; of fields, those that can explain a death of any task."""
    if here.size < 2:
        return ()
    found = []
    for pair, holders in here.index.items():
        feature, value = pair
        if value is None or len(holders) < here.size or feature in WHOLE - OF_ANY_TASK:
            continue
        if feature == SIZE:
            continue
        others = of_others = 0
        for side in sides:
            if comparable(feature, side.against):
                groups = [group for rival in side.rivals for group in rival]
                others = sum(group.count(pair) for group in groups)
                of_others = sum(group.known(feature).bit_count() for group in groups)
                break
        found.append(Shared(feature=feature, value=value, others=others, of_others=of_others))
    found.sort(
        key=lambda one: (
            one.others / one.of_others if one.of_others else 0.0,
            one.feature,
            one.value,
        )
    )
    return tuple(found)
