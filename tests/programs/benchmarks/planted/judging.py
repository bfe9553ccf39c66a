"""What a program says of causes, against what is true of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from benchmarks.planted.folders import Expected
from benchmarks.planted.truths import (
    Began,
    Ended,
    Flap,
    Growth,
    Hours,
    Pair,
    Range,
    Returned,
    Several,
    Truth,
    Value,
    Weekday,
)

from celery_dlq.letters.comparison import GIVEN

HOUR, DAY = 3600, 86_400


class Claim(NamedTuple):
    """A statement on a cause, whatever program makes it.

    ``kind`` is one of value, set, range, pair, hour, weekday, intermittent, began, ended,
    returned, growing, shrinking, began with, mended by.
    """

    kind: str
    features: tuple[str, ...] = ()
    values: tuple[str | None, ...] = ()
    low: float | None = None
    high: float | None = None
    at: float = 0.0
    within: float = 0.0
    neighbour: str | None = None
    """The only other cause, if it is said to be all that the letters were compared with."""

    def __str__(self) -> str:
        return " ".join(f"{name}={one}" for name, one in self._asdict().items() if one)


class Says(Enum):
    """What a statement is worth: it is the truth, a part of it or what follows, or false."""

    TRUTH = "truth"
    PART = "part"
    FALSE = "false"


@dataclass(kw_only=True)
class Verdict:
    """Of all causes of a kind: truths that could be found, those found, false statements."""

    causes: int = 0
    findable: int = 0
    found: int = 0
    luck: int = 0  # found although nobody could ask for it
    false: int = 0
    examples: tuple[str, ...] = ()

    def add(self, other: Verdict) -> None:
        for name in ("causes", "findable", "found", "luck", "false", "examples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def judge(expected: Expected, claims: Iterable[Claim]) -> Verdict:
    """One cause: each statement counts once, however often it is made."""
    claims = list(dict.fromkeys(claims))
    hit, false = set(), []
    for claim in claims:
        worths = [_worth(claim, truth) for truth in expected.truths]
        hit |= {place for place, worth in enumerate(worths) if worth is Says.TRUTH}
        if set(worths) <= {Says.FALSE} and not _follows(claim, expected):
            false.append(claim)
    found = [place in hit for place in range(len(expected.truths))]
    missed = [
        f"{expected.fingerprint}, {expected.kind}, {expected.letters} letters: not found: {truth}; "
        f"said: {', '.join(map(str, claims))}"
        for truth, yes, could in zip(expected.truths, found, expected.findable, strict=True)
        if could and not yes
    ]
    return Verdict(
        causes=1,
        findable=sum(expected.findable),
        found=sum(a and b for a, b in zip(found, expected.findable, strict=True)),
        luck=sum(a and not b for a, b in zip(found, expected.findable, strict=True)),
        false=len(false),
        examples=(
            *missed,
            *(
                f"{expected.fingerprint}, {expected.kind}, {expected.letters} letters: false: {one}"
                for one in false
            ),
        ),
    )


def _follows(claim: Claim, expected: Expected) -> bool:
    """What is said follows from the truth: the days of a flood, the release of a canary."""
    if claim.neighbour is not None:  # whether it is this cause or the other is left open
        return True
    if claim.features:
        return set(claim.features) <= expected.follows
    return claim.kind in expected.also


def _worth(claim: Claim, truth: Truth) -> Says:
    found = _OF_TRUTH[type(truth)](claim, truth)
    if found is True:
        return Says.TRUTH
    return Says.PART if found is None else Says.FALSE


def _value(claim: Claim, truth: Value) -> bool | None:
    """Three values, of which it is one, still say it; a pair or a wide set only points to it."""
    if truth.feature not in claim.features:
        return False
    if truth.value is None:
        return True if claim.values == (None,) else None
    if claim.kind == "range":
        return _inside(truth.value, claim)
    if truth.value not in claim.values:
        return False
    return True if claim.kind in {"value", "set"} and len(claim.values) <= 3 else None


def _inside(value: str, claim: Claim) -> bool | None:
    try:
        number = float(value)
    except ValueError:
        return False
    low = claim.low if claim.low is not None else number
    high = claim.high if claim.high is not None else number
    return None if low <= number <= high else False


def _several(claim: Claim, truth: Several) -> bool | None:
    if truth.feature not in claim.features:
        return False
    right = sum(one in truth.values for one in claim.values)
    if not right or right < 0.8 * len(claim.values):
        return False
    return True if 2 * right >= len(truth.values) else None


def _range(claim: Claim, truth: Range) -> bool | None:
    if not truth.feature:
        return claim.kind == "range" and (
            "note" in claim.features[0] or not claim.features[0].startswith(("args[", "kwargs."))
        )
    if truth.feature not in claim.features:
        return False
    if claim.kind != "range":
        return None  # some values of the range
    assert truth.low is not None
    if claim.low is None:
        return False
    if truth.high is None:
        near = 0.8 * truth.low <= claim.low <= 1.5 * truth.low
        return near and (claim.high is None or claim.high >= 1.5 * truth.low)
    width = truth.high - truth.low
    high = claim.high if claim.high is not None else float("inf")
    if claim.low < truth.low - width / 2 or high > truth.high + width / 2:
        return None if claim.low <= truth.low and high >= truth.high else False
    return True if min(high, truth.high) - max(claim.low, truth.low) >= width / 2 else None


def _pair(claim: Claim, truth: Pair) -> bool | None:
    true = set(zip(truth.features, truth.values, strict=True))
    said = {(feature, value) for feature in claim.features for value in claim.values}
    if claim.kind == "pair":
        said = set(zip(claim.features, claim.values, strict=True))
        if said == true:
            return True
    return None if said & true else False


def _hours(claim: Claim, truth: Hours) -> bool:
    middle = truth.hour * HOUR + HOUR / 2
    return claim.kind == "hour" and _within(claim, middle, DAY) and (_wide(claim, DAY) <= 4 * HOUR)


def _weekday(claim: Claim, truth: Weekday) -> bool:
    middle = truth.day * DAY + DAY / 2
    return (
        claim.kind == "weekday"
        and _within(claim, middle, 7 * DAY)
        and _wide(claim, 7 * DAY) <= 2 * DAY
    )


def _within(claim: Claim, moment: float, period: float) -> bool:
    assert claim.low is not None
    return (moment - claim.low) % period < _wide(claim, period)


def _wide(claim: Claim, period: float) -> float:
    assert claim.low is not None
    assert claim.high is not None
    return (claim.high - claim.low) % period or period


def _flap(claim: Claim, _truth: Flap) -> bool:
    return claim.kind == "intermittent"


def _growth(claim: Claim, _truth: Growth) -> bool:
    return claim.kind == "growing"


def _returned(claim: Claim, _truth: Returned) -> bool:
    return claim.kind == "returned"


def _began(claim: Claim, truth: Began) -> bool | None:
    return _changed(claim, truth, "began with", "began")


def _ended(claim: Claim, truth: Ended) -> bool | None:
    return _changed(claim, truth, "mended by", "ended")


def _changed(claim: Claim, truth: Began | Ended, release: str, time: str) -> bool | None:
    """The release is the truth where one did it; the time alone is a part of it then."""
    latest = truth.at if truth.latest is None else truth.latest
    if truth.release is not None and claim.values == (truth.release,):
        named = claim.kind == "value" and claim.features == ("release",)
        if claim.kind == release or (named and isinstance(truth, Began)):
            return True
    near = max(2 * claim.within, 6 * HOUR)
    if claim.kind == time and -near <= claim.at - truth.at <= near + (latest - truth.at):
        return None if truth.release is not None else True
    return False


_OF_TRUTH: Mapping[type[Truth], Any] = {
    Value: _value,
    Several: _several,
    Range: _range,
    Pair: _pair,
    Hours: _hours,
    Weekday: _weekday,
    Flap: _flap,
    Growth: _growth,
    Returned: _returned,
    Began: _began,
    Ended: _ended,
}


def claims_of(explanation: Any) -> Iterator[Claim]:
    """The statements of an `Explanation`: its findings, and what it says of the time."""
    for one in explanation.findings:
        yield _claim(one)
    timing = explanation.timing
    if timing is None:
        return
    if timing.onset is not None:
        yield Claim("began", at=timing.onset.at, within=timing.onset.uncertainty)
    trend = timing.trend
    if trend is not None and trend.kind not in {"steady", "over"}:
        yield Claim(trend.kind)
    if trend is not None and trend.kind == "over":
        yield Claim("ended", at=trend.since, within=0.0)
    if timing.began_with is not None:
        yield Claim("began with", values=(timing.began_with.name,))
    if timing.mended_by is not None:
        yield Claim("mended by", values=(timing.mended_by.name,))
    if timing.pattern is not None:
        pattern = timing.pattern
        kinds = {"hours": "hour", "weekdays": "weekday"}
        kind = kinds.get(pattern.kind, "intermittent")
        yield Claim(kind, low=pattern.start, high=pattern.end)


def _claim(one: Any) -> Claim:
    if one.kind == "pair":
        features, values = zip(*sorted(one.parts), strict=True)
        return Claim("pair", features, values, neighbour=one.neighbour)
    if one.kind == "range":
        low, high = (None if end is None else float(end) for end in (one.low, one.high))
        return Claim("range", (one.feature,), low=low, high=high, neighbour=one.neighbour)
    values = one.values or (None if one.value == GIVEN else one.value,)
    return Claim(one.kind, (one.feature,), values, neighbour=one.neighbour)
