"""Who may look: who has the token, and whom a proxy names."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from web_pages import (
    ALL,
    SAME_SITE,
    SECRET,
    Pages,
    cookie_of,
    form_of,
    get,
    pages,
    post,
    recorded,
)

from celery_dlq.errors import SettingsError
from celery_dlq.web.access import (
    MAX_AGE_SECONDS,
    TOKEN_COOKIE,
    ProxyUser,
    Token,
    check_secret,
    check_url,
    networks,
)
from celery_dlq.web.http import Permission, User
from celery_dlq.web.site import all_routes, allowed

TOKEN = "a token of these tests"
ASKED = f"token={TOKEN.replace(' ', '+')}"


def guarded(token: str = TOKEN, secret: str = SECRET, **options: Any) -> Pages:
    """Pages for those who have the token; without letters."""
    user = User(permissions=ALL)
    return pages(access=Token(token, secret, user), secret=secret, **options)


def test_who_opens_the_address_with_the_token_has_a_cookie_then() -> None:
    """The browser is sent on, so that its history has no token; scripts cannot read the cookie."""
    web = guarded()
    path = "/queues/orders%2FDLQ/letters"
    assert web.handle(get(path)).status == 401
    answer = web.handle(get(path, query=f"reason=failed&{ASKED}"))
    assert answer.status == 303
    headers = dict(answer.headers)
    assert headers["location"] == "/queues/orders%252FDLQ/letters?reason=failed"
    for part in ("HttpOnly", "SameSite=lax", "Path=/", f"Max-Age={MAX_AGE_SECONDS}"):
        assert part in headers["set-cookie"]
    assert "Secure" not in headers["set-cookie"]
    assert TOKEN not in str(answer)
    cookie = cookie_of(answer, TOKEN_COOKIE)
    assert web.handle(get("/jobs", headers={"cookie": cookie})).status == 200
    ours, token = form_of()
    asked = post("/policies/unset", f"{ours}; {cookie}", token, headers=SAME_SITE)
    assert web.handle(asked).status == 400  # read, and without the name of a key


def test_the_cookie_belongs_to_the_mount_and_to_https() -> None:
    """It is sent to no other app of the host."""
    web = guarded(root_path="/ops/dlq")
    headers = dict(web.handle(get("/ops/dlq/jobs", query=ASKED, scheme="https")).headers)
    assert headers["location"] == "/ops/dlq/jobs"
    assert "Path=/ops/dlq;" in headers["set-cookie"]
    assert "; Secure" in headers["set-cookie"]


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "/é", "/jobs\r\nx: y"])
def test_the_token_leads_to_no_other_site(path: str) -> None:
    """Only to pages that there are."""
    answer = guarded().handle(get(path, query=ASKED))
    assert answer.status == 404
    assert not {"location", "set-cookie"} & {name for name, _ in answer.headers}


@pytest.mark.parametrize("given", ["", "token=", "token=x", "token=%FF", f"token={TOKEN}x"])
def test_another_token_opens_nothing(given: str) -> None:
    """The page says where the right one is, and takes it."""
    answer = guarded().handle(get("/jobs", query=given.replace(" ", "+")))
    assert answer.status == 401
    assert b"printed the address with its token" in answer.body
    assert b'name="token" type="password"' in answer.body
    assert TOKEN.encode() not in answer.body
    assert not [name for name, _ in answer.headers if name == "set-cookie"]


def test_a_form_is_no_way_to_give_the_token() -> None:
    """Nor is anything else than a GET."""
    web = guarded()
    assert web.handle(post("/holds", query=ASKED, headers=SAME_SITE)).status == 401
    assert b"printed the address" not in pages(access=lambda _: None).handle(get()).body


def test_the_cookie_ends() -> None:
    """After twelve hours, with the secret, and with the token."""
    web = guarded()
    cookie = cookie_of(web.handle(get("/jobs", query=ASKED)), TOKEN_COOKIE)
    asked = get("/jobs", headers={"cookie": cookie})
    assert web.handle(asked).status == 200
    with mock.patch("itsdangerous.timed.time.time", return_value=9_999_999_999):
        assert web.handle(asked).status == 401
    assert guarded(secret="another secret of these").handle(asked).status == 401
    assert guarded(token="another token of these").handle(asked).status == 401


def test_a_forged_cookie_is_nobody() -> None:
    """Nor one that is something else."""
    web = guarded()
    session, token = form_of()
    signed = f"{TOKEN_COOKIE}={token}"  # of the same secret, for forms
    forged = [f"{TOKEN_COOKIE}={text}" for text in ("x", "", '"', "YWxpY2U.x.y", TOKEN)]
    for cookie in (*forged, "\x00", session, signed):
        assert web.handle(get("/jobs", headers={"cookie": cookie})).status == 401


def test_no_log_line_has_the_token(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of a refusal, nor of a page that fails."""
    web = guarded()
    with caplog.at_level(logging.DEBUG):
        web.handle(get("/jobs", query=ASKED))
        web.handle(post("/holds", query=ASKED, headers=SAME_SITE))
        with mock.patch("celery_dlq.web.site.acting_as", side_effect=ValueError("ours")):
            cookie = cookie_of(web.handle(get("/jobs", query=ASKED)), TOKEN_COOKIE)
            web.handle(get("/jobs", query=ASKED[:-1], headers={"cookie": cookie}))
    assert "A page failed" in caplog.text
    assert "Refused POST" in caplog.text
    assert not {TOKEN, ASKED} & set(caplog.text.split())
    assert ASKED not in caplog.text


def test_a_short_secret_is_refused() -> None:
    """The message does not repeat it."""
    with pytest.raises(SettingsError, match="at least 16 characters") as caught:
        check_secret("--token", "hush")
    assert "hush" not in str(caught.value)
    assert len(check_secret("--token", None)) > 40


def test_a_user_header_counts_from_a_trusted_proxy_only() -> None:
    """Anybody can send a header; where the connection comes from cannot be written into one."""
    web = pages(access=ProxyUser("X-Forwarded-User", ["10.0.0.0/8"], User(permissions=ALL)))
    headers = {"x-forwarded-user": "alice"}
    page = web.handle(get("/jobs", headers=headers, client="8.8.8.8", peer="10.0.0.7"))
    assert page.status == 200
    assert b"<span>alice</span>" in page.body
    utf8 = {"x-forwarded-user": "däna".encode().decode("latin-1")}  # as Starlette reads it
    assert (
        "<span>däna</span>".encode() in web.handle(get("/jobs", headers=utf8, peer="10.0.0.7")).body
    )
    for peer in ("10", "9.9.9.9", "", "10.0.0.7.example"):
        refused = web.handle(get("/jobs", headers=headers, client="10.0.0.7", peer=peer))
        assert refused.status == 403
        assert b"trusted proxy" in refused.body
    for name in ("", " ", "x" * 201):
        headers = {"x-forwarded-user": name}
        assert web.handle(get("/jobs", headers=headers, peer="10.0.0.7")).status == 401


def test_a_proxy_is_named_by_its_address() -> None:
    """A name could be somebody else's tomorrow."""
    assert len(networks(["10.0.0.7", "10.0.0.0/8", "fd00::1"])) == 3
    with pytest.raises(SettingsError, match="expected addresses of proxies"):
        networks(["proxy.internal"])


@pytest.mark.parametrize(
    "url",
    [
        "ops.example.com",
        "ftp://ops.example.com",
        "https://me:hush@ops.example.com",
        "https://ops.example.com:x/",
        "https://ops.example.com/?a=1",
        "",
    ],
)
def test_an_address_that_no_browser_has_is_refused(url: str) -> None:
    """Forms would be taken from nowhere."""
    with pytest.raises(SettingsError, match=r"such as https://ops\.example"):
        check_url("url", url)
    assert check_url("url", "https://ops.example.com/dlq/") == "https://ops.example.com/dlq"


def test_a_user_is_made_of_plain_words() -> None:
    """Apps write them in their rule."""
    user = User(name="olga", permissions={"view", "redrive"})
    assert user.may(Permission.REDRIVE)
    assert not user.may(Permission.DISCARD)
    with pytest.raises(SettingsError, match="expected permissions of view"):
        User(permissions={"fly"})


def test_each_permission_says_what_it_is_given_for() -> None:
    """Who could redrive could also hold a queue, and nobody who gave it knew."""
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "web.md").read_text("utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?)(?:;.*)? \|$", guide, re.MULTILINE))
    assert table == {str(one): allowed(one) for one in Permission}
    assert "hold" not in allowed(Permission.REDRIVE)
    unsaid = [one.name for one in all_routes() if one.method == "POST" and not one.does]
    assert unsaid == ["start", "cancel", "resume"], "a job's page asks for the job's permission"


@pytest.mark.parametrize(("given", "holds"), [("redrive", False), ("hold", True)])
def test_only_the_permission_to_hold_holds_and_releases(given: str, holds: bool) -> None:
    """It is the switch that stops production."""
    web = pages(access=lambda _: User(name="vera", permissions={"view", given}))
    reached = recorded(web)
    for path in ("/holds", "/holds/end"):
        cookie, token = form_of()
        answer = web.handle(post(path, cookie, token, headers=SAME_SITE))
        assert answer.status == (200 if holds else 403)
    assert reached == (["hold", "end_hold"] if holds else [])


def test_who_may_something_reads_what_is_missing() -> None:
    """And not that nothing can be changed."""
    assert "may look" in User().why_not
    assert User(permissions={"view", "edit_policies"}).why_not == (
        "You have the permissions view and edit_policies; this needs another."
    )
