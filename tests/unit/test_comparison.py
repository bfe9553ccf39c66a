"""The statistics of the triage and of `dlq differences`: exact, and no findings in noise."""

from __future__ import annotations

from collections import Counter
from math import comb
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters.comparison import (
    GIVEN,
    LEAST_DIFFERENCE,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    Candidate,
    Pair,
    candidates,
    chance,
    ranked,
    significant,
)


def fisher(a: int, c: int, n: int, m: int) -> float:
    """The probability by counting all ways."""
    ways = (comb(n, k) * comb(m, a + c - k) for k in range(a, min(n, a + c) + 1))
    return sum(ways) / comb(n + m, a + c)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Counts of messages with a value, inside and outside."""
    n, m = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    return draw(st.integers(0, n)), draw(st.integers(0, m)), n, m


@given(tables())
def test_the_probability_is_fishers(table: tuple[int, int, int, int]) -> None:
    """Of every small table it is that of counting all ways."""
    assert chance(*table) == pytest.approx(fisher(*table), rel=1e-9)


@pytest.mark.parametrize(
    "table",
    [(30, 100, 100, 900), (700, 300, 2_000, 2_000), (5, 0, 6, 2_000), (1_010, 990, 2_000, 2_000)],
)
def test_the_probability_of_large_tables_is_exact(table: tuple[int, int, int, int]) -> None:
    """The same with as many messages as are compared."""
    assert chance(*table) == pytest.approx(fisher(*table), rel=1e-8)


def test_a_million_letters_overflow_nothing() -> None:
    """The certain is 0, not an error; the even is about a half."""
    assert chance(400_000, 10, 500_000, 500_000) == 0.0
    assert chance(100_000, 100_000, 500_000, 500_000) == pytest.approx(0.5, abs=0.01)


def test_the_correction_is_that_of_benjamini_and_hochberg() -> None:
    """Each q is the least p times tests by rank of those as large or larger."""
    dice = Random(4)  # noqa: S311 - the same every time
    tested = [
        Candidate("kwargs.a", str(number), dice.randrange(5, 40), dice.randrange(20), 60, 60)
        for number in range(80)
    ]
    tests = 100
    found = {one.value: one for one in significant(tested, tests, "", alpha=1.0)}
    by_chance = sorted(tested, key=lambda one: chance(*one[2:]))
    for place, one in enumerate(by_chance):
        assert (one.value in found) == (one.a / one.n - one.c / one.m >= LEAST_DIFFERENCE)
        if one.value not in found:
            continue
        q_value = min(
            1.0,
            *(chance(*o[2:]) * tests / rank for rank, o in enumerate(by_chance[place:], place + 1)),
        )
        assert found[one.value].q_value == pytest.approx(q_value)
    few = {one.value for one in significant(tested, tests, "", alpha=0.05)}
    assert few == {value for value, one in found.items() if one.q_value <= 0.05}
    assert 0 < len(few) < 80


def some(count: int, *pairs: Pair) -> list[set[Pair]]:
    """Messages with the same pairs."""
    return [set(pairs) for _ in range(count)]


def counted(
    inside: list[set[Pair]], outside: list[set[Pair]], against: str
) -> tuple[list[Candidate], int]:
    """The candidates of messages."""
    here, there = (Counter(pair for one in side for pair in one) for side in (inside, outside))
    return candidates(here, there, len(inside), len(outside), against)


def test_values_are_compared_among_those_that_have_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares of hosts are of all messages; of values of arguments, of those with the argument."""
    given_a = ("kwargs.a", None)
    inside = [*some(6, given_a, ("kwargs.a", "x"), ("host", "h")), *some(4, ("host", "g"))]
    outside = [*some(2, given_a, ("kwargs.a", "x")), *some(8, given_a), *some(10, ("host", "g"))]
    found, tests = counted(inside, outside, SAME_TASKS)
    assert found == [
        Candidate("host", "h", 6, 0, 10, 20),
        Candidate("kwargs.a", "x", 6, 2, 6, 10),
        Candidate("kwargs.a", GIVEN, 6, 10, 10, 20),
    ]
    assert tests == 4  # g is more frequent outside
    found, tests = counted(inside, outside, SAME_QUEUES)
    assert (found, tests) == ([Candidate("host", "h", 6, 0, 10, 20)], 2)
    monkeypatch.setattr("celery_dlq.letters.comparison.MOST_TESTED", 1)
    found, tests = counted(inside, outside, SAME_TASKS)
    assert ([one.value for one in found], tests) == (["h"], 4)


def test_what_all_or_few_have_is_no_candidate() -> None:
    """It explains nothing."""
    inside = [*some(4, ("host", "h"), ("release", "v")), *some(6, ("host", "h"))]
    assert counted(inside, some(10, ("host", "h")), SAME_TASKS) == ([], 0)


def test_retries_are_not_compared_with_successes() -> None:
    """What died was retried more often: that is how it died, not why."""
    inside, outside = some(10, ("retries", "3")), some(10, ("retries", "0"))
    assert counted(inside, outside, SUCCESSES) == ([], 0)
    assert counted(inside, outside, SAME_TASKS)[1] == 2


def test_of_nearly_equal_differences_the_release_is_before_the_host() -> None:
    """Arguments are before both; a clear difference is before a kind."""
    shares = {"host": 60, "release": 58, "kwargs.a": 56, "queue": 40, "origin": 50}
    found = [
        next(significant([Candidate(feature, "x", a, 0, 60, 60)], 1, ""))
        for feature, a in shares.items()
    ]
    order = [one.feature for one in ranked(found)]
    assert order == ["kwargs.a", "release", "host", "origin", "queue"]


def test_noise_has_no_findings() -> None:
    """Of hundreds of values without any connection none is significant, seed after seed."""
    for seed in range(5):
        dice = Random(seed)  # noqa: S311 - the same every time
        messages = [
            {(f"kwargs.{name}", str(dice.randrange(30))) for name in "abcdefgh"}
            | {(f"kwargs.{name}", None) for name in "abcdefgh"}
            for _ in range(1_000)
        ]
        tested, tests = counted(messages[:500], messages[500:], SAME_TASKS)
        assert tests > 200
        assert list(significant(tested, tests, "")) == []
