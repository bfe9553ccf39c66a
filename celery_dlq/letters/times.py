"""Tests on times: what of the times of messages is beyond chance.

Times are seconds, sorted. The probability that chance makes a share as large is bounded by
Chernoff's inequality, with the number of messages divided by their dispersion: messages that come
together count as one. Nothing is compared with the clock alone: where other causes of the task have
the same hours or the same growth, it is the traffic's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, log, sqrt
from random import Random
from typing import NamedTuple

HOUR, DAY, WEEK = 3600, 86_400, 7 * 86_400
MONDAY = 4 * DAY
"""The first Monday since 1970."""

LEAST_OTHERS = 20
"""Another cause with fewer letters says nothing about the traffic."""

_LOCAL = 10  # letters next to a change, which must show it as well: a ramp has no step
_BLOCKS = (60, 20, 8)
_PERIODS = (
    *(300, 600, 900, 1200, 1800, HOUR),
    *(hours * HOUR for hours in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12)),
    *(DAY, 2 * DAY, WEEK),
)
_BINS = 24
_LEAST_SHARE = 0.8  # of the letters, in the hours that are said
_MOST_OF_PERIOD = 0.5
_STRATA = 50
_LONG_GAP = 5  # of the mean gap
_MOST_OF_ONE = 0.6  # of the letters, in one of several bursts
_FEWEST_HOURS, _FEWEST_DAYS = 48, 7
_FEWEST_PAIRS = 3  # of messages of one hour, expected of even times
_MANY = 3  # bursts, and letters of each of them
_STRAY = 0.01  # of the letters of a cause of a release, on others: late starts


def share_probability(share: float, expected: float, messages: float) -> float:
    """The probability, at most, that chance makes a share of messages as large."""
    if share <= expected:
        return 1.0
    if expected <= 0:
        return 0.0
    distance = share * log(share / expected)
    if share < 1:
        distance += (1 - share) * log((1 - share) / (1 - expected))
    return exp(-messages * distance)


def odds_of(share: float) -> float:
    """The odds of a share; neither 0 nor infinite."""
    return (share + 1e-9) / (1 - share + 1e-9)


def share_between(times: Sequence[float], start: float, end: float) -> float:
    """The share of times in an interval."""
    return (bisect_left(times, end) - bisect_left(times, start)) / (len(times) or 1)


def usual_most(values: Sequence[tuple[float, float]], alone: float, least: float = 0.25) -> float:
    """What all but a quarter of others reach, so that one neighbour alone decides nothing.

    The values of others are given with their standard errors, which are added: the least of some
    is less than what they have in common.
    """
    reached = sorted(value + error for value, error in values)
    return reached[int((len(reached) - 1) * least)] if reached else alone


def usual_share(
    others: Sequence[Sequence[float]],
    share: Callable[[Sequence[float]], float],
    least: float = 0.25,
) -> float:
    """The usual share of others' times."""
    shares = [(share(other), len(other)) for other in others]
    found = [(one, sqrt((one * (1 - one) + 1 / of) / of)) for one, of in shares]
    return min(1.0, usual_most(found, 0.0, least))


def two_halves(times: Sequence[float]) -> tuple[list[float], list[float]]:
    """Two halves of times, independent of each other and the same on each run."""
    both: tuple[list[float], list[float]] = ([], [])
    bits = Random(len(times)).getrandbits(len(times) + 1)  # noqa: S311 - no secret
    for at, bit in zip(times, f"{bits:0{len(times) + 1}b}", strict=False):
        both[bit == "1"].append(at)
    return both


def dispersion(
    times: Sequence[float], start: float, end: float, sizes: Sequence[int] = _BLOCKS
) -> float:
    """How many messages come together, at least 1: the variance of counts divided by their mean.

    Differences of the differences of neighbouring counts show it, which a trend does not change.
    """
    found = 1.0
    times = times[bisect_left(times, start) : bisect_left(times, end)]
    for blocks in sizes:
        number = min(blocks, len(times) // 2)
        if number < _BLOCKS[-1] // 2 or end <= start:
            continue

        def block(at: float, number: int = number) -> int:
            return int((at - start) / (end - start) * number)

        begins = [bisect_left(times, place, key=block) for place in range(number)]
        counts = [later - begin for begin, later in pairwise([*begins, len(times)])]
        squares = sum(
            (after - 2 * count + before) ** 2
            for before, count, after in zip(counts, counts[1:], counts[2:], strict=False)
        )
        ratio = squares / (6 * (number - 2) * len(times) / number)
        found = max(found, ratio / (1 + 2.5 * sqrt(1.5 / number)))
    return found


def gap_chance(gap: float, after: Sequence[float]) -> float:
    """The probability of no message in ``gap`` seconds, of the times since its end.

    It must be small by the nearest messages as well as by all of them. Times that grow more
    frequent may have begun to do so with the gap.
    """
    count = len(after) - 1
    if count < 2 or after[-1] <= after[0]:  # noqa: PLR2004 - no rate
        return 1.0
    mean, error = lean_of(after, after[0], after[-1])
    power = 2 if mean > 0.5 + 1.5 * error else 1
    found = 0.0
    for number in {min(_LOCAL, count), min(4 * _LOCAL, count), count}:
        weight = float(number)
        if number == count:
            weight /= dispersion(after, after[0], after[-1])
        length = after[number] - after[0] + 1e-6
        found = max(found, (1 - (gap / (gap + length)) ** power) ** weight)
    return found


class Step(NamedTuple):
    """A change of the rate at a time, and the seconds around it at 95 %."""

    at: float
    uncertainty: float
    chance: float


def first_step(times: Sequence[float], start: float) -> Step:
    """The begin of times that are not there from ``start`` on."""
    number = min(_LOCAL, len(times) - 1)
    wait = (20 ** (1 / max(number, 1)) - 1) * (times[number] - times[0])
    return Step(times[0], wait, gap_chance(times[0] - start, times))


def telling_rise(times: Sequence[float], start: float, end: float, least: float) -> Step | None:
    """A step up, ``least`` times or more, of messages that are there before: found on one half."""
    chosen, tested = two_halves(times)
    if len(tested) < _LOCAL or len(chosen) < _LOCAL or end <= start:
        return None
    place, gain = _best_step(chosen, start, end)
    if not gain or gain < _growth_gain(chosen, start, end) + 3:
        return None
    at = chosen[place] if place else times[0]
    part = (end - at) / (end - start)
    after = share_between(tested, at, end + 1)
    if odds_of(after) < least * odds_of(part):
        return None
    found = share_probability(after, part, len(tested) / dispersion(tested, start, end))
    near = _jump_probability(tested, at, start, end)
    if near is None:
        return None
    around = _step_uncertainty(times, start, end) if place else first_step(times, start).uncertainty
    return Step(at, around, max(found, near / 8))


def certain_span(times: Sequence[float], at: float, start: float, end: float) -> float:
    """The seconds on each side of a time in which a change of the rate at it must show."""
    place = bisect_left(times, at)
    number = max(_LOCAL, min(3 * _LOCAL, (len(times) - place) // 2))
    last = min(place + number, len(times) - 1)
    return min(times[last] - at, end - at, at - start)


def _jump_probability(times: Sequence[float], at: float, start: float, end: float) -> float | None:
    """The probability of as many messages right after a time as right before it."""
    place, length = bisect_left(times, at), certain_span(times, at, start, end)
    before = place - bisect_left(times, at - length)
    after = bisect_left(times, at + length) - place
    if length <= 0 or not after:
        return None
    return share_probability(after / (before + after), 0.5, before + after)


def _likelihood_gain(inside: int, outside: int, part: float) -> float:
    """The logarithm of how much likelier counts are with a rate of each part than with one."""
    total, found = inside + outside, 0.0
    if inside:
        found += inside * log(inside / total / part)
    if outside:
        found += outside * log(outside / total / (1 - part))
    return found


def _best_step(times: Sequence[float], start: float, end: float) -> tuple[int, float]:
    best, gain = 0, 0.0
    for place in range(len(times) - 4):
        part = (end - times[place]) / (end - start)
        if not 0 < part < 1 or (len(times) - place) / len(times) <= part:
            continue
        found = _likelihood_gain(len(times) - place, place, part)
        if found > gain:
            best, gain = place, found
    return best, gain


def _step_uncertainty(times: Sequence[float], start: float, end: float) -> float:
    """How far from the best step one is that is nearly as likely."""
    best, gain = _best_step(times, start, end)
    far, at = 0.0, times[best]
    for place in range(max(1, best - 60), min(len(times) - 1, best + 60)):
        part = (end - times[place]) / (end - start)
        if 0 < part < 1 and _likelihood_gain(len(times) - place, place, part) > gain - 2:
            far = max(far, abs(times[place] - at), abs(times[place - 1] - at))
    return far


def _growth_gain(times: Sequence[float], start: float, end: float) -> float:
    """As `_likelihood_gain`, of the likeliest of some steady growths: straight and exponential."""
    places = [(at - start) / (end - start) for at in times]
    straight = sum(log(2 * max(place, 1e-4)) for place in places)
    return max(
        straight,
        *(
            sum(rate * place for place in places) - len(places) * log((exp(rate) - 1) / rate)
            for rate in (1, 2, 3, 4, 6, 8, 12)
        ),
    )


def longest_pause(times: Sequence[float]) -> tuple[float, float, float] | None:
    """The longest time without messages, its begin, end and probability; `None`: one of several."""
    gaps = sorted(
        ((later - at, place) for place, (at, later) in enumerate(pairwise(times))), reverse=True
    )[:2]
    if len(gaps) < 2 or gaps[0][0] < 3 * gaps[1][0]:  # noqa: PLR2004
        return None
    gap, place = gaps[0]
    before = [-at for at in reversed(times[: place + 1])]
    found = max(gap_chance(gap, times[place + 1 :]), gap_chance(gap, before))
    return times[place], times[place + 1], found * len(times)


def missing(times: Sequence[float], gone: float, back: float, share: float) -> float:
    """The probability of none between two times, where a share of the traffic is, by whole days."""
    sides = ((times[0], gone), (back, times[-1]))
    days = [(start, end, int((end - start) / DAY)) for start, end in sides]
    if sum(number for _start, _end, number in days) < _FEWEST_DAYS:
        return 1.0
    together = max(dispersion(times, start, end, (number,)) for start, end, number in days)
    messages = len(times) / together
    return messages * float((1 - share) ** messages)


class Lean(NamedTuple):
    """The mean of times, where an interval is 0 to 1, and its standard error."""

    mean: float
    error: float


def lean_of(times: Sequence[float], start: float, end: float) -> Lean:
    """Whether times grow more frequent: their mean is then above a half."""
    mean = (sum(times) / len(times) - start) / (end - start)
    days = int((end - start) / DAY)
    sizes = _BLOCKS if days < _BLOCKS[-1] // 2 else (min(days, _BLOCKS[0]),)  # of equal hours
    return Lean(mean, sqrt(dispersion(times, start, end, sizes) / 12 / len(times)))


class Hours(NamedTuple):
    """A part of a period in which messages come, in seconds since the period's begin."""

    period: int
    start: float
    end: float

    @property
    def length(self) -> float:
        """The length of the interval in seconds."""
        return (self.end - self.start) % self.period or self.period

    def contains(self, at: float) -> bool:
        """True if a time is in it."""
        return (at - period_origin(self.period) - self.start) % self.period < self.length

    def share(self, times: Sequence[float]) -> float:
        """The share of times that are in it."""
        return sum(map(self.contains, times)) / (len(times) or 1)


def period_origin(period: float) -> float:
    """When periods begin: weeks on Mondays, others with 1970."""
    return MONDAY if period == WEEK else 0


def hours_of(
    times: Sequence[float], start: float, end: float, expected: Callable[[Hours], float]
) -> tuple[Hours, float, float, float] | None:
    """The hours of a period that most messages come in; their share, what is expected, chance.

    They are chosen on one half and tested on the other; the periods in which messages come count,
    whatever the messages of each. ``expected`` is the share of the traffic.
    """
    chosen, tested = two_halves(times)
    if len(tested) < 3 or len(chosen) < 3:  # noqa: PLR2004
        return None
    best, gain = None, 0.0
    for period in _PERIODS:
        if (end - start) < period * (3 if period in {DAY, WEEK} else 6):
            break
        found, value = _best_hours(chosen, period)
        if value > gain and _is_regular(times, found):
            best, gain = found, value
    if best is None:
        return None
    share, part = best.share(tested), best.length / best.period
    if share < _LEAST_SHARE or part > _MOST_OF_PERIOD:
        return None
    against = max(part, expected(best))
    if odds_of(share) < 3 * odds_of(against):
        return None
    chance = share_probability(share, against, len(tested))
    return best, best.share(times), against, max(chance, _chance_of_periods(times, best))


def _is_regular(times: Sequence[float], hours: Hours) -> bool:
    """True if most periods have one: four bursts in three days are not "every hour"."""
    seen = {(at - hours.start) // hours.period for at in times}
    # A few nights are enough for "from 2 to 4".
    return hours.period in {DAY, WEEK} or 3 * len(seen) > 2 * (max(seen) - min(seen))


def _chance_of_periods(times: Sequence[float], hours: Hours) -> float:
    """The probability if all messages of a period had one reason."""
    first = period_origin(hours.period) + hours.start
    inside: Counter[int] = Counter()
    outside: Counter[int] = Counter()
    for at in times:
        (inside if hours.contains(at) else outside)[int((at - first) // hours.period)] += 1
    periods = inside.keys() | outside.keys()
    good = sum(inside[one] > outside[one] for one in periods)
    choices = {DAY: 24, WEEK: 7}.get(hours.period, 500)
    found = share_probability(good / len(periods), hours.length / hours.period, len(periods))
    return found * choices / 30  # as the other tests, 1 in 1,000, where this allows 3 in 100


def _best_hours(times: Sequence[float], period: int) -> tuple[Hours, float]:
    bins = 7 if period == WEEK else _BINS
    size, first = period / bins, period_origin(period)
    counts = Counter(int((at - first) % period // size) for at in times)
    best, gain = (0, bins), 0.0
    for start in range(bins):
        inside = 0
        for length in range(1, bins // 2 + 1):
            inside += counts[(start + length - 1) % bins]
            if inside * bins <= length * len(times):
                continue
            found = _likelihood_gain(inside, len(times) - inside, length / bins)
            if found > gain:
                best, gain = (start, length), found
    start, length = best
    return Hours(period, start * size, (start + length) * size % period), gain


class Bursts(NamedTuple):
    """Intervals in which all messages come, and the probability of so much time without any."""

    spans: list[tuple[float, float]]
    chance: float

    def share(self, times: Sequence[float]) -> float:
        """The share of times that are in them."""
        return sum(share_between(times, first, last) for first, last in self.spans)


def telling_bursts(times: Sequence[float], start: float, end: float) -> Bursts | None:
    """The intervals in which all messages come, if they take half of the time or less.

    Of times that come evenly, one in 25 is in a gap of five mean gaps or more.
    """
    longest = _LONG_GAP * (end - start) / max(len(times), 1)
    spans: list[list[float]] = []
    for at in times:
        if spans and at - spans[-1][-1] <= longest:
            spans[-1].append(at)
        else:
            spans.append([at])
    taken = sum(one[-1] - one[0] for one in spans) / max(end - start, 1e-6)
    half = (start + end) / 2
    early = sum(max(0.0, min(one[-1], half) - min(one[0], half)) for one in spans)
    free = 1 - 2 * early / max(end - start, 1e-6)  # of the first half; late gaps are a decline's
    sizes = sorted(len(one) for one in spans)
    few = len(sizes) < _MANY or sizes[-_MANY] < _MANY
    if few or sizes[-1] > _MOST_OF_ONE * len(times) or taken > _MOST_OF_PERIOD:
        return None
    if not 0.2 < free / 2 / (1 - taken) < 0.8:  # noqa: PLR2004
        return None
    even = (1 + _LONG_GAP) * exp(-_LONG_GAP)
    found = [(one[0], one[-1]) for one in spans]
    return Bursts(found, share_probability(1 - taken, even, len(times) / _LONG_GAP))


def unevenness(times: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """The variance of the rate an hour by its square, and the standard error; evenly it is 0."""
    hours = int((end - start) // HOUR)
    counts = Counter(int((at - start) // HOUR) for at in times)
    counts.pop(hours, None)  # not a whole one
    mean = sum(counts.values()) / max(hours, 1)
    if hours < _FEWEST_HOURS or len(times) ** 2 < _FEWEST_PAIRS * 2 * hours:
        return 0.0, float("inf")
    squares = sum((count - mean) ** 2 for count in counts.values())
    variance = (squares + (hours - len(counts)) * mean**2) / (hours - 1)
    return (variance / mean - 1) / mean, sqrt(2 / hours) / mean


class Confined(NamedTuple):
    """A message, and whether it is on the releases that a cause is confined to."""

    at: float
    inside: bool


def confined(
    cause: Sequence[Confined], others: Sequence[Sequence[Confined]], begin: float, begins: int
) -> float:
    """The probability that a cause began at any time rather than with releases, at even odds.

    All of it is on these releases, which began at ``begin``; ``begins`` began in all. Two things
    speak for them: it began as soon as they were in use; and all of it is on them while others
    are not.
    """
    first, last = cause[0].at, max(cause[-1].at, *(one[-1].at for one in others))
    messages = sorted(one for source in others for one in source)
    earlier = max((at for at, _inside in messages if at < begin), default=begin)
    used = [at for at, inside in messages if inside]
    before = bisect_left(used, first)
    if before == len(used) or last <= first or not begins:
        return 1.0
    together = dispersion([one.at for one in cause], first, cause[-1].at)
    letters = len(cause) / together
    missed = letters * min((first - begin) / (last - first), before / (len(used) - before))
    narrow = 1 / (1 / letters + max(0.0, begin - earlier) / (last - begin))
    likelier = log(narrow / begins) - missed - _log_chance_inside(cause, others, begin) / together
    return 1 / (1 + exp(min(likelier, 700.0)))


def _log_chance_inside(
    cause: Sequence[Confined], others: Sequence[Sequence[Confined]], begin: float
) -> float:
    """The logarithm of the chance that all of a cause is on the releases, by the others' shares."""
    size = (cause[-1].at + 1e-3 - begin) / _STRATA
    shares: dict[int, list[float]] = {}
    for source in others:
        counts, inside = Counter[int](), Counter[int]()
        for at, is_inside in source:
            place = int((at - begin) // size)
            counts[place] += 1
            inside[place] += is_inside
        for place, count in counts.items():
            shares.setdefault(place, []).append((inside[place] + 0.5) / (count + 0.5))
    found = 0.0
    for at, is_inside in cause:
        if known := shares.get(int((at - begin) // size)):
            # The median: one neighbour that is all of another release decides nothing.
            share = min(1.0, sorted(known)[len(known) // 2])
            found += log(share) if is_inside else log(max(1 - share, _STRAY) / _STRAY)
    return found
