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
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from celery_dlq.letters.comparison import (
    ALPHA,
    FIELDS,
    MIN_OTHERS,
    OF_ANY_TASK,
    SAME_QUEUES,
    SAME_TASKS,
    SIZE,
    SUCCESSES,
    UNREAD,
    WHOLE,
    FeatureValue,
    comparable,
)
from celery_dlq.letters.contrasts import (
    CauseGroup,
    Stratum,
    changes_with_time,
    counted_up,
    number_of,
    rivals_of,
    times_of,
)
from celery_dlq.letters.course import CauseTiming, Course, Moment, timings
from celery_dlq.letters.explanation import Explanation, Shared, TaskLetters
from celery_dlq.letters.properties import CauseTests, Side

SAMPLE = 2_000
"""Messages of one cause, or successes of one task, that are enough."""


_MOSTLY = 9  # so many times as many numbers as other values
_SEVERAL = 3  # different numbers


class ComparedMessage(NamedTuple):
    """A letter or a success, and what it is compared by.

    ``cause`` is the fingerprint; ``None``: a message that succeeded. ``at`` is the time of its
    death or success, in seconds since 1970 in UTC. ``pairs`` are `pairs_of` it.
    """

    cause: str | None
    task: str
    queue: str
    at: float | None
    pairs: frozenset[FeatureValue]


def explain_causes(
    messages: Iterable[ComparedMessage],
    courses: Mapping[str, Course],
    wanted: Collection[str],
    *,
    ends_at: float | None = None,
    alpha: float = ALPHA,
    cut: bool = False,
    timed: bool = True,
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
        cut: True if older letters were not read.
        timed: False if messages of a time were left out, so that nothing is known of the time.
    """
    unit = _Unit(messages)
    moments = unit.moments()
    known = {
        name: Course.of(moments[name], letters=group.size) for name, group in unit.letters.items()
    }
    courses = {**known, **courses}
    times: dict[str, CauseTiming] = {}
    for names in unit.of_same_tasks() if timed else ():
        same = {name: moments[name] for name in (*names, None)}
        times |= timings(courses, same, names & {*wanted}, ends_at=ends_at, alpha=alpha)
    return {
        name: unit.explained(name, courses[name], times.get(name), alpha, cut=cut)
        for name in wanted
        if name in unit.letters
    }


class _Unit:
    """Messages that are compared together."""

    def __init__(self, messages: Iterable[ComparedMessage]) -> None:
        letters: dict[str, list[ComparedMessage]] = defaultdict(list)
        good: dict[str, list[ComparedMessage]] = defaultdict(list)
        for one in messages:
            if one.cause is None:
                good[one.task].append(one)
            else:
                letters[one.cause].append(one)
        self.tasks = {name: Counter(one.task for one in some) for name, some in letters.items()}
        self._messages = dict(letters)
        self.letters = {name: _messages_of_cause(name, some) for name, some in letters.items()}
        self._good = {task: _messages_of_cause(task, some) for task, some in good.items()}
        groups = [*self.letters.values(), *self._good.values()]
        self._totals = Counter[FeatureValue]()
        for group in groups:
            self._totals.update({pair: len(some) for pair, some in group.index.items()})
        self._numeric = _numeric(groups)
        for group in groups:
            group.read_numbers(self._numeric)
        self._changing: dict[str, bool] = {}
        self._numeric -= {one for one in self._numeric if counted_up(groups, one)}

    def explained(
        self, name: str, course: Course, timing: CauseTiming | None, alpha: float, *, cut: bool
    ) -> Explanation:
        """Explain a cause."""
        here, sides, tasks = self.letters[name], self._comparison_sides(name), self.tasks[name]
        comparison = CauseTests(
            here,
            sides,
            totals=self._totals,
            numeric=sorted(self._numeric),
            times=times_of(here),
            tasks=[Stratum(partial(CauseGroup.of_task, task=task)) for task in tasks]
            if len(tasks) > 1
            else [],
            changes=self._changes,
            alpha=alpha,
        )
        findings = comparison.findings()
        same = [group for side in sides if side.against != SAME_QUEUES for group in side.groups]
        return Explanation(
            letters=here.size,
            shared=_shared_values(
                here, [side for side in sides if self._of_tasks(name, side) == here.size]
            ),
            findings=findings,
            compared={side.against: side.messages for side in sides},
            compared_letters={side.against: self._of_tasks(name, side) for side in sides},
            tasks={task: self._of_task(name, task) for task in tasks},
            unread=here.count_of(UNREAD) + sum(group.count_of(UNREAD) for group in same),
            cut=cut,
            selected=course.letters,
            causes=len(self._other_causes(name)),
            not_compared=tuple(sorted(comparison.not_compared)),
            timing=timing,
            again=course.again,
        )

    def of_same_tasks(self) -> list[set[str]]:
        """Causes by their tasks, whose traffic has hours of its own."""
        found: dict[frozenset[str], set[str]] = {}
        for name in self.letters:
            found.setdefault(frozenset(self.tasks[name]), set()).add(name)
        return [*found.values()]

    def _changes(self, feature: str) -> bool:
        """True if most values of a feature are of a small part of the time."""
        if feature not in self._changing:
            groups = [*self.letters.values(), *self._good.values()]
            self._changing[feature] = changes_with_time(groups, feature)
        return self._changing[feature]

    def moments(self) -> dict[str | None, list[Moment]]:
        """The times of the letters of each cause, and of the successes."""
        found: dict[str | None, list[Moment]] = {
            name: _moments(group) for name, group in self.letters.items()
        }
        found[None] = [one for group in self._good.values() for one in _moments(group)]
        return found

    def _of_task(self, name: str, task: str) -> TaskLetters:
        """The letters of a task, and the larger number of others or successes."""
        others = self._of_other_causes(name, task)
        good = self._good.get(task)
        return TaskLetters(self.tasks[name][task], max(others, good.size if good else 0))

    def _of_other_causes(self, name: str, task: str) -> int:
        return sum(counts[task] for other, counts in self.tasks.items() if other != name)

    def _of_tasks(self, name: str, side: Side) -> int:
        """The letters of those tasks of which a side has messages."""
        if side.against == SAME_QUEUES:
            return self.letters[name].size
        tasks = {
            task
            for group in side.groups
            for task in (self.tasks[group.name] if side.against == SAME_TASKS else [group.name])
        }
        return sum(count for task, count in self.tasks[name].items() if task in tasks)

    def _other_causes(self, name: str) -> list[CauseGroup]:
        """The other causes of the same tasks."""
        own = self.tasks[name].keys()
        return [
            group
            for other, group in self.letters.items()
            if other != name and own & self.tasks[other].keys()
        ]

    def _comparison_sides(self, name: str) -> list[Side]:
        """What a cause is compared with, the best background first."""
        good = [self._good[task] for task in self.tasks[name] if task in self._good]
        same = self._other_causes(name)
        found = []
        if good:
            found.append(Side(SUCCESSES, [tuple(good)]))
        if same:
            found.append(Side(SAME_TASKS, rivals_of(same)))
        if min(self._of_other_causes(name, task) for task in self.tasks[name]) < MIN_OTHERS:
            near = self._queue_neighbours(name)
            if near:
                found.append(Side(SAME_QUEUES, rivals_of(near)))
        return found

    def _queue_neighbours(self, name: str) -> list[CauseGroup]:
        """The letters of other causes, of any task, from the same queues."""
        queues = {one.queue for one in self._messages[name]}
        found = (
            _messages_of_cause(other, [one for one in some if one.queue in queues])
            for other, some in self._messages.items()
            if other != name
        )
        return [one for one in found if one.size]


def _messages_of_cause(name: str, messages: Iterable[ComparedMessage]) -> CauseGroup:
    return CauseGroup(name, ((one.at, one.task, one.pairs) for one in messages))


def _numeric(groups: Iterable[CauseGroup]) -> frozenset[str]:
    """The arguments whose values are numbers, nearly all of them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for group in groups:
        for feature, value in group.index:
            if value is not None:
                found[feature][number_of(value) is None] += 1
    return frozenset(
        feature
        for feature, (numbers, others) in found.items()
        if numbers > _MOSTLY * others and numbers >= _SEVERAL and feature not in WHOLE
    )


def _moments(group: CauseGroup) -> list[Moment]:
    """The times of messages, with their releases."""
    releases: dict[int, str] = {}
    for (feature, value), holders in group.index.items():
        if feature == "release" and value is not None:
            releases.update(dict.fromkeys(holders, value))
    return [Moment(at, releases.get(number)) for number, at in enumerate(group.times)]


def _shared_values(here: CauseGroup, sides: Sequence[Side]) -> tuple[Shared, ...]:
    """The values that all letters have, and not all others.

    Of fields, those that can explain a death of any task. The sides are those that all
    letters were compared with.
    """
    if here.size == 1:
        return ()
    found = []
    for pair, holders in here.index.items():
        feature, value = pair
        hidden = feature in WHOLE - OF_ANY_TASK or feature == SIZE
        if value is None or len(holders) < here.size or hidden:
            continue
        side = next((one for one in sides if comparable(feature, one.against)), None)
        groups = side.groups if side else []
        others = sum(group.count_of(pair) for group in groups)
        of_others = sum(group.could_have(feature).bit_count() for group in groups)
        one = Shared(feature=feature, value=value, others=others, of_others=of_others)
        if one.portion < 1:  # else it is no difference
            found.append(one)
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    found.sort(key=lambda one: (one.portion, kinds.get(one.feature, -1), one.feature, one.value))
    return tuple(found)
