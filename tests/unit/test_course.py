"""What is said of the time of causes whose course is known; nothing of steady ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import cache
from itertools import accumulate

import pytest

from celery_dlq.letters.course import CauseTiming, Course, Moment, timings, width_for

BIN, HOUR, DAY = 300, 3600, 86_400
BEGIN = datetime(2026, 3, 2, tzinfo=timezone.utc).timestamp()  # a Monday
SPAN = 14 * DAY
Rate = Callable[[float], float]


def seeded(seed: float | str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no secret


def even(_at: float) -> float:
    """As many letters at any time."""
    return 1.0


def by_day(at: float) -> float:
    """Ten times as many at noon as at midnight."""
    return 0.55 - 0.45 * math.cos(2 * math.pi * at / DAY)


def on_one(_at: float) -> str:
    """All workers have one release."""
    return "v1"


def drawn(
    dice: random.Random,
    number: int,
    rate: Rate = even,
    release: Callable[[float], str | None] = on_one,
    *,
    traffic: Rate = even,
    span: float = SPAN,
) -> list[Moment]:
    """Letters at times of a rate, as a share of the traffic."""
    places = range(int(span / BIN))
    weights = weights_of(rate, traffic, span)
    chosen = dice.choices(places, cum_weights=weights, k=number)
    times = (BEGIN + BIN * (place + dice.random()) for place in chosen)
    return [Moment(at, release(at)) for at in times]


@cache
def weights_of(rate: Rate, traffic: Rate, span: float) -> list[float]:
    """The sums of the rate, which is one number in each `BIN`."""
    middles = [BEGIN + BIN * (place + 0.5) for place in range(int(span / BIN))]
    return [*accumulate(rate(at) * traffic(at) for at in middles)]


def timing_of(
    cause: list[Moment],
    others: Iterable[list[Moment]] = (),
    *,
    successes: Iterable[Moment] = (),
    ends_at: float | None = BEGIN + SPAN,
) -> CauseTiming:
    """The timing of a cause beside others, of each of which 2,000 letters are looked at."""
    all_ = {"cause": cause, **{f"other {place}": one for place, one in enumerate(others)}}
    courses = {name: Course.of(one) for name, one in all_.items()}
    dice = seeded(5)
    samples: dict[str | None, list[Moment]] = {
        name: dice.sample(one, min(len(one), 2000)) for name, one in all_.items()
    }
    samples[None] = list(successes)
    return timings(courses, samples, ["cause"], ends_at=ends_at)["cause"]


def said(timing: CauseTiming) -> set[str]:
    """The kinds of statements, but for steadiness."""
    names = ("onset", "began_with", "mended_by", "pattern")
    found = {name for name in names if getattr(timing, name) is not None}
    return found | ({timing.trend.kind} if timing.trend else set()) - {"steady"}


def neighbours(dice: random.Random, number: int = 3, **given: Rate) -> list[list[Moment]]:
    """Steady causes of the same task."""
    return [drawn(dice, dice.randint(30, 400), **given) for _ in range(number)]  # type: ignore[arg-type]


def since(at: float) -> Rate:
    """Nothing before a time."""
    return lambda moment: float(moment >= BEGIN + at)


def ramp(at: float) -> float:
    """More and more, from nothing."""
    return (at - BEGIN) / SPAN


RATES: dict[str, Rate] = {
    "onset": since(6.3 * DAY),
    "over": lambda at: float(at < BEGIN + 8.4 * DAY),
    "returned": lambda at: float(not 4 * DAY < at - BEGIN < 9 * DAY),
    "growing": ramp,
    "shrinking": lambda at: math.exp(-4 * (at - BEGIN) / SPAN),
    "hours": lambda at: float(at % DAY // HOUR == 2),
    "weekdays": lambda at: float((at - BEGIN) // DAY % 7 == 1),
    "period": lambda at: float(at // HOUR % 6 == 4),
    "bursts": lambda at: float(seeded(at // (2 * HOUR)).random() < 0.1),
}


@pytest.mark.parametrize("traffic", [even, by_day])
@pytest.mark.parametrize("number", [150, 3000])
@pytest.mark.parametrize("kind", [*RATES])
def test_a_course_of_its_own_is_told(kind: str, number: int, traffic: Rate) -> None:
    """Of each kind, whatever the traffic's hours, and nothing else."""
    dice = seeded(f"{kind} {number}")
    span = 42 * DAY if kind == "weekdays" else SPAN  # two Mondays may be chance
    cause = drawn(dice, number, RATES[kind], traffic=traffic, span=span)
    others = [drawn(dice, 300, traffic=traffic, span=span) for _ in range(4)]
    timing = timing_of(cause, others, ends_at=BEGIN + span)
    pattern = {"hours", "weekdays", "period", "bursts"} & {kind}
    assert said(timing) == ({"pattern"} if pattern else {kind})
    assert timing.pattern is None or timing.pattern.kind == kind


def test_a_steady_cause_is_steady_and_nothing_else() -> None:
    """At 5 to 3,000 letters, beside causes with courses of their own: 1 in 100 is wrong."""
    wrong, causes, steady = [], 0, 0
    for seed in range(120):
        dice = seeded(seed)
        traffic = (even, by_day)[seed % 2]
        kinds = dice.sample([*RATES], 2)
        others = [drawn(dice, 200, RATES[kind], traffic=traffic) for kind in kinds]
        others += neighbours(dice, 2, traffic=traffic)
        cause = drawn(dice, int(math.exp(dice.uniform(1.6, 8))), traffic=traffic)
        timing = timing_of(cause, others)
        causes += 1
        steady += timing.trend is not None and timing.trend.kind == "steady"
        wrong += [(seed, len(cause), timing.clauses)] if said(timing) else []
    assert len(wrong) <= 1, wrong
    assert steady > causes / 2


@pytest.mark.parametrize("number", [14, 60, 2000])
def test_the_onset_is_within_its_uncertainty(number: int) -> None:
    """In 95 of 100 cases, and the more letters, the more certain it is."""
    right, widths = 0, []
    for seed in range(20):
        dice = seeded(seed)
        at = BIN * dice.randint(1400, 3200)
        onset = timing_of(drawn(dice, number, since(at)), neighbours(dice)).onset
        if onset is not None:
            right += abs(onset.at - BEGIN - at) <= onset.uncertainty
            widths.append(onset.uncertainty)
    assert len(widths) >= (12 if number < 60 else 20)
    assert right >= 0.85 * len(widths)
    # Of so many letters in a week or so, five times the mean gap
    assert sorted(widths)[len(widths) // 2] < 6 * 9 * DAY / number


def test_letters_before_the_onset_are_counted() -> None:
    """A cause of a few letters a day, of which there are twenty times as many at once."""
    dice = seeded(1)
    cause = drawn(dice, 3000, lambda at: 1.0 if at >= BEGIN + 9 * DAY else 0.04)
    timing = timing_of(cause, neighbours(dice))
    assert timing.onset is not None
    assert abs(timing.onset.at - BEGIN - 9 * DAY) < 3 * HOUR
    assert timing.onset.before == pytest.approx(
        sum(one.at < BEGIN + 9 * DAY for one in cause), rel=0.2
    )
    assert "letters before)" in timing.clauses[0]


def releases(*at: float, rollout: float = 0.0, dice: random.Random) -> Callable[[float], str]:
    """Releases v1, v2 … that begin at times; during a rollout, some workers have the old one."""

    def release(moment: float) -> str:
        found = 1
        for begin in at:
            part = (moment - BEGIN - begin) / rollout if rollout else moment - BEGIN - begin
            found += part > 0 if not rollout else dice.random() < part
        return f"v{found}"

    return release


def of_releases(
    dice: random.Random, number: int, release: Callable[[float], str], names: set[str]
) -> list[Moment]:
    """Letters of a cause that only some releases have."""
    found = [one for one in drawn(dice, 50 * number, release=release) if one.release in names]
    return dice.sample(found, number)


@pytest.mark.parametrize("rollout", [0.0, DAY])
@pytest.mark.parametrize("number", [100, 800])
def test_the_release_that_began_a_cause_and_those_that_knew_it_not(
    number: int, rollout: float
) -> None:
    """Also while workers get it one after the other."""
    dice = seeded(number)
    release = releases(3 * DAY, 7.3 * DAY, rollout=rollout, dice=dice)
    cause = of_releases(dice, number, release, {"v3"})
    others = [drawn(dice, 500, release=release) for _ in range(3)]
    found = timing_of(cause, others).began_with
    assert found is not None
    assert found.name == "v3"
    assert {name for name, _ in found.without} == {"v1", "v2"}
    assert found.without[0][1] == sum(
        one.release == found.without[0][0] for other in others for one in other
    )


def test_a_canary_of_one_host_is_the_release_that_began_a_cause() -> None:
    """It runs a twentieth of the messages for five days; the cause has all of it."""
    dice = seeded(3)

    def release(at: float) -> str:
        return "v2" if at > BEGIN + 6 * DAY and dice.random() < 0.05 else "v1"

    cause = of_releases(dice, 60, release, {"v2"})
    others = [drawn(dice, 800, release=release) for _ in range(3)]
    timing = timing_of(cause, others)
    assert timing.began_with is not None
    assert timing.began_with.name == "v2"
    assert timing.began_with.chance < 0.01


def test_a_deploy_that_mended_one_cause_and_began_another() -> None:
    """Each is told of its own."""
    dice = seeded(4)
    release = releases(6.6 * DAY, dice=dice)
    old, new = (of_releases(dice, 700, release, {name}) for name in ("v1", "v2"))
    steady = drawn(dice, 600, release=release)
    before, after = timing_of(old, [new, steady]), timing_of(new, [old, steady])
    assert before.mended_by is not None
    assert before.mended_by.name == "v2"
    assert said(before) == {"over", "mended_by"}
    assert after.began_with is not None
    assert after.began_with.name == "v2"
    assert said(after) == {"onset", "began_with"}
    assert not said(timing_of(steady, [old, new]))


@pytest.mark.parametrize("kind", ["growing", "period", "onset", "returned", "over"])
def test_no_release_is_blamed_for_what_it_did_not_do(kind: str) -> None:
    """A ramp, a flap, a later onset, a pause and an end between two deploys, in ten cases each."""
    for seed in range(10):
        dice = seeded(seed)
        release = releases(2.9 * DAY, dice=dice)
        cause = drawn(dice, 900, RATES[kind], release)
        timing = timing_of(cause, [drawn(dice, 500, release=release) for _ in range(3)])
        assert timing.began_with is None
        assert timing.mended_by is None


@pytest.mark.parametrize("kind", ["hours", "growing", "bursts", "onset"])
def test_what_the_traffic_does_is_not_said_of_a_cause(kind: str) -> None:
    """All causes of the task have the same course: that of its messages."""
    dice = seeded(kind)
    everyone = [drawn(dice, 700, RATES[kind]) for _ in range(5)]
    assert not said(timing_of(everyone[0], everyone[1:], ends_at=None)) - {"bursts"}


def test_a_pause_of_a_nightly_task_is_a_pause() -> None:
    """Its nights are no bursts, and the others go on."""
    dice = seeded(12)
    night = RATES["hours"]
    cause = drawn(dice, 900, RATES["returned"], traffic=night)
    timing = timing_of(cause, [drawn(dice, 200, traffic=night) for _ in range(3)])
    assert said(timing) == {"returned"}


def test_successes_say_what_the_traffic_is() -> None:
    """They lead, where they were kept all the time: the only other cause is no traffic."""
    dice = seeded(6)
    night = [drawn(dice, 600, RATES["hours"]) for _ in range(2)]
    assert timing_of(night[0], night[1:]).pattern is None
    good = drawn(dice, 600)
    assert timing_of(night[0], night[1:], successes=good).pattern is not None


def test_one_neighbour_makes_no_finding() -> None:
    """A steady cause is not said to come in the hours in which its neighbour does not."""
    for kind, rate in RATES.items():
        dice = seeded(kind)
        neighbour = drawn(dice, 4000, rate)
        timing = timing_of(drawn(dice, 800), [neighbour])
        assert not said(timing), kind


def test_wrong_clocks_and_letters_without_a_time() -> None:
    """They count as letters, and change nothing that is said of the time."""
    dice = seeded(8)
    cause = drawn(dice, 900, since(5 * DAY))
    right = timing_of(cause, neighbours(dice))
    odd = [Moment(at, "v1") for at in (0.0, 3e9, BEGIN + SPAN + DAY, math.inf, math.nan)]
    wrong = timing_of([*cause, *odd], neighbours(seeded(8)))
    assert right.onset is not None
    assert wrong.onset is not None
    assert wrong.onset.at == pytest.approx(right.onset.at, abs=60)
    assert wrong.trend == right.trend
    assert wrong.letters == right.letters
    assert Course.of([*cause, *odd], letters=1000).letters == 1000
    assert timing_of([*cause, Moment(4e9)], neighbours(dice), ends_at=None).letters == 900


def test_causes_that_have_hardly_a_time() -> None:
    """No letter, none with a time, one, two, and all in one moment."""
    assert timings({"a": Course(letters=3)}, {}, ["a"])["a"] == CauseTiming(letters=0, span=(0, 0))
    assert timings({}, {}, []) == {}
    for number in (1, 2, 3, 500):
        timing = timing_of([Moment(BEGIN + DAY)] * number, neighbours(seeded(2)))
        assert timing.letters == number
        assert timing.clauses is not None
    dice = seeded(9)
    few = timing_of(drawn(dice, 14), neighbours(dice))
    assert not said(few)
    assert few.clauses == ()


def test_a_course_alone_says_as_much() -> None:
    """Without times of letters, by its buckets: of a million letters as of a group in Redis."""
    dice = seeded(10)
    for number, factor in ((1500, 1), (1500, 700)):
        found = Course.of(drawn(dice, number, since(6 * DAY)))
        buckets = {place: letters * factor for place, letters in found.buckets.items()}
        course = Course(
            letters=number * factor,
            first_at=found.first_at,
            last_at=found.last_at,
            width=found.width,
            buckets=buckets,
        )
        other = Course.of(drawn(dice, 500))
        timing = timings({"a": course, "b": other}, {}, ["a"], ends_at=BEGIN + SPAN)["a"]
        assert said(timing) == {"onset"}
        assert timing.letters == number * factor
        assert timing.onset is not None
        assert timing.onset.at == pytest.approx(BEGIN + 6 * DAY, abs=2 * HOUR)


@pytest.mark.parametrize("seconds", [0, 1, 600, HOUR, DAY, 30 * DAY, 4000 * DAY])
def test_a_course_is_bounded(seconds: float) -> None:
    """Whatever its span, and however many releases it has."""
    dice = seeded(11)
    moments = [Moment(BEGIN + seconds * dice.random(), f"v{n}") for n in range(3000)]
    moments += [Moment(BEGIN, "often")] * 2
    course = Course.of(moments)
    assert len(course.buckets) <= 502
    assert sum(course.buckets.values()) == course.letters == 3002
    assert len(course.releases) == 20
    assert course.releases["often"] == (2, BEGIN, BEGIN)
    assert len(course.spread()) <= 2000
    assert course.width == width_for(max(one.at for one in moments) - BEGIN)


def examples() -> Iterator[CauseTiming]:
    """Timings with all that can be said."""
    for kind, rate in RATES.items():
        dice = seeded(kind)
        span = 42 * DAY if kind == "weekdays" else SPAN
        others = [drawn(dice, 300, span=span) for _ in range(3)]
        yield timing_of(drawn(dice, 1500, rate, span=span), others, ends_at=BEGIN + span)
    dice = seeded(4)
    release = releases(6.6 * DAY, dice=dice)
    old, new = (of_releases(dice, 700, release, {name}) for name in ("v1", "v2"))
    yield timing_of(old, [new, drawn(dice, 600, release=release)])
    yield timing_of(new, [old, drawn(dice, 600, release=release)])


def test_some_hours_are_not_every_hour() -> None:
    """Of four bursts in three days, all at one minute past the hour, none says "every hour"."""
    bursts = [Moment(BEGIN + hour * HOUR + 120, "v1") for hour in (0, 46, 69, 72)]
    cause = [one._replace(at=one.at + second) for one in bursts for second in (0, 40)]
    end = BEGIN + 73 * HOUR
    assert "pattern" not in said(timing_of(cause, ends_at=end))
    hourly = [Moment(BEGIN + hour * HOUR + 120, "v1") for hour in range(72)]
    pattern = timing_of(hourly, ends_at=end).pattern
    assert pattern is not None
    assert pattern.period == HOUR


def test_a_timing_survives_json() -> None:
    """As executors send it to the driver: a few hundred bytes."""
    for timing in examples():
        text = json.dumps(timing.to_json())
        assert len(text) < 700
        assert CauseTiming.from_json(json.loads(text)) == timing


def test_what_is_said_is_plain_english() -> None:
    """Each statement is a clause, with its time in UTC."""
    found = [timing.clauses for timing in examples()]
    assert found[0][0].startswith("since 2026-03-08 07:")
    assert ", give or take " in found[0][0]
    assert found[0][1].startswith("steady: ")
    assert found[0][1].endswith(" an hour")
    assert found[1][0].startswith("over since 2026-03-10 09:")
    assert found[2][0].startswith("back since 2026-03-11 00:")
    assert " after a pause of 5 days: " in found[2][0]
    assert found[3][0].startswith("growing: ")
    assert found[3][0].endswith(" an hour now")
    assert found[4][0].startswith("shrinking: ")
    assert found[5] == ("every day from 02:00 to 03:00 UTC",)
    assert found[6] == ("on Tuesdays (UTC)",)
    assert found[7] == ("every 6 hours for 60 minutes, as from 04:00 to 05:00 UTC",)
    assert found[8][0].startswith("in ")
    assert " bursts in " in found[8][0]
    over, ended, without = found[9]
    assert over.startswith("over since 2026-03-08 14:")
    assert ended.startswith("ended ")
    assert "release v2" in ended
    assert without.startswith("v2 had none of it in ")
    assert "began with release v2" in found[10]


def test_a_neighbour_of_one_release_makes_no_release_of_a_cause() -> None:
    """A canary has all letters of one cause; another began hours after a release that all have."""
    dice = seeded(8)

    def release(at: float) -> str:
        return f"v{int((at - BEGIN) // (3 * DAY))}"

    cause = drawn(dice, 1800, lambda at: float(6.9 <= (at - BEGIN) / DAY < 7), release)
    canary = drawn(dice, 2000, release=lambda _at: "canary")
    others = [canary, *(drawn(dice, 2000, release=release) for _ in range(5))]
    assert timing_of(cause, others).began_with is None


def test_a_monday_after_a_weekend_is_no_onset() -> None:
    """A cause began on a Friday evening, and the weekend has a tenth of all letters a day."""

    def by_week(at: float) -> float:
        return by_day(at) * (0.1 if 5 <= (at - BEGIN) // DAY % 7 < 7 else 1.0)

    for seed in range(8):
        dice = seeded(f"monday {seed}")
        cause = drawn(dice, 1000, since(4.8 * DAY), traffic=by_week, span=8 * DAY)
        cause = [one for one in cause if one.at >= BEGIN + 3 * DAY]
        others = [drawn(dice, 800, traffic=by_week, span=8 * DAY) for _ in range(3)]
        others = [[one for one in some if one.at >= BEGIN + 3 * DAY] for some in others]
        onset = timing_of(cause, others, ends_at=BEGIN + 8 * DAY).onset
        assert onset is None or onset.at < BEGIN + 6.5 * DAY


def test_a_rise_has_the_time_of_the_first_letter_where_none_are_before() -> None:
    """Letters that happen to grow more frequent are no ramp; nor began they with the sixth."""
    late = []
    for seed in range(60):
        dice = seeded(f"first {seed}")
        cause = drawn(dice, 740, since(0.2 * DAY), span=3 * DAY)
        onset = timing_of(cause, neighbours(dice), ends_at=BEGIN + 3 * DAY).onset
        if onset is not None and onset.at - onset.uncertainty > BEGIN + 0.2 * DAY + 60:
            late.append((seed, onset))
    assert len(late) <= 2
