"""When a job starts, as operators write it."""

from __future__ import annotations

from datetime import datetime, timezone

import click
import pytest

from celery_dlq.cli.options import START_TIME

NOON = datetime(2026, 1, 31, 12, 0, 30, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("13:30", "2026-01-31T13:30:00+00:00"),
        ("9:00", "2026-02-01T09:00:00+00:00"),
        ("12:00", "2026-02-01T12:00:00+00:00"),
        ("+30m", "2026-01-31T12:30:30+00:00"),
        ("2026-03-01T09:00", "2026-03-01T09:00:00+00:00"),
        ("2026-03-01T09:00+01:00", "2026-03-01T09:00:00+01:00"),
    ],
)
def test_a_start_is_a_time_of_the_stores_clock(text: str, moment: str) -> None:
    """The next nine o'clock is tomorrow's if it is later by now."""
    assert START_TIME.convert(text, None, None)(NOON).isoformat() == moment


@pytest.mark.parametrize("text", ["24:00", "9", "+soon", "30m", "tomorrow", ""])
def test_what_is_no_start_is_a_usage_error(text: str) -> None:
    """An age is a time of the past."""
    with pytest.raises(click.UsageError, match="expected a time such as 09:00"):
        START_TIME.convert(text, None, None)
