"""A redrive with a canary from click to verdict: with a mouse, without JavaScript, by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bad_day
import pytest
import redis
from looking import expect, press
from served import Pages, Worker
from waiting import poll

from celery_dlq import DeadLetters

QUEUE = "orders-DLQ"
LETTERS = 30


@pytest.fixture
def charges(dlq: DeadLetters, client: redis.Redis) -> list[int]:
    """Some letters of each cause; the orders of the one that is redriven."""
    stored = bad_day.stored(dlq, client, letters=LETTERS)
    return [
        int(letter.args_json.strip("[]"))
        for letter in stored
        if letter.exception_type == "shop.payments.GatewayTimeout"
    ]


def to_plan(page: Any, pages: Pages) -> None:
    """From the overview to the plan of a redrive with a canary."""
    page.goto(pages.url)
    press(page, "link", QUEUE)
    press(page, "link", "shop.payments.GatewayTimeout")
    press(page, "link", f"Redrive {LETTERS} letters")
    page.get_by_label("Letters in the canary").fill("5")
    press(page, "button", "Show what would happen")
    assert f"Redrive {LETTERS} letters of {QUEUE}?" in page.locator("h1").inner_text()
    for said in ("Nothing has been done yet", "consumed by celery@", "registered by celery@"):
        assert said in page.locator("main").inner_text()


def has_ended(page: Any, dlq: DeadLetters, runs: redis.Redis, charges: list[int]) -> None:
    """The page of the job says so, and it is so."""
    said = page.locator("main").inner_text()
    assert f"{LETTERS} of {LETTERS} letters" in said
    assert "5 of 5 succeeded. Verdict: passed" in said
    assert list(dlq.letters(QUEUE, exception_type="shop.payments.GatewayTimeout")) == []
    assert len(list(dlq.letters(QUEUE))) == 3 * LETTERS - 12  # others stay
    poll(lambda: all(runs.llen(f"charge:{order}") == 1 for order in charges), timeout_seconds=30)


def test_a_redrive_from_click_to_verdict(
    page: Any,
    pages: Pages,
    worker: Worker,
    dlq: DeadLetters,
    runs: redis.Redis,
    charges: list[int],
) -> None:
    """The page of the job shows the canary's verdict and the end without being asked again."""
    to_plan(page, pages)
    press(page, "button", f"Try 5 letters, then redrive {LETTERS - 5} more")
    expect(page.locator("main [data-job-state]")).to_have_text("done", timeout=30_000)
    has_ended(page, dlq, runs, charges)
    page.goto(f"{pages.url}/audit")
    assert "redriven" in page.locator("tbody tr").first.inner_text()


def test_the_ends_of_messages_are_shown_without_a_reload(
    page: Any, pages: Pages, dlq: DeadLetters, client: redis.Redis, charges: list[int]
) -> None:
    """They run after the job has ended: its page asks for them, up to the last."""
    report = dlq.redrive(QUEUE, exception_type="GatewayTimeout", force=True)
    keys = dlq.assembly.backend.keys
    client.hset(keys.successes(), report.redrive_id, LETTERS - 5)
    page.goto(f"{pages.url}/jobs/{report.redrive_id}")
    watching = page.locator("[data-phases] li").last
    expect(watching).to_contain_text(f"{LETTERS - 5} succeeded")
    page.evaluate("window.same = true")
    client.hset(keys.successes(), report.redrive_id, LETTERS)
    expect(watching).to_contain_text(f"{LETTERS} succeeded", timeout=20_000)
    assert page.evaluate("window.same")
    text = page.locator("main").inner_text()
    assert "shop.payments.GatewayTimeout" in text  # the cause that it emptied


def test_a_hold_is_named_on_the_way_and_is_no_death(
    page: Any, pages: Pages, worker: Worker, dlq: DeadLetters, charges: list[int]
) -> None:
    """The plan names it before, the page of the job with its verdict after."""
    hold = dlq.hold(queue="orders", reason="gateway down")
    poll(lambda: hold.id in worker.output, timeout_seconds=30)
    page.goto(f"{pages.url}/queues/{QUEUE}/redrive?exception_type=GatewayTimeout")
    page.get_by_label("Letters in the canary").fill("5")
    press(page, "button", "Show what would happen")
    said = page.locator("main").inner_text()
    assert f"{LETTERS} messages would wait for {hold.id} of " in said
    press(page, "button", f"Try 5 letters, then redrive {LETTERS - 5} more")
    expect(page.locator("main [data-job-state]")).to_have_text("stopped", timeout=30_000)
    said = page.locator("main").inner_text()
    assert "0 of 5 succeeded, 5 open (5 held). Verdict: held" in said
    assert f"the canary is held by {hold.id}: release that first, then resume this job" in said


def test_a_redrive_without_javascript(
    context: Callable[..., Any],
    pages: Pages,
    worker: Worker,
    dlq: DeadLetters,
    runs: redis.Redis,
    charges: list[int],
) -> None:
    """The link "Refresh" is what fetches fresh numbers."""
    page = context(java_script_enabled=False).new_page()
    to_plan(page, pages)
    press(page, "button", f"Try 5 letters, then redrive {LETTERS - 5} more")

    def done() -> bool:
        press(page, "link", "Refresh")
        return bool(page.locator("main [data-job-state]").text_content() == "done")

    poll(done, timeout_seconds=30, every_seconds=0.2)
    has_ended(page, dlq, runs, charges)


def test_a_redrive_by_keyboard_only(
    page: Any,
    pages: Pages,
    worker: Worker,
    dlq: DeadLetters,
    runs: redis.Redis,
    charges: list[int],
) -> None:
    """Everything is reached by Tab, and shows that it is."""

    def to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => { const e = document.activeElement;"
                " return [e.innerText || e.id || '', getComputedStyle(e).outlineStyle]; }"
            )
            if focused[0].strip().startswith(name):
                assert focused[1] not in ("none", ""), name
                return
        raise AssertionError(f"expected Tab to reach {name!r}")

    def enter() -> None:
        with page.expect_navigation():
            page.keyboard.press("Enter")

    page.goto(pages.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for link in (QUEUE, "shop.payments.GatewayTimeout", f"Redrive {LETTERS} letters"):
        to(link)
        enter()
    to("canary")
    page.keyboard.type("5")
    to("Show what would happen")
    enter()
    to("Try 5 letters")
    enter()
    expect(page.locator("main [data-job-state]")).to_have_text("done", timeout=30_000)
    has_ended(page, dlq, runs, charges)
