"""The benchmark of the pages asks for every page: one that is new is timed, too."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from benchmarks import web

from celery_dlq.web.site import all_routes

NOT_TIMED = {"export", "static", "health"}  # a stream of all letters; files; no letter at all


def test_every_page_is_timed() -> None:
    """Here beside few letters: times are the benchmark's, with a million."""
    (found,) = web.measure(web.QUICK, print)
    paths = [urlsplit(row["path"]).path for row in found["rows"]]
    for route in all_routes():
        pattern = re.sub(r"\{\w+\}", "[^/]+", route.pattern)
        if route.method == "GET" and route.name not in NOT_TIMED:
            assert any(re.fullmatch(pattern, path) for path in paths), route.name
