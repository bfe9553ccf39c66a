"""Which values are more frequent in one set of messages than in another, beyond chance.

A value is tested by Fisher's exact test (the probability that chance alone makes it as frequent)
and corrected for the number of values by the procedure of Benjamini and Hochberg. Among many
messages hardly any difference is chance, so it must also be `LEAST_DIFFERENCE` or more. At most
`MOST_TESTED` values of one comparison are tested: those that are more frequent inside and stand
out most. The others count as tests without a finding, so the limit can hide a weak finding but
never adds a false one.

Source: Y. Benjamini, Y. Hochberg, "Controlling the False Discovery Rate", J. R.
Statist. Soc. B 57 (1995); R. Bourgon et al., "Independent filtering increases
detection power for high-throughput experiments", PNAS 107 (2010), for why a value's
total frequency may decide whether it is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, lgamma, sqrt
from typing import NamedTuple

from celery_dlq.letters.compared_values import FIELDS, GIVEN, OF_ANY_TASK, WHOLE, Pair

ALPHA = 0.01
"""The tolerated share of false findings among all findings."""

LEAST_DIFFERENCE = 0.1
"""Of two shares: a smaller one is no finding, and does not put one finding before another."""

LEAST = 5
"""Values of fewer messages, both sides together, are not tested."""

MIN_OTHERS = 20
"""Letters are compared with others of the same tasks if there are at least this many."""

MOST_TESTED = 2_000
"""Values tested in one comparison."""

SAME_TASKS, SAME_QUEUES, SUCCESSES = "same tasks", "same queues", "successes"
"""What letters are compared with: letters of the same tasks, else of their queues; successes."""


_NEGLIGIBLE = 1e-13  # of a sum


class Candidate(NamedTuple):
    """A value that ``a`` of ``n`` messages inside have, and ``c`` of ``m`` outside."""

    feature: str
    value: str
    a: int
    c: int
    n: int
    m: int

    @property
    def distance(self) -> float:
        """The difference of the two shares, in standard errors."""
        share = (self.a + self.c) / (self.n + self.m)
        error = sqrt(share * (1 - share) * (1 / self.n + 1 / self.m))
        return (self.a / self.n - self.c / self.m) / error


@dataclass(frozen=True, slots=True, kw_only=True)
class Significant:
    """A value that is more frequent inside than chance makes it."""

    against: str  # What the letters were compared with
    counts: Candidate  # The counts
    p_value: float  # The probability that chance makes it as frequent
    q_value: float  # The same after correction for all tests

    @property
    def share_here(self) -> float:
        """The share of the letters that have it."""
        return self.counts.a / self.counts.n

    @property
    def share_elsewhere(self) -> float:
        """The share of the others that have it."""
        return self.counts.c / self.counts.m

    @property
    def lift(self) -> float:
        """The first share divided by the second; if no other has it, as if half of one had."""
        return self.share_here / (self.share_elsewhere or 0.5 / self.counts.m)

    @property
    def order(self) -> tuple[float, bool, str, str]:
        """Sorts by the difference of the shares, the largest first."""
        feature, value = self.counts[:2]
        return (self.share_elsewhere - self.share_here, value == GIVEN, feature, value)


def ranked(
    found: Iterable[Significant], last: Callable[[Significant], bool] = lambda _one: False
) -> list[Significant]:
    """Sort findings, the most telling first: the largest difference of the shares.

    Of nearly equal differences, arguments come first, then the fields in the order of `FIELDS`: a
    new release often has new hosts, and a host has all the letters of its release. ``last`` is
    true for those that come after the others.
    """
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    rest, result = sorted(found, key=lambda one: one.order), list[Significant]()
    while rest:
        largest = rest[0].order[0]
        near = [one for one in rest if one.order[0] - largest < LEAST_DIFFERENCE]
        result += sorted(near, key=lambda one: (last(one), kinds.get(one.counts.feature, -1)))
        rest = rest[len(near) :]
    return result


def comparable(feature: str, against: str) -> bool:
    """True if a value can explain a difference, false if it follows from the task or the death.

    Messages of other tasks have other queues, publishers and arguments, and a message that died
    has more often been retried than one that succeeded.
    """
    if against == SAME_QUEUES:
        return feature in OF_ANY_TASK
    return against != SUCCESSES or feature != "retries"


def candidates(
    inside: Collection[Collection[Pair]],
    outside: Collection[Collection[Pair]],
    against: str,
    *,
    least: int = LEAST,
    most: int = MOST_TESTED,
) -> tuple[list[Candidate], int]:
    """Count every value inside and outside."""
    here, there = Counter(chain.from_iterable(inside)), Counter(chain.from_iterable(outside))
    found, tests = [], 0
    for pair in here.keys() | there.keys():
        feature, value = pair
        a, c = here[pair], there[pair]
        if a + c < least or not comparable(feature, against):
            continue
        # The values of an argument are compared among the messages that have it.
        of_all = value is None or feature in WHOLE
        n = len(inside) if of_all else here[feature, None]
        m = len(outside) if of_all else there[feature, None]
        if not n or not m or a + c >= n + m:  # what all messages have explains nothing
            continue
        tests += 1
        if a * m > c * n:
            found.append(Candidate(feature, GIVEN if value is None else value, a, c, n, m))
    found.sort(key=lambda one: (-one.distance, one.feature, one.value))
    return found[:most], tests


def significant(
    tested: Sequence[Candidate], tests: int, against: str, alpha: float = ALPHA
) -> Iterator[Significant]:
    """The candidates of one comparison that are significant."""
    ranked = sorted(((chance(*one[2:]), one) for one in tested), reverse=True)
    q_value = 1.0
    for place, (p_value, one) in enumerate(ranked):
        q_value = min(q_value, p_value * tests / (len(ranked) - place))
        found = Significant(against=against, counts=one, p_value=p_value, q_value=q_value)
        if q_value <= alpha and found.share_here - found.share_elsewhere >= LEAST_DIFFERENCE:
            yield found


def chance(a: int, c: int, n: int, m: int) -> float:
    """Fisher's exact test, one-sided: the probability of ``a`` or more inside by chance."""
    total = a + c
    first = _log_ways(n, a) + _log_ways(m, c) - _log_ways(n + m, total)
    term = terms = 1.0
    for k in range(a, min(n, total)):
        ratio = (n - k) * (total - k) / ((k + 1) * (m - total + k + 1))
        term *= ratio
        terms += term
        if ratio < 1 and term < terms * _NEGLIGIBLE:
            break
    return min(1.0, exp(first) * terms)


def _log_ways(of: int, chosen: int) -> float:
    return lgamma(of + 1) - lgamma(chosen + 1) - lgamma(of - chosen + 1)
