"""The test of one value, and the order of findings."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters.comparison import (
    GIVEN,
    RANGE,
    SAME_TASKS,
    Significant,
    fisher_probability,
    ranked_findings,
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
    assert fisher_probability(*table) == pytest.approx(fisher(*table), rel=1e-9)


@pytest.mark.parametrize(
    "table",
    [(30, 100, 100, 900), (700, 300, 2_000, 2_000), (5, 0, 6, 2_000), (1_010, 990, 2_000, 2_000)],
)
def test_the_probability_of_large_tables_is_exact(table: tuple[int, int, int, int]) -> None:
    """The same with as many messages as are compared."""
    assert fisher_probability(*table) == pytest.approx(fisher(*table), rel=1e-8)


def test_a_million_letters_overflow_nothing() -> None:
    """The certain is 0, not an error; the even is about a half."""
    assert fisher_probability(400_000, 10, 500_000, 500_000) == 0.0
    assert fisher_probability(100_000, 100_000, 500_000, 500_000) == pytest.approx(0.5, abs=0.01)


def test_of_nearly_equal_differences_the_release_is_before_the_host() -> None:
    """Arguments are before both; a clear difference is before a kind, a value before a range."""
    shares = {"host": 60, "release": 58, "kwargs.a": 56, "queue": 40, "origin": 50}
    found = [significant(feature, a) for feature, a in shares.items()]
    found.append(significant("kwargs.b", 57, kind=RANGE))
    found.append(significant("kwargs.c", 60, value=GIVEN))
    order = [one.feature for one in ranked_findings(found)]
    assert order == ["kwargs.a", "release", "host", "kwargs.b", "kwargs.c", "origin", "queue"]


def significant(feature: str, a: int, **changes: str) -> Significant:
    """What ``a`` of 60 letters have, and no other message."""
    return Significant(
        **{"feature": feature, "value": "x", "against": SAME_TASKS, **changes},
        letters=a,
        of_letters=60,
        others=0,
        of_others=60,
        share_here=a / 60,
        share_elsewhere=0,
        lift=2 * a,
        p_value=1e-9,
        q_value=1e-9,
    )
