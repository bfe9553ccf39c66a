"""When the letters of a cause came, and what of that is beyond chance.

A `Course` counts all letters of a cause: by time, and by release. `timing` says since when the
cause is there, whether it grows or is over, which release began or mended it, and at which hours
it comes. Its statements are true of the letters; a cause that comes steadily gets none but
"steady".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from math import isfinite
from random import Random
from typing import Any, Literal, NamedTuple

from celery_dlq.letters import times as tests
from celery_dlq.letters.printable import shortened

ALPHA = 0.01
"""The tolerated share of causes with a false statement on time, of all kinds together."""

MOST_RELEASES = 20
"""Releases of a course; those with the fewest letters are left out."""

_WIDTHS = (1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
_MOST_BUCKETS = 500
_MANY = 10

_SAMPLE = 2_000
_KINDS = 5  # of statements that a cause without any may get
_BRIEF = 60  # seconds of data, or of silence, of which nothing is said
_FUTURE = 300  # seconds by which a clock may be ahead
_OLDEST = 1_262_304_000  # 2010: older times are of a wrong clock
_GAP = 30 * 86_400  # before a last message that is of a wrong clock
_LEAST_TREND = 12
_LEAST_STEADY = 30  # letters, of which it can be said that they come steadily
_LEAST_UNEVEN_LETTERS = 50
_LEAST_UNEVEN = 2.5  # the rate's variance by its square: one hour in six makes 5
_MOST_IN_BURSTS = 0.6  # of others' letters, more than of the time
_LEAST_LEAN = 0.08  # of the mean time: a rate that doubles in two thirds of the time
_JUMP, _FALL = 4, 10
_ERRORS = 3  # standard errors, of a probability of 1 in 700
_NEAR_ERRORS = 2
_COINCIDES = 1 / 6  # at even odds: a release is five times as likely as a coincidence
_ABOUT = 2 * 3600
_MADE_BY_TRAFFIC = 0.05  # of a less likely step near it the traffic is not the reason
_HOURS = 6 * 3600  # on each side of a step, in which the traffic may have one as well
_MANY_SUCCESSES = 200
_MOST_OTHERS, _ENOUGH_OF_EACH = 20, 500  # causes and letters: the traffic needs no more
_MANY_PERIODS = 20  # of which the letters can grow more frequent
_MOST_NAMED = 5
_LEAST_PAUSE = 0.1  # of the time
_LEAST_RETURNED = 5  # letters before and after a pause


class Moment(NamedTuple):
    """When a message died or succeeded, in seconds since 1970 in UTC, and on which release."""

    at: float
    release: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The letters of one cause over time, all of them.

    Attributes:
        letters: Their number, those without a time included.
        first_at: The first, in seconds since 1970 in UTC; ``None``: no letter has a time.
        last_at: The last.
        width: Seconds of a bucket.
        buckets: Letters by ``floor(at / width)``; those without letters are left out.
        releases: Of each release, the letters, the first and the last of them.
        again: Of its redriven messages, those that died again and those that succeeded; ``None``:
            not known.
    """

    letters: int
    first_at: float | None = None
    last_at: float | None = None
    width: int = 3600
    buckets: Mapping[int, int] = field(default_factory=dict)
    releases: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)
    again: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        moments: Iterable[Moment],
        *,
        letters: int | None = None,
        again: tuple[int, int] | None = None,
    ) -> Course:
        """The course of all letters of a cause; ``letters`` counts those without a time as well."""
        found = [one for one in moments if isfinite(one.at)]
        times = [one.at for one in found]
        count = len(found) if letters is None else letters
        if not times:
            return cls(letters=count, again=again)
        first, last = _known_span(times, None)  # a wrong clock makes no wide buckets
        width = width_for(last - first)
        releases: dict[str, tuple[int, float, float]] = {}
        for at, release in found:
            if release is not None:
                number, first, last = releases.get(release, (0, at, at))
                releases[release] = (number + 1, min(first, at), max(last, at))
        return cls(
            letters=count,
            first_at=min(times),
            last_at=max(times),
            width=width,
            buckets=Counter(int(at // width) for at in times),
            releases=dict(sorted(releases.items(), key=lambda x: (-x[1][0], x[0]))[:MOST_RELEASES]),
            again=again,
        )

    def between(self, start: float, end: float) -> int:
        """Letters in an interval, by the buckets whose middle is in it."""
        return sum(
            count
            for place, count in self.buckets.items()
            if start <= (place + 0.5) * self.width < end
        )

    def spread(self) -> list[Moment]:
        """Times of 2,000 letters at most, as they are in the buckets; the last may not be over."""
        total = sum(self.buckets.values())
        share = min(1.0, _SAMPLE / total) if total else 0.0
        found, left = list[Moment](), 0.5
        for place, count in sorted(self.buckets.items()):
            left += count * share
            some = int(left)
            left -= some
            start, end = place * self.width, (place + 1) * self.width
            first = self.first_at if self.first_at and start <= self.first_at < end else start
            last = self.last_at if self.last_at and start <= self.last_at < end else end
            dice = Random(place)  # noqa: S311 - the same each time, and of no period of its own
            found += [Moment(first + (last - first) * dice.random()) for _ in range(some)]
        return found


def width_for(seconds: float) -> int:
    """The smallest width in seconds that divides a span of time into at most 500 buckets."""
    return next((one for one in _WIDTHS if seconds <= one * _MOST_BUCKETS), _WIDTHS[-1])


class Onset(NamedTuple):
    """When a cause began: between two times, and the letters that it had before."""

    at: float  # the first letter, or the first of many
    uncertainty: float  # seconds before and after it, at 95 %
    before: int = 0


TrendKind = Literal["growing", "shrinking", "steady", "over", "returned"]


class Trend(NamedTuple):
    """How a cause goes on; ``since``: over, or back, since then; ``gone``: it paused since then."""

    kind: TrendKind
    since: float | None = None
    gone: float | None = None


class Rate(NamedTuple):
    """Letters in so many seconds: lately, or while the cause was there."""

    letters: float
    seconds: float


class Release(NamedTuple):
    """A release that began or mended a cause.

    ``chance`` is the probability that it only coincides. ``without`` are releases that had none of
    the cause, and the messages of the task that died of other causes, or succeeded, on each.
    """

    name: str
    at: float
    chance: float
    without: tuple[tuple[str, int], ...] = ()


class Pattern(NamedTuple):
    """Hours of the day, days of the week or a period in which a cause comes.

    ``start`` and ``end`` are seconds since the period's begin, which is aligned to 1970, of
    weeks to a Monday. ``share`` of the letters came then, which is ``expected`` of the time, or of
    other messages if more. Of ``bursts``, the start and end are those of the last, since 1970.
    """

    kind: Literal["hours", "weekdays", "period", "bursts"]
    period: float
    start: float
    end: float
    share: float
    expected: float
    bursts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTiming:
    """What is known of the time of a cause; `None` and nothing where chance would do as well."""

    letters: int  # with a time
    span: tuple[float, float] | None = None  # of what was compared
    onset: Onset | None = None
    trend: Trend | None = None
    rate: Rate | None = None
    began_with: Release | None = None
    mended_by: Release | None = None
    pattern: Pattern | None = None

    @property
    def clauses(self) -> tuple[str, ...]:
        """What is known, in parts of a sentence, the most telling first."""
        return tuple(_clauses(self))

    def to_json(self) -> dict[str, Any]:
        """Values that JSON has; `from_json` reads them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> CauseTiming:
        """The timing that `to_json` wrote."""
        kinds: dict[str, Any] = {"onset": Onset, "trend": Trend, "rate": Rate, "pattern": Pattern}
        kinds |= {"began_with": _release, "mended_by": _release, "span": _whole_span}
        return cls(
            **{
                name: kinds[name](*value) if name in kinds else value
                for name, value in found.items()
            }
        )


def _whole_span(first: float, last: float) -> tuple[float, float]:
    return first, last


def _release(name: str, at: float, chance: float, without: Sequence[Sequence[Any]] = ()) -> Release:
    return Release(name, at, chance, tuple((str(one), int(number)) for one, number in without))


def timings(
    courses: Mapping[str, Course],
    moments: Mapping[str | None, Sequence[Moment]],
    wanted: Collection[str],
    *,
    starts_at: float | None = None,
    ends_at: float | None = None,
    alpha: float = ALPHA,
) -> dict[str, CauseTiming]:
    """What is known of the time of causes that are compared with each other.

    Args:
        courses: All letters of each cause, by fingerprint; of other tasks they say when releases
            began.
        moments: A sample of the letters of each cause of the task, all where there are few; of
            ``None`` a sample of the task's successes. Without any, the courses are all there is.
        wanted: The fingerprints of the causes to explain.
        starts_at: When the data begin; by default with the first message.
        ends_at: When they end: now, of letters that still come; by default with the last message.
        alpha: The tolerated probability of a false statement on a cause.
    """
    unit = _Unit(courses, moments, wanted, starts_at, ends_at)
    return {name: _timing_of(unit, name, alpha / _KINDS) for name in wanted}


class _Unit:
    """Causes of a task, and the messages of each in order of time."""

    def __init__(
        self,
        courses: Mapping[str, Course],
        moments: Mapping[str | None, Sequence[Moment]],
        wanted: Collection[str],
        starts_at: float | None,
        ends_at: float | None,
    ) -> None:
        self.courses = courses
        known: dict[str | None, Sequence[Moment]] = dict(moments)
        names = wanted if moments else courses.keys()
        self.rough = {name for name in names if not known.get(name)}
        known |= {name: courses[name].spread() for name in self.rough}
        first, last = _known_span([one.at for all_ in known.values() for one in all_], ends_at)
        self.starts = first if starts_at is None else starts_at
        self.ends = last if ends_at is None else ends_at
        self.moments = {
            name: sorted((one for one in all_ if first <= one.at <= last), key=lambda one: one.at)
            for name, all_ in known.items()
        }
        self.times = {name: [one.at for one in all_] for name, all_ in self.moments.items()}
        largest = sorted(self.times, key=lambda name: (name is not None, -len(self.times[name])))
        self._largest = largest[: _MOST_OTHERS + 2]
        self._traffic = {
            name: self.times[name][:: len(self.times[name]) // _ENOUGH_OF_EACH + 1]
            for name in self._largest
        }
        self._learn_releases(first, last)

    def _learn_releases(self, first: float, last: float) -> None:
        """When each release began, also with letters of other tasks; those that began in time."""
        seen = {one.release for all_ in self.moments.values() for one in all_ if one.release}
        begins = [(one.release, one.at) for all_ in self.moments.values() for one in all_]
        for course in self.courses.values():
            begins += [(release, at) for release, (_count, at, _last) in course.releases.items()]
        self.first_of: dict[str, float] = {}
        for release, at in begins:
            if release is not None and first <= at <= last:
                self.first_of[release] = min(at, self.first_of.get(release, at))
        known_since = self.starts + (self.ends - self.starts) / 100
        self.begun = [name for name in sorted(seen) if self.first_of[name] > known_since]

    def other_times(self, name: str) -> list[list[float]]:
        """The times of the traffic: successes if they were kept all the time, else other causes."""
        good = self.times.get(None, [])
        if len(good) >= _MANY_SUCCESSES and good[0] < self.starts + (self.ends - self.starts) / 20:
            return [good]
        names = [other for other in self._largest if other not in {name, None}]
        return [self._traffic[other] for other in names[:_MOST_OTHERS] if self._traffic[other]]

    def messages(self, name: str) -> list[list[Moment]]:
        """The messages of the largest other causes, and successes."""
        return [self.moments[other] for other in self._largest if other != name]


def _known_span(times: list[float], ends_at: float | None) -> tuple[float, float]:
    """When messages come; those with a wrong clock are left out."""
    latest = float("inf") if ends_at is None else ends_at + _FUTURE
    found = sorted(at for at in times if _OLDEST <= at <= latest)
    if not found:
        return 0.0, 0.0
    last = len(found) - 1
    for place in range(last, last - len(found) // 200 - 1, -1):
        if place and found[place] - found[place - 1] > max(
            _GAP, 10 * (found[place - 1] - found[0])
        ):
            last = place - 1
    return found[0], found[last]


def _timing_of(unit: _Unit, name: str, alpha: float) -> CauseTiming:
    course, times = unit.courses[name], unit.times[name]
    letters = course.between(unit.starts - course.width, unit.ends + course.width)
    brief = unit.ends - unit.starts < _BRIEF
    if brief or len(times) < 3 or times[0] == times[-1]:  # noqa: PLR2004 - no rate
        return CauseTiming(letters=letters, span=(unit.starts, unit.ends))
    others = unit.other_times(name)
    begin, end, paused = _changes(times, others, unit.starts, unit.ends, alpha)
    if end and unit.ends + end.at < _BRIEF:
        end = None
    start = unit.starts if begin is None else begin.at
    stop = unit.ends if end is None else -end.at
    active = [at for at in times if start <= at <= stop]
    others = _times_within(others, start, stop)
    pattern = None if paused else _pattern(active, others, start, stop, alpha)
    if pattern and begin and begin.at - unit.starts < 2 * pattern.period:
        begin, start = None, unit.starts
    if pattern and end and unit.ends + end.at < 2 * pattern.period:
        end, stop = None, unit.ends
    rare = pattern is not None and not 0 < pattern.period < (stop - start) / _MANY_PERIODS
    trend = paused or (None if rare else _trend_of(active, others, start, stop))
    if pattern and trend and trend.kind == "steady":
        trend = None
    if pattern and trend and pattern.kind == "bursts" and not pattern.bursts:
        pattern = None  # a rate that grows is uneven as well
    if end is not None:
        trend = Trend("over", _exact_time(course.last_at, -end.at, end.uncertainty, course.width))
    onset = None
    if begin is not None:
        at = _exact_time(course.first_at, begin.at, begin.uncertainty, course.width)
        is_first = at <= times[0]
        before = 0 if is_first else course.between(unit.starts - course.width, at)
        known = at == course.first_at or name not in unit.rough
        onset = Onset(at, max(begin.uncertainty, 0 if known else course.width / 2), before)
    return CauseTiming(
        letters=letters,
        span=(unit.starts, unit.ends),
        onset=onset,
        trend=trend,
        rate=_rate_of(active, start, stop, trend, letters / len(times)),
        began_with=None if onset is None else _began_with(unit, name, onset),
        mended_by=None if end is None else _mended_by(unit, name),
        pattern=pattern,
    )


def _reversed(times: Sequence[float]) -> list[float]:
    return [-at for at in reversed(times)]


def _exact_time(exact: float | None, sampled: float, uncertainty: float, width: int) -> float:
    """The time of the first of all letters, if that of a sample is near it."""
    near = exact is not None and abs(exact - sampled) <= max(uncertainty, width)
    return exact if near and exact is not None else sampled


def _times_within(others: Sequence[Sequence[float]], start: float, end: float) -> list[list[float]]:
    """What others have in an interval; those with little count as one if there is nothing else."""
    found = [[at for at in other if start <= at <= end] for other in others]
    large = [other for other in found if len(other) >= tests.LEAST_OTHERS]
    small = [at for other in found for at in other]
    return large or ([sorted(small)] if small else [])


def _changes(
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    starts: float,
    ends: float,
    alpha: float,
) -> tuple[tests.Step | None, tests.Step | None, Trend | None]:
    """When a cause began and ended, in reversed time, and whether it returned after a pause."""
    burst = _telling_bursts(times, others, starts, ends, alpha)
    whole, times = times, [first for first, _last in burst.spans] if burst else times
    directions = (
        (times, others, starts, ends),
        (_reversed(times), [_reversed(other) for other in others], -ends, -starts),
    )
    begin, end = (
        _telling_step(tests.first_step(own, start), own, theirs, stop, alpha)
        for own, theirs, start, stop in directions
    )
    start, stop = begin.at if begin else starts, -end.at if end else ends
    if burst:
        return begin, end and end._replace(at=-whole[-1]), None
    paused = _telling_pause(times, _times_within(others, start, stop), start, stop, alpha)
    if paused is None:
        rise, fall = (
            _own_step(
                tests.telling_rise(own, start, stop, least), own, theirs, (start, stop), alpha
            )
            for (own, theirs, start, stop), least in zip(directions, (_JUMP, _FALL), strict=True)
        )
        begin, end = begin or rise, end or fall
        if begin and end and begin.at >= -end.at:
            return None, None, None
    return begin, end, paused


def _telling_step(
    found: tests.Step | None,
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    end: float,
    alpha: float,
) -> tests.Step | None:
    """A step that neither chance nor the traffic makes."""
    if found is None or found.chance > alpha:
        return None
    others = [other for other in others if len(other) >= tests.LEAST_OTHERS]
    usually = tests.usual_share(others, lambda all_: tests.share_between(all_, found.at, end + 1))
    inside = tests.share_between(times, found.at, end + 1)
    messages = len(times) / tests.dispersion(times, found.at, times[-1])
    return found if tests.share_probability(inside, usually, messages) <= alpha else None


def _own_step(
    found: tests.Step | None,
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    span: tuple[float, float],
    alpha: float,
) -> tests.Step | None:
    """A step that the traffic of the same hours does not make: a Monday has more than a Sunday."""
    found = _telling_step(found, times, others, span[1], alpha)
    if found is None:
        return None
    at = found.at
    length = max(tests.certain_span(times, at, *span), _HOURS, 2 * found.uncertainty)
    length = min(length, at - span[0], span[1] - at)
    theirs = _times_within(others, at - length, at + length)
    if sum(map(len, theirs)) < tests.LEAST_OTHERS:
        return found

    def after(all_: Sequence[float]) -> float:
        return tests.share_between(all_, at, at + length)

    near = [one for one in times if at - length <= one <= at + length]
    usually = tests.usual_share(theirs, after, 0.5)
    return (
        found
        if tests.share_probability(after(near), usually, len(near)) <= _MADE_BY_TRAFFIC
        else None
    )


def _pattern(
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    start: float,
    end: float,
    alpha: float,
) -> Pattern | None:
    """The hours in which a cause comes, or its bursts."""
    found = tests.hours_of(
        times, start, end, lambda hours: tests.usual_share(others, hours.share, 0.5)
    )
    if found is not None and found[-1] <= alpha:
        hours, share, expected, _chance = found
        kind: Any = {tests.DAY: "hours", tests.WEEK: "weekdays"}.get(hours.period, "period")
        return Pattern(kind, hours.period, hours.start, hours.end, share, expected)
    bursts = _telling_bursts(times, others, start, end, alpha)
    if bursts is None:
        return _uneven_pattern(times, others, start, end)
    first, last = bursts.spans[-1]
    taken = sum(one[1] - one[0] for one in bursts.spans) / (end - start)
    return Pattern("bursts", 0, first, last, 1.0, taken, len(bursts.spans))


def _uneven_pattern(
    times: Sequence[float], others: Sequence[Sequence[float]], start: float, end: float
) -> Pattern | None:
    """Bursts of few letters each, which are not told from each other."""
    own, error = tests.unevenness(times, start, end)
    errors = [tests.unevenness(other, start, end) for other in others]
    usually = max(
        _LEAST_UNEVEN, 2 * tests.usual_most([(one, 2 * its) for one, its in errors], 0.0, 0.5)
    )
    if len(times) < _LEAST_UNEVEN_LETTERS or own - 4 * error < usually:
        return None
    return Pattern("bursts", tests.HOUR, 0, 0, 1.0, 1 / (1 + own))


def _telling_bursts(
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    start: float,
    end: float,
    alpha: float,
) -> tests.Bursts | None:
    """The bursts of a cause between which others come."""
    found = tests.telling_bursts(times, start, end)
    if found is None or found.chance > alpha:
        return None
    # A pause of a task that runs at night is no gap between bursts.
    pairs = pairwise(found.spans)
    gone, back = max(((a[1], b[0]) for a, b in pairs), key=lambda gap: gap[1] - gap[0])
    near = _times_within(others, found.spans[0][0], found.spans[-1][1])
    meanwhile = _times_within(
        [[at for at in one if not gone < at < back] for one in near], start, end
    )
    return found if tests.usual_share(meanwhile, found.share, 0.5) <= _MOST_IN_BURSTS else None


def _trend_of(
    times: Sequence[float], others: Sequence[Sequence[float]], start: float, end: float
) -> Trend | None:
    """How a cause goes on while it is there."""
    if len(times) < _LEAST_TREND or end <= start:
        return None
    leans = [tests.lean_of(other, start, end) for other in others]
    late = max(0.5, tests.usual_most(leans, 0.5))
    early = min(0.5, -tests.usual_most([(-mean, error) for mean, error in leans], -0.5))
    mean, error = tests.lean_of(times, start, end)
    if mean - late > max(_LEAST_LEAN, _ERRORS * error):
        return Trend("growing")
    if early - mean > max(_LEAST_LEAN, _ERRORS * error):
        return Trend("shrinking")
    # Where the traffic is far from even, a cause that follows it has no rate.
    steady = abs(mean - 0.5) < 2 * _LEAST_LEAN
    steady &= mean - late < _NEAR_ERRORS * error and early - mean < _NEAR_ERRORS * error
    return Trend("steady") if steady and len(times) >= _LEAST_STEADY else None


def _telling_pause(
    times: Sequence[float],
    others: Sequence[Sequence[float]],
    start: float,
    end: float,
    alpha: float,
) -> Trend | None:
    """A pause of a cause in which others came."""
    found = tests.longest_pause(times)
    if found is None:
        return None
    gone, back, chance = found
    part = (back - gone) / (end - start)
    before = sum(at <= gone for at in times)
    came = [tests.share_between(other, gone, back) for other in others]
    if came:
        least = -tests.usual_most([(-share, (share / 20) ** 0.5) for share in came], 0.0, 0.75)
        chance = min(chance, tests.missing(times, gone, back, max(0.0, least)))
    if min(before, len(times) - before) < _LEAST_RETURNED or part < _LEAST_PAUSE or chance > alpha:
        return None
    if came and max(came) < part / 3:
        return None
    return Trend("returned", back, gone)


def _rate_of(
    times: Sequence[float], start: float, end: float, trend: Trend | None, scale: float
) -> Rate | None:
    """Letters of late where the rate changes, else of all the time."""
    number = len(times)
    if trend is not None and trend.kind in {"growing", "shrinking"}:
        number = min(number, max(_MANY, number // 10))
        start = times[-number]
    elif trend is not None and trend.kind == "returned" and trend.since is not None:
        start = trend.since
        number = sum(at >= start for at in times)
    return Rate(round(number * scale), end - start) if end > start else None


def _began_with(unit: _Unit, name: str, onset: Onset) -> Release | None:
    """The release with whose first messages a cause began, if all of it is on it or later ones."""
    first_of = unit.first_of
    after = [one for one in unit.moments[name] if one.release and one.at >= onset.at]
    known = [one for one in unit.begun if first_of[one] <= onset.at + 1]
    if not after or not known:
        return None
    release = max(known, key=lambda one: first_of[one])
    begin = first_of[release]

    def confined(all_: Iterable[Moment]) -> list[tests.Confined]:
        return [tests.Confined(at, first_of[on] >= begin) for at, on in all_ if on]

    return _release_of(unit, name, release, confined(after), confined, backwards=False)


def _mended_by(unit: _Unit, name: str) -> Release | None:
    """The release with whose begin a cause ended, if none of it is on it or later ones."""
    first_of = unit.first_of
    own = [one for one in unit.moments[name] if one.release]
    newest = max((first_of[one.release] for one in own if one.release), default=unit.ends)
    later = [one for one in unit.begun if first_of[one] > newest]
    if not later:
        return None
    release = min(later, key=lambda one: first_of[one])
    begin = first_of[release]

    def confined(all_: Iterable[Moment]) -> list[tests.Confined]:
        return sorted(tests.Confined(-at, first_of[on] < begin) for at, on in all_ if on)

    return _release_of(unit, name, release, confined(own), confined, backwards=True)


def _release_of(
    unit: _Unit,
    name: str,
    release: str,
    cause: Sequence[tests.Confined],
    confined: Callable[[Iterable[Moment]], list[tests.Confined]],
    *,
    backwards: bool,
) -> Release | None:
    others = [confined(all_) for all_ in unit.messages(name)]
    others = [one for one in others if one]
    if sum(one.inside for one in cause) < 0.98 * len(cause) or not others:
        return None
    inside = [one.at for all_ in (cause, *others) for one in all_ if one.inside]
    chance = tests.confined(cause, others, min(inside), len(unit.begun))
    if chance > _COINCIDES:
        return None
    begin = unit.first_of[release]
    without = Counter[str]()
    for other, course in unit.courses.items():
        if other != name:
            without.update({one: count for one, (count, _, _) in course.releases.items()})
    without.update(one.release for one in unit.moments.get(None, ()) if one.release)
    free = [
        (one, count)
        for one, count in without.most_common()
        if (unit.first_of.get(one, begin) < begin) is not backwards
        and one not in unit.courses[name].releases
    ]
    return Release(release, begin, chance, tuple(free[:_MOST_NAMED]))


def _clauses(timing: CauseTiming) -> Iterator[str]:
    onset, trend, rate = timing.onset, timing.trend, timing.rate
    if onset:
        about = "about " if onset.uncertainty >= _ABOUT else ""
        yield (
            f"since {about}{moment_text(onset.at)}, give or take {span_text(onset.uncertainty)}"
            + (f" ({onset.before:,} letters before)" if onset.before else "")
        )
    if timing.began_with:
        yield from _release_clauses("began", timing.began_with)
    if trend:
        yield _trend_clause(trend, rate)
    if timing.mended_by:
        yield from _release_clauses("ended", timing.mended_by)
    if timing.pattern:
        yield pattern_text(timing.pattern)


def _release_clauses(verb: str, release: Release) -> Iterator[str]:
    when = "with" if release.chance <= ALPHA else "about when"
    yield f"{verb} {when} release {shortened(release.name, 80)}" + (
        "" if release.chance <= ALPHA else " began"
    )
    if release.without:
        name, count = release.without[0]
        yield f"{shortened(name, 80)} had none of it in {count:,} other messages of the task"


def _trend_clause(trend: Trend, rate: Rate | None) -> str:
    often = f": {rate_text(rate)}" if rate else ""
    if trend.kind == "over" and trend.since is not None:
        return f"over since {moment_text(trend.since)}"
    if trend.kind == "returned" and trend.since is not None and trend.gone is not None:
        pause = span_text(trend.since - trend.gone)
        return f"back since {moment_text(trend.since)} after a pause of {pause}{often}"
    return f"{trend.kind}{often}" + ("" if trend.kind == "steady" or not rate else " now")


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def pattern_text(pattern: Pattern) -> str:
    """When a cause comes, such as ``every day from 02:00 to 03:00 UTC``."""
    share = "" if pattern.share == 1 else f" ({min(99, int(100 * pattern.share))} % of it)"
    if pattern.kind == "bursts":
        if not pattern.bursts:
            return "in bursts of an hour or less"
        share = f"{min(99, max(1, round(100 * pattern.expected)))} % of the time"
        return f"in {pattern.bursts} bursts in {share}, the last since {moment_text(pattern.start)}"
    if pattern.kind == "weekdays":
        first, last = (int(at // 86_400) % 7 for at in (pattern.start, pattern.end - 1))
        if first == last:
            return f"on {_WEEKDAYS[first]}s (UTC){share}"
        return f"from {_WEEKDAYS[first]} to {_WEEKDAYS[last]} (UTC){share}"
    start, end = (f"{int(at) // 3600 % 24:02}:{int(at) % 3600 // 60:02}" for at in pattern[2:4])
    if pattern.kind == "hours":
        return f"every day from {start} to {end} UTC{share}"
    length = span_text((pattern.end - pattern.start) % pattern.period)
    at = f", as from {start} to {end} UTC" if tests.DAY % pattern.period == 0 else ""
    return f"every {span_text(pattern.period)} for {length}{at}{share}"


def moment_text(at: float) -> str:
    """A time to the minute, in UTC."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M} UTC"


def span_text(seconds: float) -> str:
    """A span of time in one unit, such as ``10 minutes``."""
    units = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
    name, size = next((one for one in units if seconds >= 2 * one[1]), units[-1])
    number = max(1, round(seconds / size))
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def pace_text(per_minute: float) -> str:
    """How fast letters come now: ``15 a minute``, or ``quiet``."""
    return rate_text(Rate(per_minute, 60)) if per_minute else "quiet"


def rate_text(rate: Rate) -> str:
    """Letters a minute, hour or day, in the smallest of these with one or more."""
    for name, size in (("second", 1), ("minute", 60), ("hour", 3600), ("day", 86_400)):
        number = rate.letters / rate.seconds * size
        if number >= (_MANY if name == "second" else 2):
            return f"{number:,.0f} {'an' if name == 'hour' else 'a'} {name}"
    return f"{rate.letters:,} in {span_text(rate.seconds)}"
