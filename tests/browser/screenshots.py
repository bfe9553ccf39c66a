"""All pictures of the docs: ``cd tests && python -m browser.screenshots [FOLDER]``.

A shop on a bad day: its letters, a worker and the pages are real. Chromium takes the pictures of
the pages and of the report (which needs Java), rich draws what the terminal shows.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import bad_day
from browser.served import Pages, Worker, environment
from builders import an_app
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.text import Text
from servers import RedisServer

from celery_dlq import DeadLetters

IMAGES = Path(__file__).parents[2] / "docs/images"
QUEUE = "orders-DLQ"
WIDE = {"width": 1280, "height": 800}
TALLEST = 1100
COLUMNS = 80
_OF_ONE_MOMENT = """() => 1 === new Set(
    ['.in-force [data-count=handled]', 'main [data-count=changed]', '[aria-current=step] span']
        .map((place) => document.querySelector(place)?.textContent.trim().split(' ')[0])).size"""
"""True while the strip, the progress and the phases of a job have the same number."""


@contextmanager
def shop_in_trouble(folder: Path) -> Iterator[tuple[Pages, DeadLetters]]:
    """The shop, with its letters, a worker and the pages."""
    with RedisServer() as server:
        dlq = DeadLetters(an_app(dlq_url=server.url))
        served = Pages(server.url, folder / "pages.log", "--title", "production")
        with Worker(server.url, folder / "worker.log"), served as pages:
            bad_day.stored(dlq, server.client())
            charge = dlq.groups(QUEUE)[0].fingerprint
            dlq.note(QUEUE, charge, "The gateway says it is back since 14:10; see SHOP-2217.")
            yield pages, dlq
        dlq.close()


def redriven(page: Page, pages: Pages, fingerprint: str) -> None:
    """Redrive a group with a canary, and stop at the page of the job that is half done."""
    page.goto(f"{pages.url}/queues/{QUEUE}/redrive?fingerprint={fingerprint}")
    page.get_by_label("Letters in the canary").fill("20")
    page.get_by_label("Watch them for").fill("3")
    page.get_by_label("Letters per second").fill("30")
    page.get_by_role("button", name="Show what would happen").click()
    for note in page.locator("main form [type=checkbox][required]").all():
        note.check()
    page.get_by_role("button", name="Redrive").click()
    page.get_by_text("passed", exact=True).wait_for(timeout=60_000)
    half = "() => Number(document.querySelector('progress').value) > 500"
    page.wait_for_function(half, timeout=60_000)
    page.reload()
    page.wait_for_function(_OF_ONE_MOMENT, timeout=60_000)


def main(folder: Path = IMAGES) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs, shop_in_trouble(Path(logs)) as (pages, dlq):
        group = dlq.groups(QUEUE)[0].fingerprint
        letter = next(iter(dlq.letters(QUEUE, fingerprint=group))).id
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            page = _take(browser, pages, group, letter, folder)
            _terminal(dlq, folder / "terminal.svg", "queues", f"groups {QUEUE} --limit 4")
            redriven(page, pages, group)
            _shot(page, folder / "web-job.png")
            _report(browser, dlq, Path(logs), folder)
            browser.close()


def _take(browser: Browser, pages: Pages, group: str, letter: str, folder: Path) -> Page:
    """The pages as they are before anybody does something; returns the last one."""
    light = browser.new_context(viewport=WIDE, color_scheme="light", timezone_id="Europe/Berlin")
    dark = browser.new_context(viewport=WIDE, color_scheme="dark", timezone_id="Europe/Berlin")
    page, night = light.new_page(), dark.new_page()
    page.goto(pages.url)
    page.reload()  # the first page of a process has no time to read messages
    _shot(page, folder / "web-overview.png")
    night.goto(pages.url)
    _shot(night, folder / "web-dark.png")
    page.goto(f"{pages.url}/queues/{QUEUE}/groups/{group}")
    _shot(page, folder / "web-group.png")
    page.goto(f"{pages.url}/queues/{QUEUE}/letters/{letter}")
    _shot(page, folder / "web-letter.png")
    return page


def _report(browser: Browser, dlq: DeadLetters, work: Path, folder: Path) -> None:
    """The report of a triage of all letters, compared with a sample of what succeeded."""
    bad_day.sampled(dlq)
    dlq.export(work / "letters")
    dlq.export(work / "successes", successes=True)
    options = ("--successes", "successes", "--html", "report.html")
    _run(dlq, "triage", "letters", *options, folder=work)
    page = browser.new_page(viewport=WIDE)
    page.goto((work / "report.html").as_uri())
    _shot(page, folder / "report.png")


def _terminal(dlq: DeadLetters, path: Path, *commands: str) -> None:
    """What commands print on a terminal, as rich draws it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for command in commands:
        console.print(f"$ celery -A shop dlq {command}", highlight=False)
        console.print(Text.from_ansi(_run(dlq, *command.split())), no_wrap=True)
    path.write_text(console.export_svg(title="celery_dlq"), "utf-8")


def _run(dlq: DeadLetters, *arguments: str, folder: Path | None = None) -> str:
    """The output of a command on the shop's Redis, with colours."""
    (url,) = dlq.settings.url or ()
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "shop_app", "dlq", *arguments],
        env={**environment(url), "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _shot(page: Page, path: Path) -> None:
    """A picture of the page's upper part; `TALLEST` keeps the file small."""
    height = min(TALLEST, page.evaluate("() => document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": WIDE["width"], "height": height}
    page.screenshot(path=path, full_page=True, clip=clip, animations="disabled")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
