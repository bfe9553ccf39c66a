"""Django's admin in Chromium: what a viewer sees, and a redrive of an operator to its verdict."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from django_project import PAGES, Project, Served, letters_in, put
from servers import RedisServer, require
from waiting import poll

pytest.importorskip("django", reason="these tests need Django")
sync_api = pytest.importorskip("playwright.sync_api", reason="these tests need playwright")

QUEUE = f"{PAGES}/queues/orders-DLQ"


@pytest.fixture(scope="module")
def chromium() -> Iterator[sync_api.Browser]:
    """Debian's Chromium."""
    path = require(shutil.which("chromium"), "chromium (a system package)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def project(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with users of every kind, and an order."""
    project = Project(tmp_path_factory.mktemp("django"), redis_server.url)
    order = "from orders.models import Order; Order.objects.create(id=1, amount=1)"
    project.run("-c", f"import django; django.setup(); {order}")
    return project


@pytest.fixture(scope="module")
def served(project: Project) -> Iterator[Served]:
    """Its pages."""
    with project.served("runserver") as served:
        yield served


@pytest.fixture
def working(project: Project, redis_url: str) -> Iterator[None]:
    """The project's worker runs."""
    log = project.folder.parent / "worker.log"
    command = ("-m", "celery", "-A", "proj", "worker", "--pool", "solo", "--loglevel", "INFO")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=project.folder,
            env=project.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        poll(lambda: b"ready." in log.read_bytes(), timeout_seconds=60)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def letters(redis_url: str) -> Iterator[int]:
    """Letters of an order that was missing when their tasks ran."""
    for dlq in letters_in(redis_url):
        yield len(put(dlq, 30, description="there is no order 1"))


Visit = Callable[..., sync_api.Page]


@pytest.fixture
def visit(chromium: sync_api.Browser, served: Served) -> Iterator[Visit]:
    """A page of a user who has logged in; it must not complain of anything."""
    contexts, complaints = [], []

    def open_page(user: str, *, javascript: bool = True) -> sync_api.Page:
        context = chromium.new_context(
            java_script_enabled=javascript, base_url=f"http://127.0.0.1:{served.port}"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append((message.text, message.location)))
        page.on("pageerror", lambda error: complaints.append((str(error), {})))
        page.goto("/admin/")
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password").fill(user)
        page.get_by_role("button", name="Log in").click()
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Pages of the admin itself name no icon.
    ours = [found for found in complaints if "/favicon.ico" not in str(found)]
    assert ours == []


def test_a_viewer_is_told_why_buttons_do_nothing(visit: Visit, letters: int) -> None:
    """They stay, disabled, with the reason; and the way back leads to the admin."""
    page = visit("viewer")
    page.get_by_role("link", name="Dead letters", exact=True).click()
    sync_api.expect(page).to_have_title("Dead-letter queues")
    page.get_by_role("link", name="orders-DLQ").click()
    for name in ("Redrive", "Discard"):
        button = page.get_by_role("button", name=name).first
        sync_api.expect(button).to_be_disabled()
        reason = "Somebody who administers users of this site can give you more permissions."
        sync_api.expect(button).to_have_attribute("title", reason)
    page.goto(f"{PAGES}/policies")
    sync_api.expect(page.locator("main").get_by_role("button")).to_have_count(0)
    page.get_by_role("link", name="Back to the application").click()
    sync_api.expect(page.get_by_text("Site administration")).to_be_visible()


def test_an_operator_redrives_to_the_verdict_without_javascript(
    visit: Visit, letters: int, working: None
) -> None:
    """From the admin's first page: group, form, plan, canary, and the rest after it."""
    page = visit("operator", javascript=False)
    page.get_by_role("link", name="Dead letters", exact=True).click()
    page.get_by_role("link", name="orders-DLQ").click()
    page.get_by_role("link", name="ValueError").click()
    page.get_by_role("link", name=f"Redrive {letters} letters").click()
    page.get_by_label("Letters in the canary").fill("5")
    page.get_by_role("button", name="Show what would happen").click()
    sync_api.expect(page.get_by_role("heading", level=1)).to_contain_text(f"Redrive {letters}")
    page.get_by_role("button", name=f"Try 5 letters, then redrive {letters - 5} more").click()
    job = page.url
    assert "/jobs/" in job

    def done() -> bool:
        page.get_by_role("link", name="Refresh").click()
        return page.locator("main [data-job-state]").text_content() == "done"

    poll(done, timeout_seconds=60, every_seconds=0.3)
    phases = page.get_by_role("list", name="Phases of this job")
    sync_api.expect(phases).to_contain_text("5 of 5 succeeded. Verdict: passed")
    page.goto(f"{PAGES}/audit")
    sync_api.expect(page.get_by_role("row").filter(has_text="redriven").first).to_contain_text(
        "operator via "
    )
    page.goto(QUEUE)
    sync_api.expect(page.get_by_text("0 letters")).to_be_visible()


def test_an_open_page_stays_fresh_until_the_login_ends(visit: Visit, letters: int) -> None:
    """It polls, because WSGI has no streams; then it says that the login has ended."""
    page = visit("viewer")
    with page.expect_response("**/events/poll") as polled:
        page.goto(f"{PAGES}/")
    assert polled.value.json()["letters"] == {"orders-DLQ": letters}
    page.context.clear_cookies(name="sessionid")
    said = page.locator("#live")
    sync_api.expect(said).to_contain_text("not logged in any more", timeout=30_000)
