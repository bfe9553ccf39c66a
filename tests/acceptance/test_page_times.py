"""No page takes a tenth of a second at the server, with a million letters and 100,000 causes."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlsplit

from benchmarks import web

from celery_dlq.web.site import all_routes

MOST_MS = 100
NOT_TIMED = {"export", "static", "health"}  # a stream of all letters; files; no letter at all


def test_every_page_is_made_in_a_tenth_of_a_second() -> None:
    """Beside 2,000 other queues and a hold with 20,000 messages; the quickest of five counts."""
    (found,) = web.measure(replace(web.FULL, requests=5), print)
    paths = [urlsplit(row["path"]).path for row in found["rows"]]
    for route in all_routes():
        pattern = re.sub(r"\{\w+\}", "[^/]+", route.pattern)
        if route.method == "GET" and route.name not in NOT_TIMED:
            assert any(re.fullmatch(pattern, path) for path in paths), route.name
    slow = {row["name"]: round(row["least_ms"]) for row in found["rows"]}
    assert {name: ms for name, ms in slow.items() if ms > MOST_MS} == {}
