"""Every page that links lead to: no errors, no violations, no sideways scroll, nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import bad_day
import pytest
import redis
from crawling import check_headers, crawl
from looking import expect, sideways, violations, without_script
from served import Pages
from waiting import poll

from celery_dlq import DeadLetters, LetterFilter

QUEUE = "orders-DLQ"
CHANGING = {"edit_form", "redrive_form", "discard_form"}
BROWSED = {
    *("overview", "find", "groups", "group", "differences", "letters", "letter", "discarded"),
    *("jobs", "job", "holds", "held_messages", "held_message", "policies", "audit", *CHANGING),
}


def store_of(client: redis.Redis) -> dict[str, bytes]:
    """All that Redis holds, without what readers themselves leave, and what expires in a second."""
    left = (b":gauges", b":nodes", b":late_copies")
    keys = sorted(key for key in client.scan_iter("*") if not key.endswith(left))
    return {key.decode(): client.dump(key) or b"" for key in keys}


@pytest.fixture
def a_bad_day(dlq: DeadLetters, client: redis.Redis) -> str:
    """Letters, notes, jobs, held messages, an override and a plan; returns the plan's id."""
    bad_day.stored(dlq, client, letters=60)
    group = dlq.groups(QUEUE)[0]
    dlq.note(QUEUE, group.fingerprint, "Somebody looks at it.")
    dlq.discard("mails-DLQ", reason="expired")
    bad_day.held(dlq)
    dlq.override_policy("orders", timedelta(hours=1), max_deliveries=1)
    return dlq.plan("discard", QUEUE, LetterFilter(fingerprint=group.fingerprint)).id


def test_the_first_page_loads_without_a_complaint(
    dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages
) -> None:
    """The overview shows each queue, and nothing is refused by the content policy."""
    bad_day.stored(dlq, client, letters=3)
    answer = page.goto(pages.url)
    check_headers(answer.headers, "the overview")
    shown = page.locator("tbody th a").all_inner_texts()
    assert sorted(shown) == ["mails-DLQ", "orders-DLQ", "reports-DLQ"]


def has_keys(page: Any) -> bool:
    """True if the keyboard reaches each region that scrolls, and its name is told."""
    asked = "(all) => all.every((e) => e.tabIndex === 0 && e.getAttribute('aria-label'))"
    return bool(page.locator(".scroll").evaluate_all(asked))


def looks(page: Any) -> Iterator[str]:
    """Each look of the open page, one after the other; nothing is loaded again."""
    for width, scheme, colours in (
        (320, "light", "none"),
        (360, "dark", "none"),
        (1280, "light", "active"),
        (1280, "dark", "none"),
    ):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme, forced_colors=colours)
        yield f"{page.url}, {width}, {scheme}, forced colours: {colours}"


SMALL = """() => [...document.querySelectorAll('button, .button, input, select, nav a')]
    .filter((e) => e.offsetParent && e.type !== 'hidden')
    .filter((e) => { const b = e.getBoundingClientRect();
                     return Math.min(b.width, b.height) < (e.type === 'checkbox' ? 18 : 24); })
    .map((e) => e.outerHTML.slice(0, 100))"""
"""What is clicked and has less than 24 pixels in a direction, links in a text aside."""


def check_look(page: Any) -> None:
    """Tables scroll inside their region; nothing is small, animated or without its colour."""
    for look in looks(page):
        assert sideways(page) <= 0, look
        assert has_keys(page), look
        assert page.evaluate("() => document.getAnimations().length") == 0, look
        bars = page.locator(".bars rect")
        if "active" in look and bars.count():  # a reason's colour is what a bar says
            assert bars.first.evaluate("(e) => getComputedStyle(e).fill") != "rgb(0, 0, 0)", look
    assert page.evaluate(SMALL) == [], page.url


@pytest.mark.parametrize("script", [True, False], ids=["JavaScript", "none"])
def test_every_page_is_accessible_and_changes_nothing(
    a_bad_day: str,
    context: Callable[..., Any],
    pages: Pages,
    client: redis.Redis,
    *,
    script: bool,
) -> None:
    """Axe finds nothing serious, no page scrolls sideways; Redis holds the same as before."""
    opened = context(reduced_motion="reduce")
    if not script:
        without_script(opened)
    opened.on("response", lambda answer: check_headers(answer.headers, answer.url))
    page = opened.new_page()
    before = store_of(client)
    seen, found = set(), []
    desk, phone = {"width": 1280, "height": 900}, {"width": 360, "height": 900}
    for name, url, status in crawl(page, pages, f"/jobs/{a_bad_day}", "/find?q=nordic"):
        assert status == 200, url
        assert page.title()
        seen.add(name)
        if script:
            check_look(page)
        for size, scheme in ((desk, ("dark", "light")[script]), (phone, ("light", "dark")[script])):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme, forced_colors="none")
            found += violations(page)
    assert found == []
    assert seen == BROWSED
    assert store_of(client) == before


def test_a_phone_shows_rows_as_cards_and_breaks_no_word(
    a_bad_day: str, context: Callable[..., Any], pages: Pages, dlq: DeadLetters
) -> None:
    """Columns were outside of the view, and words were broken: ``ope/n``, ``circui/t``."""
    dlq.hold(queue="orders", reason="the gateway is down")
    broken = """() => {
        const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let node; (node = walk.nextNode());) {
            if (node.parentElement.closest('code, pre, .hidden, thead, [hidden]')) continue;
            for (const word of node.data.matchAll(/[A-Za-z]{2,20}/g)) {
                const range = document.createRange();
                range.setStart(node, word.index);
                range.setEnd(node, word.index + word[0].length);
                const tops = new Set([...range.getClientRects()].map((r) => Math.round(r.top)));
                if (tops.size > 1) found.push(word[0]);
            }
        }
        return found; }"""
    outside = """() => [...document.querySelectorAll('table.list td, table.list button')]
        .filter((e) => e.getBoundingClientRect().right > innerWidth)
        .map((e) => e.outerHTML.slice(0, 100))"""
    page = context(viewport={"width": 360, "height": 740}).new_page()
    paths = ("/", f"/queues/{QUEUE}", f"/queues/{QUEUE}/letters", "/jobs", "/audit", "/holds")
    for path in (*paths, f"/holds/{dlq.holds()[0].hold.id}"):
        page.goto(f"{pages.url}{path}")
        assert page.evaluate(broken) == [], path
        assert page.evaluate(outside) == [], path
    for path in ("/", f"/queues/{QUEUE}/letters"):  # what ends a hold is where the thumb is
        page.goto(f"{pages.url}{path}")
        page.evaluate("() => window.scrollTo(0, 100_000)")
        strip = page.locator(".in-force").bounding_box()
        assert page.locator("footer p").bounding_box()["y"] < strip["y"]  # it hides nothing
        page.locator(".in-force summary").click()
        for down in (0, 100_000):
            page.evaluate("(down) => window.scrollTo(0, down)", down)
            place = page.get_by_role("button", name="Release").last.bounding_box()
            assert 370 < place["y"] < 740 - place["height"]
            assert place["height"] >= 44
    page.goto(pages.url)
    assert page.locator("h1 + p").bounding_box()["y"] < 160  # what burns is the first to be read


def test_the_search_has_a_key_and_completes_what_is_typed(
    a_bad_day: str, page: Any, pages: Pages
) -> None:
    """From any page; where somebody types, the key is a character."""
    page.goto(f"{pages.url}/audit")
    page.keyboard.press("/")
    page.keyboard.type("task=shop.cha", delay=1)
    offered = page.locator("#find-words option")
    expect(offered.first).to_have_attribute("value", "task=shop.charge")
    page.keyboard.type("rge since=/")
    expect(page.locator("#find")).to_have_value("task=shop.charge since=/")
    page.locator("#find").fill("task=shop.charge")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Letters", exact=True)).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile("letters match of "))


def test_ids_and_tracebacks_are_copied_by_a_button(
    a_bad_day: str, page: Any, pages: Pages, dlq: DeadLetters
) -> None:
    """Where the clipboard is closed, the text is selected; without JavaScript, no button."""
    del a_bad_day
    group = dlq.groups(QUEUE)[0]
    page.goto(f"{pages.url}/queues/{QUEUE}/groups/{group.fingerprint}")
    page.evaluate("() => { navigator.clipboard.writeText = (text) => { window.given = text; }; }")
    page.get_by_role("button", name="Copy the fingerprint").click()
    assert page.evaluate("() => window.given") == group.fingerprint
    page.goto(f"{pages.url}/queues/{QUEUE}/letters/{group.example_id}")
    page.evaluate("() => { navigator.clipboard.writeText = () => { throw new Error(); }; }")
    page.get_by_role("button", name="Copy the id of the letter").click()
    assert page.get_by_label("Text to copy").input_value() == group.example_id


def test_answers_that_are_errors_have_the_same_headers(
    a_bad_day: str, pages: Pages, watched: Any, page: Any
) -> None:
    """404, 405, 410, 421 and files, too."""
    watched.allowed.append("Failed to load resource")
    for path, status in (
        ("/nope", 404),
        ("/queues/nope-DLQ", 404),
        ("/jobs/nope", 404),
        (f"/queues/{QUEUE}/letters/00000000-0000-0000-0000-000000000000", 410),
        (f"/queues/{QUEUE}/letters/00000000-0000-0000-0000-000000000000/edit", 410),
        (f"/queues/{QUEUE}/letters?since=yesterday", 400),
        (f"/queues/{QUEUE}/letters?cursor=x", 400),
        ("/static/0/style.css", 404),
        ("/healthz", 200),
        ("/events/poll", 200),
        (f"/queues/{QUEUE}/export/jsonl", 200),
    ):
        got, headers, body = pages.get(path)
        assert got == status, (path, body[:500])
        check_headers(headers, path)
        if "html" in headers["content-type"]:
            assert page.goto(pages.url + path).status == status
            assert page.locator("h1").count() == 1, path
    got, headers, _ = pages.get("/policies/unset")
    assert (got, headers["allow"]) == (405, "POST")
    check_headers(headers, "a method that is none")


def test_a_page_that_fails_says_so_without_a_traceback(
    dlq: DeadLetters, client: redis.Redis, serve: Callable[..., Pages], page: Any, watched: Any
) -> None:
    """A store in which something has the wrong type: status and headers stay right."""
    bad_day.stored(dlq, client, letters=2)
    pages = serve()
    watched.allowed.append("Failed to load resource")
    tally = next(key for key in client.scan_iter("*tally*") if b"orders" in key)
    client.delete(tally)
    client.set(tally, "no hash")
    answer = page.goto(f"{pages.url}/queues/{QUEUE}")
    assert answer.status in (500, 503)
    check_headers(answer.headers, "an error")
    assert "Traceback" not in page.content()
    poll(lambda: page.locator("h1").count() == 1)
