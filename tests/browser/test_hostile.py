"""What a hostile publisher writes is text on every page, and no page grows without bound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
import redis
from builders import a_letter, a_request, an_ended_delivery, key_of
from crawling import crawl
from looking import Watched, press, sideways, violations
from served import Pages

from celery_dlq import DeadLetters
from celery_dlq.store.keys import Keys

MOST_BYTES = 1_500_000
"""Of a page."""
BIG_BYTES = 5_000_000
"""Of a body: more than a page may have."""
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LINK = "javascript:alert(3)"
QUOTES = "\"' onmouseover=alert(4) x='{{ 7 * 7 }}"
BIDI = "safe\u202eexe.\u2066 \x1b[31m\x00\x7f"
LONE = "half \ud83d of a face"
PATHS = ("a/b%2Fc?d#e", "..", "a b;&=+\\", "ü🦄", "%", "\x1b[31m")
QUEUE = f"a/b%2F?#{SCRIPT[:12]}'\" -DLQ"


def deep(levels: int) -> str:
    """Nested lists, as JSON."""
    return "[" * levels + "]" * levels


@pytest.fixture
def evil(dlq: DeadLetters, client: redis.Redis, watched: Watched) -> list[str]:
    """Store hostile letters and entries that are none; returns the ids."""
    # Reading them may take more than the two seconds of a page, which is asked for again.
    watched.allowed.append("Failed to load resource: the server responded with a status of 503")
    ids = []
    for number, text in enumerate((SCRIPT, LINK, QUOTES, BIDI, LONE, *PATHS, "", "x" * 5000)):
        raw = json.dumps(text)
        letter = a_letter(
            task_id=text or "",
            id=f"{number:08d}-0000-5000-8000-000000000000",
            task_name=text,
            source_queue=text or "orders",
            dead_letter_queue=QUEUE,
            description=f"{text} said {text}",
            exception_type=text or None,
            exception_message=text,
            traceback=f'Traceback (most recent call last):\n  File "{text}", line 1, in {text}\n'
            f"    {text}\n{text}: {text}",
            fingerprint=f"{number:016x}",
            args_json=f"[{raw}]",
            kwargs_json=f'{{{raw}: {raw}, "url": "{LINK}"}}',
            headers=json.dumps({**a_request(task=text, id=text), text: text, "url": LINK}),
            properties=json.dumps({"reply_to": text}),
            history=(an_ended_delivery(worker_hostname=text, exception_message=text),),
            worker_hostname=text,
            origin=text,
            release=text.replace("|", "").replace(",", "") or None,
            root_id=text,
            group_id=text,
            body=f'[[{raw}], {{{raw}: {raw}}}, {{"chain": [{{"task": {raw}}}]}}]'.encode(),
            content_type="application/json",
        )
        dlq.store.dead_letter(letter, key_of(letter))
        dlq.note(QUEUE, letter.fingerprint, text[:1000] or "nothing")
        ids.append(letter.id)
    for number, body in enumerate((f"[{deep(900)}, {{}}, {{}}]".encode(), b"[" + b"9" * BIG_BYTES)):
        letter = a_letter(
            id=f"{number:08d}-1111-5000-8000-000000000000",
            dead_letter_queue=QUEUE,
            body=body,
            args_json=deep(900) if number == 0 else None,
            kwargs_json=None,
            fingerprint="e" * 16,
        )
        dlq.store.dead_letter(letter, key_of(letter))
        ids.append(letter.id)
    for fields in ({"x": SCRIPT}, {b"\xff\x00": b"\xfe" * 300_000}, {"id": "", "reason": LINK}):
        client.xadd(Keys().letters(QUEUE), fields)
    return ids


def test_hostile_letters_are_text_everywhere(
    evil: list[str], page: Any, pages: Pages, dlq: DeadLetters
) -> None:
    """No dialog, no complaint, no link that runs something, status 200, a page of bounded size."""
    queue = quote(quote(QUEUE, safe=""), safe="")
    dlq.discard(QUEUE, ids=[evil[2]])
    links = (
        "() => [...document.querySelectorAll('[href], [src], [action]')].map((e) =>"
        " e.getAttribute('href') || e.getAttribute('src') || e.getAttribute('action') || '')"
    )
    starts = [f"/queues/{queue}/letters/{letter_id}" for letter_id in evil if letter_id != evil[2]]
    starts += [
        f"/queues/{queue}/groups/{number:016x}" for number in range(len(evil) - 2) if number != 2
    ]
    starts += ["/find?q=alert", "/find?q=" + quote(SCRIPT)]
    opened = 0
    for name, url, status in crawl(page, pages, *starts, most=30, tries=4):
        assert status == 200, (name, url, page.inner_text("main")[:500])
        opened += 1
        content = page.content()
        assert len(content.encode("utf-8", "replace")) < MOST_BYTES, url
        assert "<script>alert" not in content
        assert "\u202e" not in content
        assert "\x1b" not in content
        for link in page.evaluate(links):
            own = ("/", "#", "data:", f"{pages.url}/queues/")  # the last: a link to be copied
            assert link.startswith(own) or link == "", (url, link)
        assert page.locator("img").count() == 0
        assert sideways(page) <= 0, url
    assert opened > 40
    page.goto(f"{pages.url}/queues/{queue}/letters")
    said = page.inner_text("main")
    while page.get_by_role("link", name=re.compile("Older|Search on")).count():
        press(page, "link", re.compile("Older|Search on"))
        said += page.inner_text("main")
    for text in (SCRIPT[:25], LINK, "\\u202e", "\\ud83d", "not a letter"):
        assert text in said, text


def test_hostile_letters_on_a_narrow_page(
    evil: list[str], context: Callable[..., Any], pages: Pages
) -> None:
    """Names without a place to break stay inside; axe finds nothing either."""
    queue = quote(quote(QUEUE, safe=""), safe="")
    page = context(viewport={"width": 320, "height": 700}).new_page()
    starts = [f"/queues/{queue}/letters/{evil[-3]}", f"/queues/{queue}/groups/{12:016x}"]
    for _, url, status in crawl(page, pages, *starts, tries=4):
        assert status == 200, url
        assert sideways(page) <= 0, url
        assert violations(page) == []


def test_entries_that_are_no_letters_can_be_looked_at_and_discarded(
    evil: list[str], dlq: DeadLetters, page: Any, pages: Pages
) -> None:
    """Each has a page; a big body is a file."""
    queue = quote(quote(QUEUE, safe=""), safe="")
    page.goto(f"{pages.url}/queues/{queue}/letters")
    rows = page.locator("tr:has(.bad) th a")
    assert rows.count() == 3
    rows.first.click()
    assert "is not a letter" in page.locator("h1").inner_text()
    press(page, "link", "Discard")
    press(page, "button", "Show what would be discarded")
    page.get_by_label("Type the name").fill(QUEUE)
    page.locator("main form button").click()
    page.locator("main [data-job-state]:text-is('done')").wait_for()
    page.goto(f"{pages.url}/queues/{queue}/letters")
    assert page.locator("tr:has(.bad) th a").count() == 2
    status, headers, body = pages.get(f"/queues/{queue}/letters/{evil[-1]}/body")
    assert (status, len(body)) == (200, 1 + BIG_BYTES)
    assert headers["content-disposition"].startswith("attachment")
