"""Names of anyone's choice in the paths of the pages."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.web.http import Permission
from celery_dlq.web.site import ROUTES

ODD = ["a/b", "..", ".", "100%", "%2F", "a b", "?x=1#y", "é", "\n", '"><script>', "a\\b", "{x}"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_comes_back_as_it_was(name: str) -> None:
    """Also where slashes and dots are part of it."""
    path = ROUTES.link("", "letter", {"queue": name, "letter": name})
    assert not {".", ".."} & set(path.split("/"))
    route, parts, _ = ROUTES.find("GET", unquote(path))
    assert route is not None
    assert route.name == "letter"
    assert parts == {"queue": name, "letter": name}


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=("Cs",))))
def test_every_name_comes_back(name: str) -> None:
    """Whatever somebody calls a queue."""
    path = ROUTES.link("/mount", "group", {"queue": name, "fingerprint": "f"})
    assert path.startswith("/mount/queues/")
    found = ROUTES.find("GET", unquote(path.removeprefix("/mount")))
    assert found[1] == {"queue": name, "fingerprint": "f"}


def test_a_path_that_somebody_typed_is_understood() -> None:
    """Names that need no encoding are the same with and without."""
    assert ROUTES.find("GET", "/queues/orders-DLQ")[1] == {"queue": "orders-DLQ"}


def test_lone_surrogates_make_a_path() -> None:
    """UTF-8 cannot encode them; the page of such a name must not fail others."""
    assert ROUTES.link("", "groups", {"queue": "a\ud800"}).isascii()


def test_links_leave_out_empty_values() -> None:
    """And repeat those that are lists."""
    query = {"task_name": "", "conditions": ["a=1", "b=2"], "cursor": None}
    link = ROUTES.link("", "letters", {"queue": "q"}, query)
    assert link == "/queues/q/letters?conditions=a%3D1&conditions=b%3D2"


def test_only_posts_need_more_than_view() -> None:
    """A GET changes nothing, so looking is enough for it."""
    for route in ROUTES.all:
        if route.method == "GET":
            assert route.permission in {Permission.VIEW, None}, route.name
        else:
            assert route.method == "POST"


def test_a_path_tells_its_methods() -> None:
    """For the answer 405."""
    route, _, methods = ROUTES.find("POST", "/jobs")
    assert route is None
    assert methods == ["GET"]
