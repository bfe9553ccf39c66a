"""What is true of a planted cause, and whether so many letters can show it.

A truth can be found if a test that knows it, as no program does, gives less than `CHANCE` to half
of the letters of the cause: who does not know it has to look for it in the other half. Counted are
at most `SAMPLE` letters of a cause. This was decided before any program was judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, lgamma, sqrt
from typing import Any, ClassVar

CHANCE = 1e-4
SAMPLE = 2_000
LEAST_OTHERS = 10
"""Letters of each of two other causes of the task, or of the successes."""

NORMAL = 3.72
"""Standard deviations that chance exceeds as seldom as `CHANCE`."""

Known = dict[str, float]
"""What a test may know: ``n`` letters of the cause, and more for each truth, see `findable`."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a cause depends on; a share of its letters, if they have several reasons."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class Value(Truth):
    """One value of a feature, ``None``: the argument was given."""

    feature: str
    value: str | None
    kind = "value"


@dataclass(frozen=True, kw_only=True)
class Several(Truth):
    """A few values of a feature that has thousands."""

    feature: str
    values: tuple[str, ...]
    kind = "set"


@dataclass(frozen=True, kw_only=True)
class Range(Truth):
    """Numbers between two; ``feature`` is empty for the size of the message."""

    feature: str
    low: float | None
    high: float | None
    kind = "range"


@dataclass(frozen=True, kw_only=True)
class Pair(Truth):
    """Two values that only together make a message fail."""

    features: tuple[str, str]
    values: tuple[str, str]
    kind = "pair"


@dataclass(frozen=True, kw_only=True)
class Hours(Truth):
    """An hour of the day, in UTC."""

    hour: int
    kind = "hour"


@dataclass(frozen=True, kw_only=True)
class Weekday(Truth):
    """A day of the week, 0 for Monday."""

    day: int
    kind = "weekday"


@dataclass(frozen=True, kw_only=True)
class Flap(Truth):
    """One hour in six."""

    kind = "intermittent"


@dataclass(frozen=True, kw_only=True)
class Growth(Truth):
    """More and more letters, with no release."""

    kind = "growing"


@dataclass(frozen=True, kw_only=True)
class Began(Truth):
    """No letters before a time, in seconds since 1970; the release that began it, if one did.

    A release begins with its canary, and all have it at ``latest``.
    """

    at: float
    release: str | None
    latest: float | None = None
    kind = "began"


@dataclass(frozen=True, kw_only=True)
class Ended(Truth):
    """No letters after ``latest``; the release that mended it, if one did, began at a time."""

    at: float
    release: str | None
    latest: float | None = None
    kind = "ended"


@dataclass(frozen=True, kw_only=True)
class Returned(Truth):
    """A pause between two times."""

    gone: float
    at: float
    kind = "returned"


TRUTHS = {
    one.kind: one
    for one in (
        *(Value, Several, Range, Pair, Hours, Weekday, Flap, Growth, Began, Ended, Returned),
    )
}


def of_json(value: dict[str, Any]) -> Truth:
    kind = TRUTHS[value["kind"]]
    given = {name: one for name, one in value.items() if name != "kind"}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def wanted(letters: int, of_all: int) -> bool:
    """A report has to explain so many letters of a cause."""
    return letters > 20 or letters >= 0.01 * of_all


def more_often(a: int, n: int, c: int, m: int) -> float:
    """The chance of ``a`` of ``n`` letters or more to be among ``a + c`` of ``n + m``.

    Fisher, summed from above.
    """
    if not n or not m:
        return 1.0
    total = a + c
    return min(
        1.0,
        sum(
            exp(_ways(n, k) + _ways(m, total - k) - _ways(n + m, total))
            for k in range(a, min(n, total) + 1)
        ),
    )


def _ways(of: int, chosen: int) -> float:
    if not 0 <= chosen <= of:
        return float("-inf")
    return lgamma(of + 1) - lgamma(chosen + 1) - lgamma(of - chosen + 1)


def seen_in_contents(having: int, letters: int, others_having: int, others: int) -> bool:
    """Half of the letters show that a value is more frequent than in others."""
    part = min(letters, SAMPLE) / letters / 2 if letters else 0
    among = min(others, 5 * SAMPLE) / others / 2 if others else 0
    found = (having * part, letters * part, others_having * among, others * among)
    return more_often(*map(round, found)) < CHANCE


def seen_in_time(letters: int, share: float) -> bool:
    """Half of the letters would fall into a share of the task's time by chance this seldom."""
    return share < 1 and share ** (min(letters, SAMPLE) / 2) < CHANCE


def seen_growing(positions: Iterable[float]) -> bool:
    """Positions in the task's own time, 0 to 1, are late; evenly, half of them are seldom so."""
    found = list(positions)
    mean = sum(found) / len(found) if found else 0.5
    return (mean - 0.5) * sqrt(12 * min(len(found), SAMPLE) / 2) > NORMAL


def seen_in_bursts(letters: int, hours: float) -> bool:
    """Half of the letters, in one hour of six, are more uneven than letters at any hour.

    Nobody can know the hours. The variance of the letters an hour is 1 + 5 times their mean, by
    their mean; the error of this index is the square root of 2 by the hours.
    """
    mean = letters / 2 / hours
    return 5 * mean * sqrt(hours / 2) > NORMAL
