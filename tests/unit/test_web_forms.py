"""Forms of other sites change nothing: every changing route, every way to be foreign."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
from web_pages import (
    ALL,
    HOST,
    POSTS,
    SAME_SITE,
    SECRET,
    form_of,
    get,
    pages,
    path_of,
    post,
    recorded,
)

from celery_dlq.web.forms import MAX_AGE_SECONDS, SignedForms
from celery_dlq.web.http import Permission, User
from celery_dlq.web.site import ROUTES
from celery_dlq.web.users import Login, UsersFile

ROUTE = {route.name: route for route in ROUTES.all}
HERE = {"origin": f"http://{HOST}"}
FOREIGN: dict[str, dict[str, Any]] = {
    "no token": {"token": ""},
    "another browser's token": {"token_of": "other"},
    "no cookie": {"cookie": ""},
    "a token of another server": {"token_of": "server"},
    "a token that is no token": {"token": "x.y.z"},
    "no header at all": {"headers": {}},
    "a foreign origin": {"headers": {"origin": "https://evil.example"}},
    "an origin that begins like ours": {"headers": {"origin": f"http://{HOST}.evil.example"}},
    "another port": {"headers": {"origin": "http://127.0.0.1:9999"}},
    "another scheme": {"headers": {"origin": f"https://{HOST}"}},
    "an origin that is null": {"headers": {"origin": "null"}},
    "a cross-site page": {"headers": {"sec-fetch-site": "cross-site", **HERE}},
    "a page of the same site": {"headers": {"sec-fetch-site": "same-site", **HERE}},
    "a typed address": {"headers": {"sec-fetch-site": "none"}},
    "another site's name for this address": {"headers": {**SAME_SITE, "host": "evil.example"}},
}


def sent(web: Any, route: str, how: dict[str, Any]) -> Any:
    """Send a form that is ours but for what is said."""
    cookie, token = form_of(web)
    if how.get("token_of") == "other":
        _, token = form_of(web)
    if how.get("token_of") == "server":
        token = SignedForms("the secret of another server").token(
            get(headers={"cookie": cookie}), mock.Mock()
        )
    request = post(
        path_of(ROUTE[route]),
        how.get("cookie", cookie),
        how.get("token", token),
        headers=how.get("headers", SAME_SITE),
    )
    return web.handle(request)


@pytest.mark.parametrize("how", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("route", POSTS)
def test_a_form_that_is_not_ours_is_refused(
    route: str, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Before any page is reached, with a page that says why, and a line in the log."""
    web = pages()
    reached = recorded(web)
    with caplog.at_level(logging.WARNING, "celery_dlq.web"):
        response = sent(web, route, how)
    host = how.get("headers", {}).get("host")
    assert response.status == (421 if host else 403)
    assert b"expected" in response.body or b"form" in response.body
    assert reached == []
    assert host or "Refused POST" in caplog.text
    assert not any(name == "location" for name, _ in response.headers)


@pytest.mark.parametrize("route", POSTS)
def test_an_old_form_is_refused(route: str) -> None:
    """Twelve hours after it was made."""
    web = pages()
    reached = recorded(web)
    with mock.patch("itsdangerous.timed.time.time", return_value=1_000_000_000):
        cookie, token = form_of(web)
    later = 1_000_000_000 + MAX_AGE_SECONDS + 2
    with mock.patch("itsdangerous.timed.time.time", return_value=later):
        response = web.handle(post(path_of(ROUTE[route]), cookie, token, headers=SAME_SITE))
    assert response.status == 403
    assert b"older than 12 hours" in response.body
    assert reached == []


@pytest.mark.parametrize(
    ("headers", "scheme", "url"),
    [
        (SAME_SITE, "http", None),
        (HERE, "http", None),
        ({"origin": "http://ops:9809", "host": "ops:9809"}, "http", None),
        ({"origin": "https://ops.example", "host": "ops.example:443"}, "https", None),
        ({"origin": "https://ops.example", "host": "127.0.0.1"}, "http", "https://ops.example"),
        ({"origin": "https://OPS.example:443"}, "http", "https://ops.example"),
    ],
    ids=["headers", "origin", "plain http by name", "https proxy", "dlq_web_url", "written else"],
)
@pytest.mark.parametrize("route", [name for name in POSTS if ROUTE[name].permission])
def test_our_own_form_is_taken(
    route: str, headers: dict[str, str], scheme: str, url: str | None
) -> None:
    """From all addresses that browsers use for these pages."""
    web = pages(forms=SignedForms("secret of two processes", url), hosts=["ops", "ops.example"])
    reached = recorded(web)
    cookie, token = form_of(web)
    request = post(path_of(ROUTE[route]), cookie, token, headers=headers, scheme=scheme)
    assert web.handle(request).status == 200
    assert reached == [route]


def test_a_form_of_one_process_is_taken_by_another() -> None:
    """They share a secret, and nothing else."""
    one, other = pages(), pages()
    reached = recorded(other)
    cookie, token = form_of(one)
    other.handle(post(path_of(ROUTE["add_note"]), cookie, token, headers=SAME_SITE))
    assert reached == ["add_note"]


def test_a_refused_form_gives_back_what_was_typed_but_no_token() -> None:
    """So that it can be sent again by hand."""
    web = pages()
    cookie, token = form_of(web)
    request = post(path_of(ROUTE["add_note"]), cookie, token, fields="text=all+of+my+note")
    body = web.handle(request).body
    assert b"all of my note" in body
    assert token.encode() not in body.partition(b"<main")[2]


def test_a_refused_login_does_not_show_the_password() -> None:
    """Neither its page nor the log has it."""
    login = Login(UsersFile("none"), SECRET, allow_changes=True, why_not="")
    web = pages(login=login)
    fields = "name=olga&password=correct+horse"
    for headers in ({}, SAME_SITE, {"origin": "https://evil.example"}):
        answer = web.handle(post("/login", "", "", fields=fields, headers=headers))
        assert answer.status == 403
        assert b"olga" in answer.body
        assert b"correct horse" not in answer.body


PERMISSIONS = {
    "nobody": None,
    "who may not even look": frozenset(),
    **{str(one): frozenset({one}) for one in Permission},
    **{f"all but {one}": ALL - {one} for one in Permission},
    "all": ALL,
}


@pytest.mark.parametrize("may", PERMISSIONS.values(), ids=PERMISSIONS)
@pytest.mark.parametrize("name", [name for name in ROUTE if ROUTE[name].permission])
def test_every_route_asks_for_its_permission(name: str, may: frozenset[Permission] | None) -> None:
    """401 for nobody, 403 with the permission's name, or else the page."""
    route = ROUTE[name]
    user = None if may is None else User(name="olga", permissions=may)
    web = pages(access=lambda _: user)
    reached = recorded(web)
    cookie, token = form_of(web)
    request = get(path_of(route))
    if route.method == "POST":
        request = post(path_of(route), cookie, token, headers=SAME_SITE)
    response = web.handle(request)
    if may is None:
        assert response.status == 401
    elif not {Permission.VIEW, route.permission} <= may:
        assert response.status == 403
        assert b"expected the permission" in response.body
    else:
        assert response.status == 200
        assert reached == [route.name]
        return
    assert reached == []


def test_what_needs_no_permission_is_known() -> None:
    """A new route without one has to be written here, and has no data in it."""
    free = {route.name for route in ROUTES.all if route.permission is None}
    assert free == {"static", "health", "login", "log_in", "log_out"}


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_post_changes(route: str, method: str) -> None:
    """Other methods never reach a changing route."""
    web = pages()
    reached = recorded(web)
    cookie, token = form_of(web)
    made = post(path_of(ROUTE[route]), cookie, token, headers=SAME_SITE)
    fields = {name: getattr(made, name) for name in ("path", "headers", "form")}
    web.handle(type(made)(method=method, **fields))
    assert route not in reached


def test_a_refusal_is_logged_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    """One line, whatever the path and the form hold."""
    web = pages(access=lambda _: User(name="victor\nforged line"))
    cookie, token = form_of(web)
    path = "/queues/a%0Ab/groups/x/notes"
    request = post(path, cookie, token, headers=SAME_SITE, fields="text=hush", client="10.0.0.9")
    with caplog.at_level(logging.WARNING, "celery_dlq.web"):
        assert web.handle(request).status == 403
    (record,) = caplog.records
    said = record.getMessage()
    assert "victor" in said
    assert "10.0.0.9" in said
    assert "redrive" in said
    assert "\n" not in said
    assert "hush" not in said
    assert token not in said


def test_every_answer_has_the_content_policy() -> None:
    """Also refusals, unknown pages and files."""
    web = pages()
    for request in (get("/nowhere"), get("/"), get(headers={"host": "evil"}), post("/logout")):
        headers = dict(web.handle(request).headers)
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
