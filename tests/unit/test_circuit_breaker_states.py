"""The state machine of circuit breakers: a pure function, and its policy key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import SettingsError
from celery_dlq.features.circuit_breaker.policy import (
    PROBES,
    CircuitBreaker,
    Died,
    Ends,
    Happened,
    next_state,
)
from celery_dlq.letters.record import from_micros
from celery_dlq.policies.policy import Policy
from celery_dlq.store.holds import OPEN, RELEASING, Circuit, Hold

SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND
BREAKER = CircuitBreaker(deaths=5, window=60)
OPENED = Circuit(
    opened_at=NOW, fingerprint="f", letter="l", probe_every=30, probes=PROBES, probed_at=NOW
)
RELEASES = replace(OPENED, state=RELEASING, successes=PROBES)
LATER = NOW + 40 * SECOND


def died(deaths: int, total: int, fingerprint: str = "f", *, released: bool = False) -> Died:
    """A death among others."""
    return Died(Ends(deaths, total), fingerprint, "l", released)


def state_of(circuit: Circuit | None) -> str:
    """The state in a word."""
    return "closed" if circuit is None else circuit.state


@pytest.mark.parametrize(
    ("before", "happened", "after"),
    [
        (None, died(4, 4), "closed"),
        (None, died(5, 5), OPEN),
        (None, died(9, 10), OPEN),
        (None, died(89, 100), "closed"),
        (None, Happened.OPENED, OPEN),
        (None, Happened.CLOSED, "closed"),
        (None, Happened.PROBE_SUCCEEDED, "closed"),
        (None, Happened.PROBE_DUE, "closed"),
        (None, Happened.EMPTIED, "closed"),
        (OPENED, died(9, 9), OPEN),
        (OPENED, Happened.CLOSED, RELEASING),
        (OPENED, Happened.EMPTIED, OPEN),
        (OPENED, Happened.PROBE_SUCCEEDED, OPEN),
        (replace(OPENED, successes=PROBES - 1), Happened.PROBE_SUCCEEDED, RELEASING),
        (replace(OPENED, successes=1), Happened.PROBE_FAILED, OPEN),
        (RELEASES, died(1, 100, released=True), OPEN),
        (RELEASES, died(1, 100), RELEASING),
        (RELEASES, died(1, 100, "another", released=True), RELEASING),
        (RELEASES, died(5, 5, "another"), OPEN),
        (RELEASES, Happened.OPENED, OPEN),
        (RELEASES, Happened.CLOSED, RELEASING),
        (RELEASES, Happened.PROBE_DUE, RELEASING),
        (RELEASES, Happened.PROBE_FAILED, RELEASING),
        (RELEASES, Happened.EMPTIED, "closed"),
    ],
)
def test_the_table(before: Circuit | None, happened: Happened, after: str) -> None:
    """Each state with each thing that can happen."""
    assert state_of(next_state(BREAKER, before, happened, LATER)) == after


def test_what_changes_nothing_returns_the_same_object() -> None:
    """Then nothing is written."""
    for before in (None, OPENED, RELEASES):
        assert next_state(BREAKER, before, died(1, 100), LATER) is before
    assert next_state(BREAKER, OPENED, Happened.PROBE_DUE, NOW + 29 * SECOND) is OPENED
    assert next_state(BREAKER, OPENED, Happened.PROBE_FAILED, LATER) is OPENED


def test_probes_are_sent_one_after_the_other() -> None:
    """The next one is due half a minute after the last one, or after the opening."""
    assert OPENED.micros_until_probe(NOW) == 30 * SECOND
    probing = next_state(BREAKER, OPENED, Happened.PROBE_DUE, LATER)
    assert probing == replace(OPENED, probed_at=LATER)


def test_an_opening_names_its_cause_and_begins_anew() -> None:
    """Messages that were released before are held again: the mark is another, and later."""
    again = next_state(BREAKER, RELEASES, died(1, 9, released=True), NOW - SECOND)
    assert again is not None
    assert (again.fingerprint, again.letter, again.successes) == ("f", "l", 0)
    assert again.opened_at == NOW + 1, "later, also by a clock that was set back"


def test_a_hold_admits_what_it_released_since_its_breaker_opened() -> None:
    """Not what it released before; and a hold of a person admits what it ever released."""
    hold = Hold(id="breaker-1", since=from_micros(NOW), circuit=OPENED)
    before = replace(hold, circuit=replace(OPENED, opened_at=NOW - 1))
    assert hold.admits(hold.marker)
    assert before.admits(hold.marker)
    assert not hold.admits(before.marker)
    for odd in ("breaker-1", "breaker-1.", "breaker-1.x", f"other.{NOW}", None, 7, "²." * 9):
        assert not hold.admits(odd)
    plain = replace(hold, circuit=None)
    assert plain.admits(plain.marker)
    assert not plain.admits(None)


@given(
    happenings=st.lists(
        st.one_of(
            st.builds(
                Died,
                st.builds(Ends, st.integers(0, 9), st.integers(0, 9)),
                st.sampled_from("fg"),
                st.just("l"),
                st.booleans(),
            ),
            st.sampled_from(Happened),
        ),
        max_size=60,
    ),
    seconds=st.lists(st.integers(-5, 60), min_size=60, max_size=60),
)
def test_whatever_happens(happenings: list[Any], seconds: list[int]) -> None:
    """It closes only by probes or a person, opens only by deaths or a person, marks only grow."""
    circuit, now, in_a_row, newest = None, NOW, 0, 0
    for happened, passed in zip(happenings, seconds, strict=False):
        now += passed * SECOND
        before, circuit = circuit, next_state(BREAKER, circuit, happened, now)
        was, is_ = state_of(before), state_of(circuit)
        assert (was, is_) not in {("closed", RELEASING), (OPEN, "closed")}
        if (was, is_) in {("closed", OPEN), (RELEASING, OPEN)}:
            assert isinstance(happened, Died) or happened is Happened.OPENED
            assert circuit is not None
            assert was == "closed" or circuit.opened_at > newest
            in_a_row = 0
        if happened in (Happened.PROBE_SUCCEEDED, Happened.PROBE_FAILED) and was == OPEN:
            in_a_row = in_a_row + 1 if happened is Happened.PROBE_SUCCEEDED else 0
        if (was, is_) == (OPEN, RELEASING):
            assert happened is Happened.CLOSED or in_a_row == PROBES
        if circuit is not None:
            newest = circuit.opened_at


def test_the_policy_takes_any_of_the_keys() -> None:
    """And shows all of them; what it shows, it takes."""
    assert Policy.parse({"circuit_breaker": {}}, "p").of("circuit_breaker") == CircuitBreaker()
    given_ = {"deaths": 5, "window": 9}
    policy = Policy.parse({"circuit_breaker": given_}, "p")
    assert policy.to_json() == {"circuit_breaker": given_}
    assert Policy.parse(policy.to_json(), "p") == policy


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "expected p['circuit_breaker'] to be a mapping of deaths, window"),
        ({"death": 3}, "did you mean 'deaths'?"),
        ({"deaths": 0}, "p['circuit_breaker']['deaths'] to be a whole number of 1 or more, got 0"),
        ({"deaths": 2.5}, "a whole number of 1 or more, got 2.5"),
        ({"window": 0}, "more than 0 and at most 86,400 seconds, got 0"),
        ({"window": -1}, "more than 0 and at most 86,400 seconds, got -1"),
        ({"window": "2d"}, "more than 0 and at most 86,400 seconds, got '2d'"),
    ],
)
def test_a_value_that_is_none_is_refused(value: object, said: str) -> None:
    """With what was expected."""
    with pytest.raises(SettingsError) as caught:
        Policy.parse({"circuit_breaker": value}, "p")
    assert said in str(caught.value)
