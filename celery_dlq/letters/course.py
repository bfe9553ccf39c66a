"""When the letters of a cause came, and what of that is beyond chance.

A `Course` counts all letters of a cause: by time, and by release. `timing` says since when the
cause is there, whether it grows or is over, which release began or mended it, and at which hours
it comes. Its statements are true of the letters; a cause that comes steadily gets none but
"steady".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from math import isfinite, log
from typing import Any, Literal, NamedTuple

ALPHA = 0.01
"""The tolerated share of causes with a false statement on time, of all kinds together."""

MOST_RELEASES = 20
"""Releases of a course; those with the fewest letters are left out."""

_WIDTHS = (1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
_MOST_BUCKETS = 500
_MANY = 10


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
        width = width_for(max(times) - min(times))
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
            releases=dict(sorted(releases.items(), key=_by_letters)[:MOST_RELEASES]),
            again=again,
        )


def _by_letters(item: tuple[str, tuple[int, float, float]]) -> tuple[int, str]:
    return -item[1][0], item[0]


def width_for(seconds: float) -> int:
    """The smallest width in seconds that divides a span of time into at most 500 buckets."""
    return next((one for one in _WIDTHS if seconds <= one * _MOST_BUCKETS), _WIDTHS[-1])


class Onset(NamedTuple):
    """When a cause began: between two times, and the letters that it had before."""

    at: float  # the first letter, or the first of many
    uncertainty: float  # seconds before and after it, at 95 %
    before: int = 0


Kind = Literal["growing", "shrinking", "steady", "over", "returned"]


class Trend(NamedTuple):
    """How a cause goes on; ``since``: over, or back, since then; ``gone``: it paused since then."""

    kind: Kind
    since: float | None = None
    gone: float | None = None


class Rate(NamedTuple):
    """Letters in so many seconds: lately, or while the cause was there."""

    letters: int
    seconds: float


class Release(NamedTuple):
    """A release that began or mended a cause.

    ``without`` are releases that did not know the cause, and the messages of the task that died
    of other causes, or succeeded, on each.
    """

    name: str
    at: float
    without: tuple[tuple[str, int], ...] = ()


class Pattern(NamedTuple):
    """Hours of the day, days of the week or a period in which a cause comes.

    ``start`` and ``end`` are seconds since the period's begin, which is aligned to 1970, of
    weeks to a Monday. ``share`` of the letters came then, which is ``expected`` of the time, or of other
    messages if more.
    """

    kind: Literal["hours", "weekdays", "period", "bursts"]
    period: float
    start: float
    end: float
    share: float
    expected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
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
    def from_json(cls, found: Mapping[str, Any]) -> Timing:
        """The timing that `to_json` wrote."""
        kinds: dict[str, Any] = {"onset": Onset, "trend": Trend, "rate": Rate, "pattern": Pattern}
        kinds |= {"began_with": _release, "mended_by": _release, "span": lambda *both: both}
        return cls(
            **{
                name: kinds[name](*value) if name in kinds else value
                for name, value in found.items()
            }
        )


def _release(name: str, at: float, without: Sequence[Sequence[Any]] = ()) -> Release:
    return Release(name, at, tuple((str(one), int(number)) for one, number in without))


def timing(
    course: Course,
    others: Mapping[str, Course],
    *,
    moments: Sequence[Moment] = (),  # noqa: ARG001
    moments_of_others: Mapping[str, Sequence[Moment]] | None = None,  # noqa: ARG001
    successes: Sequence[Moment] = (),  # noqa: ARG001
    starts_at: float | None = None,
    ends_at: float | None = None,
    alpha: float = ALPHA,
) -> Timing:
    """What is known of the time of a cause.

    Args:
        course: All letters of the cause.
        others: Other causes of the task, by fingerprint.
        moments: A sample of the cause's letters, all where there are few.
        moments_of_others: A sample of each other cause.
        successes: A sample of the task's successes.
        starts_at: When the data begin; by default with the first message.
        ends_at: When they end: now, of letters that still come; by default with the last message.
        alpha: The tolerated probability of a false statement.
    """
    timed = sum(course.buckets.values())
    if not timed or course.first_at is None or course.last_at is None:
        return Timing(letters=timed)
    ends = max([course.last_at, *(one.last_at or 0 for one in others.values())])
    starts = min([course.first_at, *(one.first_at or ends for one in others.values())])
    ends, starts = ends_at or ends, starts_at or starts
    rate = Rate(timed, max(course.last_at - course.first_at, 1))
    gap = rate.seconds / timed
    before = course.first_at - starts
    late = timed * log(1 + before / rate.seconds) > -log(alpha / 10)
    over = timed * log(1 + (ends - course.last_at) / rate.seconds) > -log(alpha / 10)
    return Timing(
        letters=timed,
        span=(starts, ends),
        onset=Onset(course.first_at, 3 * gap) if late else None,
        trend=Trend("over", course.last_at) if over else Trend("steady"),
        rate=rate,
    )


def _clauses(timing: Timing) -> Iterator[str]:
    if timing.onset:
        at, uncertainty, _before = timing.onset
        yield f"since {moment_text(at)}, give or take {span_text(uncertainty)}"
    if timing.trend:
        yield timing.trend.kind
    if timing.rate and timing.letters > 1:
        yield rate_text(timing.rate)


def moment_text(at: float) -> str:
    """A time to the minute, in UTC."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M} UTC"


def span_text(seconds: float) -> str:
    """A span of time in one unit, such as ``10 minutes``."""
    units = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
    name, size = next((one for one in units if seconds >= 2 * one[1]), units[-1])
    number = max(1, round(seconds / size))
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def rate_text(rate: Rate) -> str:
    """Letters a minute, hour or day, in the smallest of these with one or more."""
    for name, size in (("second", 1), ("minute", 60), ("hour", 3600), ("day", 86_400)):
        number = rate.letters / rate.seconds * size
        if number >= 1 and (name != "second" or number >= _MANY):
            return f"{number:,.0f} a {name}"
    return f"{rate.letters:,} in {span_text(rate.seconds)}"
