"""The table of routes: what is asked, who may ask it, and who answers.

Names of queues, groups and letters come from anyone who can publish. They are percent-encoded
twice in a path, because servers decode it once before we can tell a slash of a name from others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode

from celery_dlq.web.http import Permission

_PART = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One kind of request."""

    name: str  # For links
    method: str  # `GET`, which never changes anything, or `POST`
    pattern: str  # The path, with `{name}` for a part
    permission: Permission | None  # Needed for it; `None` for what has no data in it
    page: Callable[..., Any]  # Answers it
    seconds: float = 2.0  # Longest wait for the answer; 0 for what asks no store


class Routes:
    """All routes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        self._named = {route.name: route for route in routes}
        self._matchers = [(route, _matcher(route.pattern)) for route in routes]

    def find(self, method: str, path: str) -> tuple[Route | None, Mapping[str, str], list[str]]:
        """Find the route of a request."""
        method = "GET" if method == "HEAD" else method
        methods: list[str] = []
        for route, matcher in self._matchers:
            found = matcher.fullmatch(path)
            if found is None:
                continue
            if route.method == method:
                return route, {k: unquote(v) for k, v in found.groupdict().items()}, [method]
            methods.append(route.method)
        return None, {}, methods

    def __getitem__(self, name: str) -> Route:
        return self._named[name]

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def link(self, root: str, name: str, parts: Mapping[str, Any], query: Any = ()) -> str:
        """Return the path of a route."""
        pattern = self._named[name].pattern
        path = _PART.sub(lambda found: _encoded(str(parts[found[1]])), pattern)
        pairs = query.items() if isinstance(query, Mapping) else query
        asked = [
            (key, one)
            for key, value in pairs
            for one in (value if isinstance(value, (list, tuple)) else [value])
            if one not in (None, "")
        ]
        return quote(root) + path + ("?" + urlencode(asked, errors="replace") if asked else "")


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(_PART.sub(r"(?P<\1>[^/]+)", pattern))


def _encoded(name: str) -> str:
    once = quote(name, safe="", errors="backslashreplace")
    if not once.strip("."):  # browsers take "." and ".." for folders
        once = once.replace(".", "%2E")
    return quote(once, safe="")
