"""The night on call as clicks: each of them is counted, and each field that somebody types into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bad_day
import pytest
import redis
from looking import expect, sideways, violations
from served import Pages, Worker
from waiting import poll

from celery_dlq import DeadLetters

QUEUE, FIXED_IN = "orders-DLQ", "2026.47.3"
CAUSE, TASK, TENANT = "shop.payments.UnknownCard", "shop.charge", "kwargs.tenant=nordic"


class Night:
    """A page on which each click and each typed field is counted, by the step of the night."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.clicks: Counter[str] = Counter()
        self.typed: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._step = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count for a step."""
        self._step = name
        yield

    def click(self, role: str, name: Any) -> None:
        """Click what is there once, and wait for the page that follows."""
        self.clicks[self._step] += 1
        with self.page.expect_navigation():
            self.page.get_by_role(role, name=name).click()
        self.complaints += violations(self.page)
        assert sideways(self.page) <= 0, self.page.url

    def type(self, label: str, text: str) -> None:
        """Type into a field."""
        self.typed[self._step] += 1
        self.page.get_by_label(label).fill(text)

    def check_says(self, *texts: str) -> None:
        """Each text is on the page."""
        for text in texts:
            expect(self.page.locator("main")).to_contain_text(text)


@pytest.fixture
def shop(dlq: DeadLetters, client: redis.Redis, redis_url: str, tmp_path: Path) -> Iterator[Worker]:
    """Nine causes in three queues; the worker that runs has the release with the fix."""

    def charge(order: int, tenant: str, currency: str) -> None:
        """The worker runs it."""

    dlq.app.task(charge, name=TASK, shared=False)
    bad_day.stored(dlq, client, causes=bad_day.NIGHT)
    log = tmp_path / "worker.log"
    with Worker(redis_url, log, conf={"dlq_release": FIXED_IN}) as worker:
        yield worker


def explained(page: Any) -> bool:
    """True if the machine was idle enough to compare the letters at once; else look again."""
    if page.get_by_role("button", name=f"Hold {TASK} with {TENANT}").count():
        return True
    page.reload()
    return False


def held_up(dlq: DeadLetters, worker: Worker) -> None:
    """Messages of the tenant come while its hold is in force; those of another one run."""
    (hold,) = dlq.holds()
    assert (hold.hold.task, hold.hold.where) == (TASK, (TENANT,))
    poll(lambda: hold.hold.id in worker.output, timeout_seconds=30)
    for number, tenant in enumerate(("nordic", "acme", "nordic", "nordic")):
        sent = {"tenant": tenant, "currency": "EUR"}
        dlq.app.send_task(TASK, [number], sent, queue="orders")
    poll(lambda: dlq.holds()[0].held == 3, timeout_seconds=30)


@pytest.mark.parametrize("width", [1280, 360])
def test_the_night_is_eight_clicks_and_a_note(
    shop: Worker,
    dlq: DeadLetters,
    runs: redis.Redis,
    context: Callable[..., Any],
    pages: Pages,
    width: int,
) -> None:
    """From the overview to an incident that is closed, on a desk and on a phone."""
    page = context(viewport={"width": width, "height": 740}).new_page()
    night = Night(page)
    page.goto(pages.url)
    with night.step("queue, cause, release, tenant, growth"):
        night.check_says(f"{QUEUE} is growing: ")
        night.click("link", CAUSE)
        poll(lambda: explained(page), timeout_seconds=60)
        night.check_says(QUEUE, CAUSE, "no card for orders of nordic", "since release 2026.47.2")
        night.check_says(TENANT, "a minute")
    with night.step("hold"):
        night.click("button", f"Hold {TASK} with {TENANT} …")
        night.click("button", "Hold")
        night.check_says(CAUSE, f"held, {TENANT}")
    held_up(dlq, shop)
    strip = page.get_by_role("region", name="In force")
    expect(strip).to_contain_text("3 wait")
    with night.step("canary, rest, verdict"):
        night.click("button", "Release")
        night.click("button", "Release 3 messages")
        night.click("button", "Try 10 letters first …")
        night.check_says(f"Redrive 80 letters of {QUEUE}?", "found, consumed by celery@")
        night.click("button", "Try 10 letters, then redrive 70 more")
        expect(page.locator("main [data-job-state]")).to_have_text("done", timeout=30_000)
        night.check_says("Canary ✓ done 10 of 10 succeeded. Verdict: passed")
    with night.step("note and resolve"):
        expect(page.get_by_role("heading", name="Close the incident")).to_be_visible()
        night.type("Note, for all who see these pages", "OPS-12: nordic has its cards again")
        night.click("button", "Resolve")
        night.check_says("resolved", f"in release {FIXED_IN}", "OPS-12")
    assert night.clicks == {
        "queue, cause, release, tenant, growth": 1,
        "hold": 2,
        "canary, rest, verdict": 4,
        "note and resolve": 1,
    }
    assert night.typed == {"note and resolve": 1}
    assert night.complaints == []
    assert list(dlq.letters(QUEUE, exception_type="UnknownCard")) == []
    poll(lambda: all(runs.llen(f"charge:{number}") == 1 for number in range(4)))
    page.goto(pages.url)
    expect(page.get_by_role("link", name=CAUSE)).to_have_count(0)
