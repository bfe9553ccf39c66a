"""Names of anyone's choice in the paths of the pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match, Route
from web_pages import ROUTES, get, pages, post

from celery_dlq.web.http import Permission

ODD = ["a/b", "..", ".", "100%", "%2F", "a b", "?x=1#y", "é", "\n", '"><script>', "a\\b", "{x}"]
ROUTE = {route.name: route for route in ROUTES}


def found(path: str) -> tuple[str, dict[str, str]]:
    """The pattern that a path matches as a server gives it, and the names in it."""
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "root_path": ""}
    for pattern in dict.fromkeys(route.pattern for route in ROUTES):
        match, child = Route(pattern, object()).matches(scope)  # type: ignore[arg-type]
        if match is not Match.NONE:
            return pattern, {name: unquote(text) for name, text in child["path_params"].items()}
    raise AssertionError(f"expected a route for {path!r}")


@pytest.mark.parametrize("name", ODD)
def test_a_name_comes_back_as_it_was(name: str) -> None:
    """Also where slashes and dots are part of it."""
    parts = {"queue": name, "letter": name}
    path = ROUTE["letter"].link("", parts)
    assert not {".", ".."} & set(path.split("/"))
    assert found(unquote(path)) == (ROUTE["letter"].pattern, parts)


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=("Cs",))))
def test_every_name_comes_back(name: str) -> None:
    """Whatever somebody calls a queue."""
    parts = {"queue": name, "fingerprint": "f"}
    path = ROUTE["group"].link("/mount", parts)
    assert path.startswith("/mount/queues/")
    assert found(unquote(path.removeprefix("/mount")))[1] == parts


def test_a_path_that_somebody_typed_is_understood() -> None:
    """Names that need no encoding are the same with and without."""
    assert found("/queues/orders-DLQ")[1] == {"queue": "orders-DLQ"}


def test_lone_surrogates_make_a_path() -> None:
    """UTF-8 cannot encode them; the page of such a name must not fail others."""
    assert ROUTE["groups"].link("", {"queue": "a\ud800"}).isascii()


def test_links_leave_out_empty_values() -> None:
    """And repeat those that are lists."""
    query = {"task_name": "", "conditions": ["a=1", "b=2"], "cursor": None}
    link = ROUTE["letters"].link("", {"queue": "q"}, query)
    assert link == "/queues/q/letters?conditions=a%3D1&conditions=b%3D2"


def test_only_posts_need_more_than_view() -> None:
    """A GET changes nothing, so looking is enough for it."""
    for route in ROUTES:
        if route.method == "GET":
            assert route.permission in {Permission.VIEW, None}, route.name
        else:
            assert route.method == "POST"


def test_no_two_routes_have_a_name() -> None:
    """Those of features neither."""
    assert len({route.name for route in ROUTES}) == len(ROUTES)


def test_a_path_tells_its_methods() -> None:
    """For the answer 405."""
    web = pages()
    answer = web.handle(post("/jobs"))
    assert (answer.status, dict(answer.headers)["allow"]) == (405, "GET")
    assert web.handle(get("/nowhere")).status == 404
