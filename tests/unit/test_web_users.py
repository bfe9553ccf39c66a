"""Users of the pages: their file, their sessions, and who guesses passwords."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from web_pages import SAME_SITE, SECRET, cookie_of, form_of, get, pages, post

from celery_dlq.errors import NotFound, SettingsError
from celery_dlq.web.asgi import Proxies
from celery_dlq.web.http import Permission, RequestError, User
from celery_dlq.web.users import (
    COOKIE,
    MAX_AGE_SECONDS,
    Attempts,
    Login,
    TrustedHeader,
    UsersFile,
    hash_of,
    matches,
)

PASSWORD = "correct horse"


@pytest.fixture(autouse=True)
def _cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second for each password adds up."""
    monkeypatch.setattr("celery_dlq.web.users._LOG_N", 4)


@pytest.fixture
def users(tmp_path: Path) -> UsersFile:
    """Give a file with a user who may redrive."""
    found = UsersFile(str(tmp_path / "users"))
    found.put("alice", PASSWORD, [Permission.REDRIVE])
    return found


def a_site(users: UsersFile, *, allow_changes: bool = True) -> Any:
    """Pages with a login."""
    login = Login(users, SECRET, allow_changes=allow_changes, why_not="Started read-only.")
    return pages(access=login, login=login)


def logged_in(web: Any, name: str = "alice", password: str = PASSWORD, **changes: Any) -> Any:
    """Send the form of the login; returns the answer."""
    cookie, token = form_of(web, root=changes.get("root", ""))
    more = changes.pop("fields", "")
    fields = f"name={name}&password={password}&{more}"
    given = {"client": "10.0.0.7", "headers": SAME_SITE, **changes}
    return web.handle(post("/login", cookie, token, fields=fields, **given))


def test_a_password_matches_its_hash_alone() -> None:
    """Each hash has a salt of its own and says how it was made."""
    first, second = hash_of(PASSWORD), hash_of(PASSWORD)
    assert first != second
    assert first.startswith("$scrypt$ln=4,r=8,p=5$")
    assert matches(PASSWORD, first)
    assert matches("pässwörd", hash_of("pässwörd"))
    assert not matches("correct horsf", first)
    assert not matches("", first)
    assert not matches(PASSWORD, "plain")
    assert not matches(PASSWORD, first.replace("ln=4", "ln=40"))


def test_hashes_are_made_as_it_is_advised() -> None:
    """2^14 rounds, and more passes for the memory that is saved."""
    from celery_dlq.web import users as module

    with mock.patch.object(module, "_LOG_N", 14):
        assert hash_of(PASSWORD).startswith("$scrypt$ln=14,r=8,p=5$")


def test_the_file_is_for_its_owner_alone_and_replaced_as_a_whole(users: UsersFile) -> None:
    """Nobody sees half of it, and nothing is left beside it."""
    before = users.path.stat().st_ino
    users.put("bob", "another one", [])
    assert stat.S_IMODE(users.path.stat().st_mode) == 0o600
    assert users.path.stat().st_ino != before
    assert [*users.path.parent.iterdir()] == [users.path]
    assert PASSWORD not in users.path.read_text()
    assert [*users.load()] == ["alice", "bob"]
    assert users.load()["bob"].permissions == {Permission.VIEW}
    assert users.load()["alice"].permissions == {Permission.VIEW, Permission.REDRIVE}


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "a b", "x" * 101])
def test_a_name_that_would_break_the_file_is_refused(users: UsersFile, name: str) -> None:
    """A colon or a line end would make another user of it."""
    with pytest.raises(SettingsError, match="expected a name"):
        users.put(name, PASSWORD, [])


def test_a_short_password_is_refused(users: UsersFile) -> None:
    """The message does not repeat it."""
    with pytest.raises(SettingsError, match="got 5") as caught:
        users.put("bob", "short", [])
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("alice", "line 2"),
        ("alice:view:hush", "expected name:permissions"),
        (f"alice:fly:{hash_of(PASSWORD)}", "expected permissions of view"),
    ],
)
def test_a_line_that_is_none_is_named_by_its_number(users: UsersFile, line: str, said: str) -> None:
    """And not shown: it may have a password in it."""
    users.path.write_text(f"# users\n{line}\n")
    with pytest.raises(SettingsError, match=said) as caught:
        users.load()
    assert "hush" not in str(caught.value)


def test_a_login_leads_back_to_the_page_that_was_asked_for(users: UsersFile) -> None:
    """With a cookie that scripts cannot read and other sites do not send."""
    web = a_site(users)
    asked = web.handle(get("/queues/orders%2FDLQ/letters", query={"reason": ["failed"]}))
    assert asked.status == 401
    assert b'name="next" value="/queues/orders%252FDLQ/letters?reason=failed"' in asked.body
    response = logged_in(web, fields="next=/queues/orders%25252FDLQ/letters")
    assert response.status == 303
    headers = dict(response.headers)
    assert headers["location"] == "/queues/orders%252FDLQ/letters"
    for part in ("HttpOnly", "SameSite=Lax", "Path=/", f"Max-Age={MAX_AGE_SECONDS}"):
        assert part in headers["set-cookie"]
    assert "Secure" not in headers["set-cookie"]
    user = web.who(get(headers={"cookie": cookie_of(response, COOKIE)}))
    assert user.name == "alice"
    assert user.may(Permission.REDRIVE)
    assert not user.may(Permission.DISCARD)


def test_the_cookie_belongs_to_the_mount_and_to_https(users: UsersFile) -> None:
    """It is sent to no other app of the host."""
    web = a_site(users)
    response = logged_in(web, root="/ops/dlq", scheme="https")
    headers = dict(response.headers)
    assert headers["location"] == "/ops/dlq/"
    assert "Path=/ops/dlq;" in headers["set-cookie"]
    assert headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize(
    "there",
    [
        "https://evil.example/",
        "//evil.example/",
        "/%5Cevil.example",
        "\\/evil.example",
        "/\\evil.example",
        "/\t/evil.example",
        "javascript:alert(1)",
        "evil",
        "/é",
        "/%0d%0aset-cookie:x",
    ],
)
def test_a_login_leads_to_no_other_site(users: UsersFile, there: str) -> None:
    """Whatever the form says."""
    from urllib.parse import quote

    response = logged_in(a_site(users), fields=f"next={quote(there)}")
    location = dict(response.headers)["location"]
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert "\r" not in location


def test_below_a_mount_only_its_own_paths_are_led_to(users: UsersFile) -> None:
    """The rest of the host is another app."""
    web = a_site(users)
    there = {"root": "/dlq"}
    assert dict(logged_in(web, **there, fields="next=/admin").headers)["location"] == "/dlq/"
    assert dict(logged_in(web, **there, fields="next=/dlqx/").headers)["location"] == "/dlq/"
    assert dict(logged_in(web, **there, fields="next=/dlq/a").headers)["location"] == "/dlq/a"


def test_a_wrong_name_looks_and_costs_like_a_wrong_password(users: UsersFile) -> None:
    """Both are hashed once."""
    web = a_site(users)
    with mock.patch("celery_dlq.web.users.hashlib.scrypt", return_value=b"x") as hashed:
        one = logged_in(web, "alice", "wrong password")
        other = logged_in(web, "nobody", "wrong password")
    assert hashed.call_count == 2
    assert one.status == other.status == 401
    assert b"The name or the password is not right." in one.body
    assert b"wrong password" not in one.body
    plain = other.body.replace(b"nobody", b"alice")
    assert plain.count(b"<input") == one.body.count(b"<input")


def test_who_guesses_has_to_wait(users: UsersFile) -> None:
    """After five tries; others may log in meanwhile."""
    web = a_site(users)
    found = [logged_in(web, "alice", f"guess {n}").status for n in range(7)]
    assert found == [401] * 5 + [429] * 2
    refused = logged_in(web)
    assert refused.status == 429
    assert dict(refused.headers)["retry-after"] == "30"
    assert logged_in(web, client="10.0.0.8").status == 303


def test_tries_come_back_with_time() -> None:
    """One each half minute; right passwords use none up."""
    now = [0.0]
    attempts = Attempts(clock=lambda: now[0])
    for _ in range(20):
        attempts.take("10.0.0.7")
        attempts.give_back("10.0.0.7")
    for _ in range(5):
        attempts.take("10.0.0.7")
    with pytest.raises(RequestError, match="try again in 30 seconds"):
        attempts.take("10.0.0.7")
    now[0] += 30.0
    attempts.take("10.0.0.7")
    with pytest.raises(RequestError):
        attempts.take("10.0.0.7")


def test_many_addresses_have_a_limit_together() -> None:
    """And only some of them are remembered."""
    attempts = Attempts(clock=lambda: 0.0)
    for n in range(100):
        attempts.take(f"10.0.1.{n}")
    with pytest.raises(RequestError):
        attempts.take("10.0.2.1")
    with mock.patch("celery_dlq.web.users._MOST_ADDRESSES", 10):
        for n in range(20):
            with pytest.raises(RequestError):
                attempts.take(f"10.0.3.{n}")
        assert len(attempts._addresses) == 10


def test_a_network_of_ipv6_is_one_address() -> None:
    """Every customer has 2^64 of them."""
    attempts = Attempts(clock=lambda: 0.0)
    for n in range(5):
        attempts.take(f"2001:db8::{n:x}")
    with pytest.raises(RequestError):
        attempts.take("2001:db8::ffff")
    attempts.take("2001:db8:0:1::1")


def test_sessions_end(users: UsersFile) -> None:
    """With the logout, the user, the password, the secret, and after twelve hours."""
    web = a_site(users)
    cookie = cookie_of(logged_in(web), COOKIE)
    asked = get(headers={"cookie": cookie})
    assert web.who(asked) is not None
    with mock.patch("itsdangerous.timed.time.time", return_value=9_999_999_999):
        assert web.who(asked) is None
    other = Login(users, "another secret", allow_changes=True, why_not="")
    assert other(asked) is None
    users.put("bob", "another one", [])
    assert web.who(asked) is not None
    users.put("alice", "a new password", [])
    assert web.who(asked) is None

    cookie = cookie_of(logged_in(web, password="a new password"), COOKIE)
    asked = get(headers={"cookie": cookie})
    users.remove("alice")
    assert web.who(asked) is None
    with pytest.raises(NotFound, match="no user 'alice'"):
        users.remove("alice")


def test_a_logout_ends_the_session_for_copies_of_its_cookie(users: UsersFile) -> None:
    """And takes the cookie from the browser."""
    web = a_site(users)
    cookie = cookie_of(logged_in(web), COOKIE)
    ours, token = form_of(web)
    request = post("/logout", f"{ours}; {cookie}", token, headers=SAME_SITE)
    response = web.handle(request)
    assert response.status == 303
    assert "Max-Age=0" in dict(response.headers)["set-cookie"]
    assert web.who(get(headers={"cookie": cookie})) is None


def test_a_forged_cookie_is_nobody(users: UsersFile) -> None:
    """Nor one that is something else."""
    web = a_site(users)
    for cookie in (f"{COOKIE}=x", f"{COOKIE}=", f'{COOKIE}="', "\x00", f"{COOKIE}=YWxpY2U.x.y"):
        assert web.who(get(headers={"cookie": cookie})) is None


def test_without_changes_everybody_only_looks(users: UsersFile) -> None:
    """Whatever the file says."""
    web = a_site(users, allow_changes=False)
    user = web.who(get(headers={"cookie": cookie_of(logged_in(web), COOKIE)}))
    assert user.permissions == {Permission.VIEW}
    assert user.why_not == "Started read-only."


def test_permissions_change_with_the_file(users: UsersFile) -> None:
    """Without a new login, as long as the password stays."""
    web = a_site(users)
    asked = get(headers={"cookie": cookie_of(logged_in(web), COOKIE)})
    text = users.path.read_text().replace("redrive,view", "discard,view")
    users.path.write_text(text)
    os.utime(users.path, ns=(1, 1))
    user = web.who(asked)
    assert user.may(Permission.DISCARD)
    assert not user.may(Permission.REDRIVE)
    users.path.unlink()
    assert web.who(asked) is None


def test_a_user_header_counts_from_a_trusted_proxy_only() -> None:
    """Anybody can send a header."""
    access = TrustedHeader(name="x-forwarded-user", permissions=frozenset(Permission), why_not="")
    web = pages(access=access)
    headers = {"x-forwarded-user": "alice"}
    assert web.who(get(headers=headers, proxied=True)).name == "alice"
    refused = web.handle(get("/events/poll", headers=headers, client="10.9.9.9"))
    assert refused.status == 403
    assert b"trusted proxy" in refused.body
    assert web.handle(get("/events/poll", proxied=True)).status == 401


def test_a_proxy_is_believed_only_if_it_is_named() -> None:
    """The browser's address is the last one that no trusted proxy has."""
    proxies = Proxies(["10.0.0.0/8", "fd00::1"])
    headers = {"x-forwarded-proto": "https", "x-forwarded-for": "6.6.6.6, 8.8.8.8, 10.0.0.2"}
    assert proxies.seen("10.0.0.1", "http", headers) == ("8.8.8.8", "https", True)
    assert proxies.seen("9.9.9.9", "http", headers) == ("9.9.9.9", "http", False)
    assert proxies.seen("", "http", headers) == ("", "http", False)
    assert proxies.seen("fd00::1", "http", {}) == ("fd00::1", "http", True)
    odd = {"x-forwarded-proto": "javascript"}
    assert proxies.seen("10.0.0.1", "http", odd) == ("10.0.0.1", "http", True)
    with pytest.raises(SettingsError, match="expected addresses of proxies"):
        Proxies(["proxy.internal"])


def test_a_user_is_made_of_plain_words() -> None:
    """Apps write them in their rule."""
    user = User(name="olga", permissions={"view", "redrive"})
    assert user.may(Permission.REDRIVE)
    assert not user.may(Permission.DISCARD)
    with pytest.raises(SettingsError, match="expected permissions of view"):
        User(permissions={"fly"})
