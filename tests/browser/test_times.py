"""Times as the viewer's clock and zone have them, with UTC beside."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from builders import DLQ, a_letter, key_of
from served import Pages

from celery_dlq import DeadLetter, DeadLetters


@pytest.fixture
def letter(dlq: DeadLetters) -> DeadLetter:
    """A letter of ten minutes ago."""
    made = a_letter(dead_lettered_at=datetime.now(timezone.utc) - timedelta(minutes=10, seconds=20))
    dlq.store.dead_letter(made, key_of(made))
    return made


def test_a_viewer_in_kolkata_sees_both_zones(
    letter: DeadLetter, context: Callable[..., Any], pages: Pages
) -> None:
    """The local time with the name of its zone, and UTC."""
    page = context(timezone_id="Asia/Kolkata", locale="en-IN").new_page()
    page.goto(f"{pages.url}/queues/{DLQ}/letters/{letter.id}")
    died = letter.dead_lettered_at
    local = died + timedelta(hours=5, minutes=30)
    shown = page.locator("dt:text-is('died') + dd time")
    said = rf"{local:%Y-%m-%d %H:%M:%S} (IST|GMT\+5:30) \({died:%H:%M:%S} UTC\)"
    assert re.fullmatch(said, shown.inner_text())
    title = shown.get_attribute("title")
    assert "Asia/" in title
    assert f"{died:%Y-%m-%d %H:%M:%S} UTC" in title
    relative = page.locator("time[data-ago]").first
    assert relative.inner_text() == "10 min ago"
    assert "Asia/" in relative.get_attribute("title")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_clock_does_not_age_letters(
    letter: DeadLetter, context: Callable[..., Any], pages: Pages, hours: int
) -> None:
    """What is relative goes by the server's clock, also later."""
    page = context().new_page()
    page.add_init_script(f"const now = Date.now; Date.now = () => now() + {hours * 3_600_000};")
    page.goto(f"{pages.url}/queues/{DLQ}/letters")
    assert page.locator("tbody time").first.inner_text() == "10 min ago"


def test_without_javascript_times_are_utc(
    letter: DeadLetter, context: Callable[..., Any], pages: Pages
) -> None:
    """Nothing depends on the script."""
    page = context(java_script_enabled=False, timezone_id="Asia/Kolkata").new_page()
    page.goto(f"{pages.url}/queues/{DLQ}/letters/{letter.id}")
    shown = page.locator("dt:text-is('died') + dd time").inner_text()
    assert shown == f"{letter.dead_lettered_at:%Y-%m-%d %H:%M:%S} UTC"
