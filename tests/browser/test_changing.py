"""Everything that can be changed, each by its form, with what the page shows before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import bad_day
import pytest
import redis
from looking import Watched, expect, press, violations
from served import Pages, Worker
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters

QUEUE = "orders-DLQ"
LETTERS = 20


@pytest.fixture
def letter(dlq: DeadLetters, client: redis.Redis, watched: Watched) -> DeadLetter:
    """Letters of each cause; the newest one whose payment timed out."""
    watched.allowed.append("Failed to load resource")  # what is refused is a 4xx
    bad_day.stored(dlq, client, letters=LETTERS)
    return next(iter(dlq.letters(QUEUE, exception_type="shop.payments.GatewayTimeout")))


def test_discard_and_restore(letter: DeadLetter, dlq: DeadLetters, page: Any, pages: Pages) -> None:
    """The name of the queue is asked for; the letter goes, and comes back from the bin."""
    page.goto(f"{pages.url}/queues/{QUEUE}/letters/{letter.id}")
    press(page, "link", "Discard")
    press(page, "button", "Show what would be discarded")
    page.get_by_label("Type the name").fill("another")
    press(page, "button", "Discard 1 letter")
    assert "nothing was done" in page.locator(".bad-news").inner_text()
    page.get_by_label("Type the name").fill(QUEUE)
    press(page, "button", "Discard 1 letter")
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    assert page.goto(f"{pages.url}/queues/{QUEUE}/letters/{letter.id}").status == 410
    press(page, "link", "Discarded letters")
    press(page, "button", f"Restore {letter.id}")
    assert letter.description in page.locator("main").inner_text()
    assert not list(dlq.letters(QUEUE, ids=[letter.id]))
    press(page, "button", "Restore 1 letter")
    assert page.locator("h1").inner_text() == letter.task_name
    assert dlq.get(letter.id, QUEUE).body == letter.body


def test_edit_and_redrive(
    letter: DeadLetter, dlq: DeadLetters, worker: Worker, runs: redis.Redis, page: Any, pages: Pages
) -> None:
    """A mistake keeps what was typed; the plan shows both versions; the task gets the new one."""
    page.goto(f"{pages.url}/queues/{QUEUE}/letters/{letter.id}")
    press(page, "link", "Edit and redrive")
    args = page.get_by_label("Positional arguments")
    args.fill("[77, ")
    press(page, "button", "Show the change")
    assert "expected args to be a list in JSON" in page.get_by_role("alert").inner_text()
    assert args.input_value() == "[77, "
    args.fill("[77]")
    press(page, "button", "Show the change")
    before, after = page.locator(".diff pre").all_inner_texts()
    assert json.loads(before)["args"] == json.loads(letter.args_json)
    assert json.loads(after)["args"] == [77]
    press(page, "button", "Edit 1 letter")
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    poll(lambda: runs.llen("charge:77") == 1, timeout_seconds=30)
    (order,) = json.loads(letter.args_json)
    assert runs.llen(f"charge:{order}") == 0


def test_a_note_is_kept_with_its_author(
    letter: DeadLetter, dlq: DeadLetters, page: Any, pages: Pages
) -> None:
    """Lines stay lines, and markup is text."""
    page.goto(f"{pages.url}/queues/{QUEUE}/groups/{letter.fingerprint}")
    page.get_by_label("Note, for all").fill("look <b>here</b>\nand there")
    press(page, "button", "Add the note")
    assert violations(page) == []
    assert page.locator(".said").first.inner_text() == "look <b>here</b>\nand there"
    (note,) = dlq.notes(QUEUE, letter.fingerprint)
    assert note.text == "look <b>here</b>\nand there"


def test_a_policy_is_overridden_and_the_override_ended(
    letter: DeadLetter, dlq: DeadLetters, page: Any, pages: Pages
) -> None:
    """First what changes, then the change; what cannot be meant stays in the form with why."""
    page.goto(f"{pages.url}/policies")
    page.get_by_label("Queue", exact=True).fill("orders")
    page.get_by_label("Value").fill("many")
    press(page, "button", "Show the change")
    assert "max_deliveries" in page.get_by_role("alert").inner_text()
    assert page.get_by_label("Queue", exact=True).input_value() == "orders"
    page.get_by_label("Value").fill("2")
    press(page, "button", "Show the change")
    then = page.locator("dt", has_text="then").locator("xpath=following-sibling::dd[1]")
    assert then.inner_text() == "2"
    press(page, "button", "Override max_deliveries")
    assert "Overrides in force" in page.locator("main").inner_text()
    assert dlq.policies("orders").views[0].to_json()["policy"]["max_deliveries"]["value"] == 2
    press(page, "button", "End the override of max_deliveries of orders")
    press(page, "button", "End the override")
    assert "Overrides in force" not in page.locator("main").inner_text()


def test_messages_are_held_and_released(
    dlq: DeadLetters, page: Any, pages: Pages, watched: Watched
) -> None:
    """Both say of which tasks first; a misspelt name is refused with what is meant."""
    watched.allowed.append("Failed to load resource")  # what is refused is a 4xx
    page.goto(f"{pages.url}/holds")
    page.get_by_label("Queue; empty for all").fill("ordres")
    press(page, "button", "Show what would be held")
    assert "did you mean 'orders'" in page.get_by_role("alert").inner_text()
    page.get_by_label("Queue; empty for all").fill("orders")
    page.get_by_label("For, e.g. 2h").fill("2h")
    press(page, "button", "Show what would be held")
    shown = page.locator("main").inner_text()
    assert "orders" in shown
    assert "2 h" in shown
    assert dlq.holds() == []
    press(page, "button", "Hold")
    (held,) = dlq.holds()
    assert held.hold.queue == "orders"
    press(page, "button", f"Release {held.hold.id}")
    assert "orders" in page.locator("main").inner_text()
    press(page, "button", "Release 0 messages")
    assert dlq.holds() == []


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_job_is_cancelled_and_resumed(
    letter: DeadLetter, dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages, where: str
) -> None:
    """Each message is published once, and the page shows each end, whoever changes their mind."""
    page.goto(f"{pages.url}/queues/{QUEUE}/redrive?fingerprint={letter.fingerprint}")
    page.get_by_label("Letters in the canary").fill("")
    page.get_by_label("Letters per second").fill("4")
    expect(page.get_by_text("would be lost")).to_have_count(0)
    press(page, "button", "Show what would happen")
    press(page, "button", f"Redrive {LETTERS} letters")
    if where == "here":
        press(page, "button", "Cancel")
    else:
        expect(page.locator("main [data-job-state]")).to_have_text("running")
        dlq.cancel(dlq.jobs()[0].id)
    expect(page.locator("main [data-job-state]")).to_have_text("cancelled", timeout=30_000)
    published = client.llen("orders")
    assert published < LETTERS
    press(page, "button", "Resume")
    expect(page.locator("main [data-job-state]")).to_have_text("done", timeout=30_000)
    expect(page.get_by_text(f"{LETTERS} of {LETTERS} letters")).to_be_visible()
    assert client.llen("orders") == LETTERS
    expect(page.get_by_text("Resumed 1 time")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


def test_what_may_not_be_done_is_not_offered(
    letter: DeadLetter, context: Callable[..., Any], serve: Callable[..., Pages]
) -> None:
    """A read-only server shows its buttons disabled, with the reason."""
    pages = serve(changes=False)
    page = context().new_page()
    page.goto(f"{pages.url}/queues/{QUEUE}/letters/{letter.id}")
    button = page.get_by_role("button", name="Redrive")
    assert button.is_disabled()
    assert "--allow-changes" in button.get_attribute("title")
    assert page.get_by_text("read-only").count() == 1
    page.goto(f"{pages.url}/policies")
    assert page.locator("main form").count() == 0
