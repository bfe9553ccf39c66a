"""Names of partitions, files and notes."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from celery_dlq.export.partition import (
    MICROSECONDS_A_DAY,
    NO_VALUE,
    day_value,
    file_name,
    note_name,
    queue_value,
    range_of,
)


@pytest.mark.parametrize("name", ["orders-DLQ", "süß", "a b", "_x", "3d-render", "order.v2"])
def test_ordinary_names_stay_as_they_are(name: str) -> None:
    """A person finds the folder of a queue."""
    assert queue_value(name) == name


@pytest.mark.parametrize(
    "name",
    ["007", "100", "1.5", "-3", "1e5", "2026-01-31", "12:30", "NaN", "null", "1d", "Epoch "],
)
def test_a_name_that_readers_would_take_for_a_number_or_a_day_is_marked(name: str) -> None:
    """A partition column is text whatever the queues are called; no two names become one."""
    assert unquote(queue_value(name)) == f"{name}~"
    assert unquote(queue_value(f"{name}~")) == f"{name}~~"


@pytest.mark.parametrize("name", ["a/b", "50%=x:y", "tab\tnul\x00", 'quo"te', "a[1]{b}"])
def test_odd_characters_are_escaped_and_read_back(name: str) -> None:
    """As Spark writes them: percent and two digits."""
    assert "/" not in queue_value(name)
    assert unquote(queue_value(name)) == name


def test_a_name_that_is_too_long_for_a_folder_is_cut_and_stays_its_own() -> None:
    """File systems take 255 bytes."""
    one, other = queue_value("ü" * 300), queue_value("ü" * 299 + "u")
    assert len(one.encode()) < 200
    assert one != other
    assert len(note_name("ü" * 300)) < 200


def test_an_empty_name_has_no_value() -> None:
    """Readers show null; the column in the files has the value."""
    assert queue_value("") == NO_VALUE


def test_days_are_days_also_before_1970() -> None:
    """A microsecond before 1970 is in 1969."""
    assert day_value(0) == "1970-01-01"
    assert day_value(-1 // MICROSECONDS_A_DAY) == "1969-12-31"


@pytest.mark.parametrize("day", [None, 10**7, -(10**7)])
def test_a_day_of_no_calendar_has_no_value(day: int | None) -> None:
    """One odd date does not make a text of all days."""
    assert day_value(day) == NO_VALUE


def test_a_file_tells_its_range() -> None:
    """A name says what is in a file; other files are not ours."""
    assert range_of(file_name(None, "5-1")) == (0, "0-0", "5-1")
    assert range_of(file_name("5-1", "7-0", 12)) == (12, "5-1", "7-0")
    assert range_of("part-0.parquet") is None
