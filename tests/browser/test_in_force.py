"""What is in force stands on every page: holds, circuit breakers, jobs; each can be ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import bad_day
import pytest
import redis
from builders import an_app
from looking import expect, sideways, violations
from served import Pages, Worker
from waiting import poll

from celery_dlq import DeadLetters

QUEUE = "orders-DLQ"
SOME_PAGES = ("/", f"/queues/{QUEUE}", f"/queues/{QUEUE}/letters", "/jobs", "/audit")


def _charge() -> None:
    """Nothing runs it."""


@pytest.fixture(autouse=True)
def _known(dlq: DeadLetters) -> None:
    """Let the test's app know the task that is held."""

    def charge(order: int, tenant: str) -> None:
        """Nothing here runs it."""

    dlq.app.task(charge, name="shop.charge", shared=False)


@pytest.fixture
def held(dlq: DeadLetters, client: redis.Redis) -> str:
    """A hold on a bad day; returns its id."""
    bad_day.stored(dlq, client, letters=9)
    return dlq.hold("shop.charge", conditions=["kwargs.tenant=nordic"], reason="tenant nordic").id


def test_every_page_shows_a_hold_and_releases_it(held: str, page: Any, pages: Pages) -> None:
    """Who, since when, why, and how many wait; two clicks end it."""
    for path in SOME_PAGES:
        page.goto(pages.url + path)
        strip = page.get_by_role("region", name="In force")
        expect(strip).to_contain_text("Hold of shop.charge, kwargs.tenant=nordic")
        expect(strip).to_contain_text("0 wait")
        expect(strip).to_contain_text("tenant nordic")
    strip.get_by_role("button", name=f"Release {held}").click()
    what = f"{held}: shop.charge, kwargs.tenant=nordic in *"
    expect(page.locator("main")).to_contain_text(what)
    page.get_by_role("button", name="Release 0 messages").click()
    expect(page.get_by_role("region", name="In force")).to_have_count(0)


def test_a_hold_with_a_long_name_takes_two_lines_of_a_phone(
    dlq: DeadLetters, client: redis.Redis, context: Callable[..., Any], pages: Pages
) -> None:
    """The name is cut, how many wait is not; whoever points at it sees all of it."""
    bad_day.stored(dlq, client, letters=3)
    task = f"shop.{'payments_of_'.join(map(str, range(6)))}.charge".ljust(80, "x")
    dlq.app.task(_charge, name=task, shared=False)
    dlq.hold(task)
    page = context(viewport={"width": 360, "height": 740}).new_page()
    page.goto(pages.url)
    strip = page.get_by_role("region", name="In force")
    expect(strip).to_contain_text("0 wait")
    assert strip.bounding_box()["height"] < 110
    assert strip.get_by_title(task).bounding_box()["height"] < 30
    assert sideways(page) <= 0
    assert violations(page) == []


def test_what_is_held_is_marked_where_it_fails(held: str, page: Any, pages: Pages) -> None:
    """In the row of its queue, in that of its cause, and on the page of the cause."""
    page.goto(pages.url)
    mark = "held, kwargs.tenant=nordic"
    expect(page.get_by_role("row").filter(has_text="orders-DLQ")).to_contain_text(mark)
    expect(page.get_by_role("row").filter(has_text="mails-DLQ")).not_to_contain_text("held")
    page.get_by_role("link", name=QUEUE).click()
    expect(page.get_by_role("row").filter(has_text="GatewayTimeout")).to_contain_text(mark)
    expect(page.get_by_role("row").filter(has_text="KeyError")).not_to_contain_text("held")
    page.get_by_role("link", name="shop.payments.GatewayTimeout").click()
    expect(page.locator("main")).to_contain_text(mark)


def test_an_open_page_learns_of_a_hold_and_of_its_end(
    dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages
) -> None:
    """Nothing is reloaded; the page stays where it is."""
    bad_day.stored(dlq, client, letters=3)
    page.goto(f"{pages.url}/queues/{QUEUE}/letters")
    page.evaluate("window.same = true")
    strip = page.get_by_role("region", name="In force")
    expect(strip).to_have_count(0)
    hold = dlq.hold("shop.charge")
    expect(strip).to_contain_text("Hold of shop.charge")
    dlq.end_hold(hold.id)
    expect(strip).to_have_count(0)
    assert page.evaluate("window.same")


def test_a_job_says_how_long_it_takes(
    dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages, worker: Worker
) -> None:
    """Its progress and its end come by themselves, on any page."""
    bad_day.stored(dlq, client, letters=30)
    plan = dlq.plan("redrive", QUEUE, rate=3.0, force=True)
    page.goto(f"{pages.url}/audit")
    dlq.start(plan.id)
    strip = page.get_by_role("region", name="In force")
    expect(strip).to_contain_text(f"Redrive of {QUEUE}")
    expect(strip.locator("[data-left]")).to_contain_text(" left")
    page.goto(f"{pages.url}/audit")
    strip.get_by_role("link", name="Cancel …").click()
    far = r"^sending \d+ of \d+ at \S+ a second · Redrive of orders-DLQ"
    expect(page).to_have_title(re.compile(far))
    steps = page.get_by_role("list", name="Phases of this job").get_by_role("listitem")
    expect(steps).to_contain_text(["Planned ✓", "Sending", "Watching"])
    expect(page.locator("main [data-left]")).to_contain_text(" left")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("main [data-job-state]")).to_have_text("cancelled")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_strip_is_accessible_and_fits(
    held: str,
    dlq: DeadLetters,
    context: Callable[..., Any],
    pages: Pages,
    width: int,
    scheme: str,
) -> None:
    """Axe finds nothing, and nothing is wider than a phone."""
    dlq.hold("shop.*", queue="mails", reason="a reason of some length, to see it wrapped")
    dlq.start(dlq.plan("redrive", QUEUE, rate=0.5, force=True).id)
    page = context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    for path in SOME_PAGES:
        page.goto(pages.url + path)
        strip = page.get_by_role("region", name="In force")
        assert violations(page) == []
        if width == 360:
            strip.locator("summary").click()
        expect(strip.get_by_role("listitem")).to_have_count(3)
        assert not sideways(page)
        assert violations(page) == []


@pytest.mark.parametrize("script", [True, False])
def test_what_is_in_force_is_one_line_of_a_phone_until_it_is_tapped(
    held: str,
    dlq: DeadLetters,
    redis_url: str,
    context: Callable[..., Any],
    pages: Pages,
    *,
    script: bool,
) -> None:
    """Several holds of long names hide nothing of what one was paged for; one stays as it is."""
    page = context(viewport={"width": 360, "height": 740}, java_script_enabled=script).new_page()
    page.goto(pages.url)
    strip = page.get_by_role("region", name="In force")
    release = strip.get_by_role("button", name=f"Release {held}")
    expect(release).to_be_visible()
    dlq.hold("shop.*", queue="mails", reason="a reason of some length, to see it wrapped")
    queues = {"orders": {"max_deliveries": 5, "circuit_breaker": {}}}
    app = an_app(broker_url=redis_url, dlq_url=redis_url, dlq_queues=queues)
    with closing(DeadLetters(app)) as other:
        other.app.task(_charge, name="shop.charge", shared=False)
        other.open_breaker("shop.charge", "orders")
    fold = strip.locator("summary")
    poll(lambda: page.reload() and fold.count() and "1 breaker" in fold.inner_text())
    assert " ".join(fold.inner_text().split()) == "2 holds, 1 breaker, open"
    expect(release).to_be_hidden()
    assert strip.bounding_box()["height"] < 60
    fold.click()
    expect(release).to_be_visible()
    box = release.bounding_box()
    assert box["x"] + box["width"] > 300
    assert not sideways(page)
    wide = context(viewport={"width": 1280, "height": 800}, java_script_enabled=script).new_page()
    wide.goto(pages.url)
    expect(wide.get_by_role("button", name=f"Release {held}")).to_be_visible()
    expect(wide.get_by_role("region", name="In force").locator("summary")).to_be_hidden()


def test_who_may_not_hold_sees_why(held: str, page: Any, serve: Callable[..., Pages]) -> None:
    """The button stays, with the reason."""
    page.goto(serve(changes=False).url)
    button = page.get_by_role("region", name="In force").get_by_role("button", name="Release")
    expect(button).to_be_disabled()
    assert held in page.content()
