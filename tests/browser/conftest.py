"""Chromium, the pages and a worker; every page that a test opens is watched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from looking import CHROMIUM, Watched, sync_playwright
from served import Pages, Worker
from servers import require

from celery_dlq import DeadLetters


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, one for the tests of a file."""
    require(sync_playwright, "playwright and axe-playwright-python (celery_dlq[test])")
    require(CHROMIUM if os.access(CHROMIUM, os.X_OK) else None, "chromium (a Debian package)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    """What went wrong in the pages of this test; nothing may."""
    found = Watched()
    yield found
    assert found.errors == []


@pytest.fixture
def context(chromium: Any, watched: Watched) -> Iterator[Callable[..., Any]]:
    """Open a browser's window with settings of its own; its pages are watched."""
    opened = []

    def new(**options: Any) -> Any:
        made = chromium.new_context(**options)
        made.set_default_timeout(20_000)
        made.on("page", watched.page)
        opened.append(made)
        return made

    yield new
    for made in opened:
        made.close()


@pytest.fixture
def page(context: Callable[..., Any]) -> Any:
    """A page of a usual window."""
    return context(viewport={"width": 1280, "height": 800}).new_page()


@pytest.fixture
def dlq(redis_url: str) -> Iterator[DeadLetters]:
    """The letters of the shop, without a worker."""
    app = Celery("shop", broker=redis_url, set_as_current=False)
    app.conf.update(dlq_url=redis_url, dlq_queues={"orders": {"max_deliveries": 5}})
    made = DeadLetters(app)
    yield made
    made.close()
    app.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the letters' Redis."""
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def runs(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the database in which each run of a task leaves a mark."""
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as made:
        yield made


@pytest.fixture
def serve(redis_url: str, tmp_path: Path, watched: Watched) -> Iterator[Callable[..., Pages]]:
    """Start ``dlq web`` with changes allowed; all are ended after the test."""
    started: list[Pages] = []

    def start(*options: str, **more: Any) -> Pages:
        url = more.pop("redis_url", redis_url)
        made = Pages(url, tmp_path / f"pages-{len(started)}.log", *options, **more)
        started.append(made)
        made.start()
        return made

    yield start
    watched.over = True  # pages that are still open miss their server
    for made in started:
        made.stop()
        assert "Traceback" not in made.output, made.output


@pytest.fixture
def pages(serve: Callable[..., Pages]) -> Pages:
    """The pages of the shop."""
    return serve()


@pytest.fixture
def worker(redis_url: str, tmp_path: Path) -> Iterator[Worker]:
    """A worker of the shop."""
    with Worker(redis_url, tmp_path / "worker.log") as made:
        yield made
