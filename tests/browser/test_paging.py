"""Paging to the end while letters arrive: no letter twice, none skipped."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from builders import DLQ, a_letter, key_of
from looking import press
from served import Pages
from waiting import poll

from celery_dlq import DeadLetters

BEFORE = 420
A_SECOND = 200


class Inflow(threading.Thread):
    """Stores letters, so many a second, until told to stop."""

    def __init__(self, dlq: DeadLetters) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.ids: list[str] = []
        self._dlq = dlq

    def run(self) -> None:
        """Store letters."""
        begun = time.monotonic()
        while not self.stop.is_set():
            letter = a_letter()
            self._dlq.store.dead_letter(letter, key_of(letter))
            self.ids.append(letter.id)
            self.stop.wait(max(0.0, begun + len(self.ids) / A_SECOND - time.monotonic()))


def test_no_letter_is_skipped_or_shown_twice(dlq: DeadLetters, page: Any, pages: Pages) -> None:
    """From the newest page to the oldest and back to the newest, while letters arrive."""
    stored = []
    for _ in range(BEFORE):
        letter = a_letter()
        dlq.store.dead_letter(letter, key_of(letter))
        stored.append(letter.id)
    inflow = Inflow(dlq)
    inflow.start()
    try:
        poll(lambda: len(inflow.ids) > 20)
        page.goto(f"{pages.url}/queues/{DLQ}/letters")
        seen = rows(page)
        while page.get_by_role("link", name="Older").count():
            press(page, "link", "Older")
            seen += rows(page)
        assert len(seen) == len(set(seen))
        assert seen[-BEFORE:] == stored[::-1]
        back = rows(page)
        while page.get_by_role("link", name="Newer").count() and len(back) < len(seen):
            press(page, "link", "Newer")
            back = rows(page) + back
        assert len(back) == len(set(back))
        assert back[-BEFORE:] == stored[::-1]
    finally:
        inflow.stop.set()
        inflow.join()


def rows(page: Any) -> list[str]:
    """The ids of the letters that the page shows."""
    script = "() => [...document.querySelectorAll('input[name=ids]')].map((box) => box.value)"
    return list(page.evaluate(script))


def test_one_click_searches_until_a_letter_is_found(
    dlq: DeadLetters, page: Any, pages: Pages
) -> None:
    """Each answer is a part of the search; the browser asks on, and shows the one with a letter."""
    letter = a_letter()
    dlq.store.dead_letter(letter, key_of(letter))
    here, asked = f"{pages.url}/queues/{DLQ}/letters", []

    def answer(route: Any) -> None:
        part = int(route.request.url.rpartition("=")[2])
        asked.append(part)
        found = route.fetch(url=here)
        text = found.text()
        if part < 3:
            link = f'<a data-searched="1000" href="?part={part + 1}">Search on from here</a></main>'
            text = text.replace('name="ids"', 'name="none"').replace("</main>", link)
        route.fulfill(response=found, body=text)

    page.route(re.compile(r"\?part="), answer)
    page.goto(f"{here}?part=0")
    press(page, "link", "Search on from here")
    assert rows(page) == [letter.id]
    assert page.url.endswith("?part=3")
    assert asked == [0, 1, 2, 3, 3]
