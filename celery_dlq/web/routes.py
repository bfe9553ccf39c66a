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
    """One kind of request.

    Attributes:
        name: For links.
        method: ``GET``, which never changes anything, or ``POST``.
        pattern: The path, with ``{name}`` for a part.
        permission: Needed for it; ``None`` for what has no data in it.
        page: Answers it.
        seconds: Longest wait for the answer; 0 for what asks no store.
    """

    name: str
    method: str
    pattern: str
    permission: Permission | None
    page: Callable[..., Any]
    seconds: float = 2.0


class Routes:
    """All routes.

    Args:
        routes: The routes.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        self._named = {route.name: route for route in routes}
        self._matchers = [(route, _matcher(route.pattern)) for route in routes]

    def find(self, method: str, path: str) -> tuple[Route | None, Mapping[str, str], list[str]]:
        """Find the route of a request.

        Returns:
            The route, or ``None``; the parts of the path; and the methods that the path has.
        """
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
        """Return the path of a route.

        Args:
            root: The mount path.
            name: The route's name.
            parts: Values for the parts of its path.
            query: Pairs for the query string; empty values are left out.
        """
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
