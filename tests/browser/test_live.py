"""Live numbers: asked for by one tab for all, again after a restart, by each without locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import DLQ, a_letter, key_of
from looking import Watched, expect, press
from served import Pages
from waiting import poll

from celery_dlq import DeadLetters

NUMBER = f'[data-live="letters:{DLQ}"]'
BEFORE = 3


@pytest.fixture
def letters(dlq: DeadLetters) -> Callable[[int], None]:
    """Store letters; some are there from the beginning."""

    def store(count: int) -> None:
        for _ in range(count):
            letter = a_letter(dead_lettered_at=dlq.store.now())
            dlq.store.dead_letter(letter, key_of(letter))

    store(BEFORE)
    return store


def heard(page: Any) -> None:
    """Wait until the page has loaded what it needs, and mark it."""
    page.wait_for_function("() => performance.getEntriesByType('resource').length > 0")
    page.evaluate("window.same = true")


def test_numbers_change_without_a_reload(
    letters: Callable[[int], None], page: Any, pages: Pages
) -> None:
    """Within seconds: an open page asks every three."""
    page.goto(pages.url)
    heard(page)
    letters(2)
    expect(page.locator(NUMBER)).to_have_text(str(BEFORE + 2), timeout=10_000)
    expect(page.locator(f'[data-live="hour:{DLQ}"]')).to_have_text(str(BEFORE + 2))
    assert page.evaluate("window.same")


def test_one_of_ten_tabs_asks_for_all(
    letters: Callable[[int], None], context: Callable[..., Any], pages: Pages
) -> None:
    """A browser has six connections to a server."""
    window = context()
    asked: list[str] = []
    window.on("request", lambda request: asked.append(request.url))
    tabs = [window.new_page() for _ in range(10)]
    for tab in tabs:
        tab.goto(pages.url)
    letters(1)
    for tab in tabs:
        expect(tab.locator(NUMBER)).to_have_text(str(BEFORE + 1), timeout=15_000)
    assert len([url for url in asked if url.endswith("/events/poll")]) < len(tabs)
    tabs[0].close()  # the one that asked
    letters(1)
    for tab in tabs[1:]:
        expect(tab.locator(NUMBER)).to_have_text(str(BEFORE + 2), timeout=15_000)
    press(tabs[9], "link", DLQ)
    assert DLQ in tabs[9].locator("h1").inner_text()


def test_a_restarted_server_is_heard_again(
    letters: Callable[[int], None], page: Any, pages: Pages, watched: Watched
) -> None:
    """SIGTERM ends the server in its grace time."""
    watched.allowed.append("Failed to load resource")
    page.goto(pages.url)
    heard(page)
    letters(1)
    expect(page.locator(NUMBER)).to_have_text(str(BEFORE + 1), timeout=15_000)
    assert pages.stop() < 7
    assert pages.process.returncode == 0
    letters(1)
    pages.start()
    expect(page.locator(NUMBER)).to_have_text(str(BEFORE + 2), timeout=30_000)
    assert page.evaluate("window.same")


def test_without_shared_locks_each_tab_asks(
    letters: Callable[[int], None], context: Callable[..., Any], pages: Pages
) -> None:
    """Browsers have them only on https and localhost."""
    window = context()
    window.add_init_script("Object.defineProperty(navigator, 'locks', {value: undefined})")
    page = window.new_page()
    with page.expect_response("**/events/poll"):
        page.goto(pages.url)
    letters(1)
    expect(page.locator(NUMBER)).to_have_text(str(BEFORE + 1), timeout=20_000)


def test_new_letters_are_announced_and_move_nothing(
    letters: Callable[[int], None], page: Any, pages: Pages
) -> None:
    """Rows stay where they are, ticked ones ticked; the link shows the new ones."""
    page.goto(f"{pages.url}/queues/{DLQ}/letters")
    heard(page)
    boxes = page.locator("input[name=ids]")
    boxes.nth(0).check()
    boxes.nth(2).check()
    where = (
        "() => [...document.querySelectorAll('tbody tr, button')].map("
        "(e) => [e.textContent.slice(0, 20), e.getBoundingClientRect().top])"
    )
    before = page.evaluate(where)
    expect(page.get_by_text("2 ticked")).to_be_visible()
    letters(2)
    link = page.get_by_role("link", name="2 new letters, show")
    link.wait_for(timeout=15_000)
    assert page.evaluate(where) == before
    assert [boxes.nth(n).is_checked() for n in range(3)] == [True, False, True]
    assert page.evaluate("window.same")
    link.click()
    expect(page.locator("tbody tr")).to_have_count(BEFORE + 2)


def test_ticking_all_and_redriving_the_ticked(
    letters: Callable[[int], None], dlq: DeadLetters, page: Any, pages: Pages
) -> None:
    """Only what was ticked is planned."""
    page.goto(f"{pages.url}/queues/{DLQ}/letters")
    page.locator("input[name=ids]").nth(1).check()
    chosen = page.locator("input[name=ids]").nth(1).get_attribute("value")
    press(page, "button", "Discard ticked")
    press(page, "button", "Show what would be discarded")
    assert "Discard 1 letter of" in page.locator("h1").inner_text()
    page.get_by_label("Type the name").fill(DLQ)
    press(page, "button", "Discard 1 letter")
    poll(lambda: len(list(dlq.letters(DLQ))) == BEFORE - 1)
    assert chosen not in [letter.id for letter in dlq.letters(DLQ)]
