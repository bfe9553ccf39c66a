"""All pages that links lead to, one of each route and kind; how each looks and behaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

from served import Pages

from celery_dlq.web.site import SECURITY_HEADERS, all_routes

MOST_OF_A_ROUTE = 2
"""Pages of one route that are opened; the queries of their links differ."""
_LINKS = "() => [...document.querySelectorAll('a[href]')].map((a) => a.href)"


def route_of(url: str) -> str | None:
    """The name of the route that a link leads to."""
    path = re.sub("%25", "%", urlsplit(url).path)
    for route in all_routes():
        pattern = re.sub(r"\{\w+\}", "[^/]+", route.pattern)
        if route.method == "GET" and re.fullmatch(pattern, path):
            return route.name
    return None


def crawl(
    page: Any, pages: Pages, *starts: str, most: int = MOST_OF_A_ROUTE, tries: int = 1
) -> Iterator[tuple[str, str, int]]:
    """Open pages that links lead to: route, URL and status of each; the page stays open."""
    waiting = [urljoin(pages.url, path) for path in ("/", *starts)]
    seen: set[str] = set()
    opened: dict[str, int] = {}
    while waiting:
        url = urldefrag(waiting.pop(0)).url
        name = route_of(url)
        assert url.startswith(pages.url), f"{url} leads away"
        assert name is not None, f"{url} leads nowhere"
        if url in seen or name in ("export", "body") or opened.get(name, 0) >= most:
            continue
        seen.add(url)
        opened[name] = opened.get(name, 0) + 1
        answer = page.goto(url)
        for _ in range(tries - 1):
            if answer.status == 503:
                answer = page.goto(url)
        waiting += page.evaluate(_LINKS)
        yield name, url, answer.status


def check_headers(headers: dict[str, str], what: str) -> None:
    """Every answer has these, whatever it is."""
    for name, value in SECURITY_HEADERS:
        assert headers.get(name) == value, f"{what} has no right {name}"
    assert "cache-control" in headers, what
    assert not [name for name in headers if name.startswith("access-control")], what
