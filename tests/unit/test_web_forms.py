"""Forms of other sites change nothing: every changing route, every way to be foreign."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from html import unescape
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import pytest
from builders import DLQ, a_letter, key_of
from web_pages import (
    ALL,
    HOST,
    POSTS,
    ROUTES,
    SAME_SITE,
    Answer,
    Pages,
    form_of,
    get,
    pages,
    path_of,
    post,
    recorded,
)

from celery_dlq.errors import StoreUnavailable
from celery_dlq.web.access import MAX_AGE_SECONDS
from celery_dlq.web.http import Permission, User

ROUTE = {route.name: route for route in ROUTES}
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
    cookie, token = form_of()
    if how.get("token_of") == "other":
        _, token = form_of()
    if how.get("token_of") == "server":
        _, token = form_of("the secret of another server")
    request = post(
        path_of(ROUTE[route]),
        how.get("cookie", cookie),
        how.get("token", token),
        headers=how.get("headers", SAME_SITE),
    )
    return web.handle(request)


@pytest.mark.parametrize("route", POSTS)
def test_a_form_that_is_not_ours_is_refused(route: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before any page is reached, with a page that says why, and a line in the log."""
    web = pages()
    reached = recorded(web)
    for name, how in FOREIGN.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "celery_dlq.web"):
            response = sent(web, route, how)
        host = how.get("headers", {}).get("host")
        assert response.status == (421 if host else 403), name
        assert b"expected" in response.body or b"form" in response.body, name
        assert reached == [], name
        assert host or "Refused POST" in caplog.text, name
        assert not any(key == "location" for key, _ in response.headers), name


def test_an_old_form_is_refused() -> None:
    """Twelve hours after it was made, by every route."""
    web = pages()
    reached = recorded(web)
    with mock.patch("itsdangerous.timed.time.time", return_value=1_000_000_000):
        cookie, token = form_of()
    later = 1_000_000_000 + MAX_AGE_SECONDS + 2
    with mock.patch("itsdangerous.timed.time.time", return_value=later):
        for route in POSTS:
            response = web.handle(post(path_of(ROUTE[route]), cookie, token, headers=SAME_SITE))
            assert response.status == 403, route
            assert b"older than 12 hours" in response.body, route
    assert reached == []


OURS: dict[str, tuple[dict[str, str], str, str | None]] = {
    "headers": (SAME_SITE, "http", None),
    "origin": (HERE, "http", None),
    "plain http by name": ({"origin": "http://ops:9809", "host": "ops:9809"}, "http", None),
    "https proxy": (
        {"origin": "https://ops.example", "host": "ops.example:443"},
        "https",
        None,
    ),
    "url": (
        {"origin": "https://ops.example", "host": "127.0.0.1"},
        "http",
        "https://ops.example",
    ),
    "written else": ({"origin": "https://OPS.example:443"}, "http", "https://ops.example"),
}
"""How browsers send a form of these pages: headers, scheme, the public address if it is set."""


@pytest.mark.parametrize("address", OURS)
def test_our_own_form_is_taken(address: str) -> None:
    """From all addresses that browsers use for these pages, by every route that changes."""
    headers, scheme, url = OURS[address]
    web = pages(url=url, hosts=["ops", "ops.example"])
    reached = recorded(web)
    routes = [name for name in POSTS if ROUTE[name].permission]
    for route in routes:
        cookie, token = form_of()
        request = post(path_of(ROUTE[route]), cookie, token, headers=headers, scheme=scheme)
        assert web.handle(request).status == 200, route
    assert reached == routes


def test_a_form_of_one_process_is_taken_by_another() -> None:
    """They share a secret, and nothing else."""
    other = pages()
    reached = recorded(other)
    cookie, token = form_of()
    other.handle(post(path_of(ROUTE["add_note"]), cookie, token, headers=SAME_SITE))
    assert reached == ["add_note"]


def test_a_form_of_a_process_with_another_secret_names_the_setting() -> None:
    """Without one, each process has a random one: every second form was refused."""
    web = pages(secret=None)
    cookie, token = form_of("the secret of another one")
    asked = post(path_of(ROUTE["add_note"]), cookie, token, headers=SAME_SITE)
    answer = web.handle(asked)
    assert answer.status == 403
    assert b"`dlq web --secret`" in answer.body
    assert b"asgi(secret=...)" in answer.body


def test_a_refused_form_gives_back_what_was_typed_but_no_token() -> None:
    """So that it can be sent again by hand."""
    web = pages()
    cookie, token = form_of()
    request = post(path_of(ROUTE["add_note"]), cookie, token, fields="text=all+of+my+note")
    body = web.handle(request).body
    assert b"all of my note" in body
    assert token.encode() not in body.partition(b"<main")[2]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("canary=1&canary_wait=0", b"expected canary_wait to be more than 0 seconds, got 0.0"),
        ("canary=1001", b"expected canary to be 1 to 1000 letters, got 1001"),
        ("to_queue=orders-DLQ", b"expected to_queue to be a queue of tasks"),
    ],
)
def test_a_form_of_a_redrive_refuses_what_the_redrive_refuses(fields: str, text: bytes) -> None:
    """In its words; a plan of something else would be made otherwise."""
    web = pages()
    letter = a_letter()
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    cookie, token = form_of()
    path = path_of(ROUTE["plan_redrive"])
    answer = web.handle(post(path, cookie, token, headers=SAME_SITE, fields=fields))
    assert (answer.status, text in unescape(answer.body.decode()).encode()) == (400, True)
    assert web.dlq.jobs() == []


PERMISSIONS = {
    "nobody": None,
    "who may not even look": frozenset(),
    **{str(one): frozenset({one}) for one in Permission},
    **{f"all but {one}": ALL - {one} for one in Permission},
    "all": ALL,
}


@pytest.mark.parametrize("name", [name for name in ROUTE if ROUTE[name].permission])
def test_every_route_asks_for_its_permission(name: str) -> None:
    """401 for nobody, 403 with the permission's name, or else the page."""
    route = ROUTE[name]
    users = {
        who: None if may is None else User(name="olga", permissions=may)
        for who, may in PERMISSIONS.items()
    }
    asks = [""]
    web = pages(access=lambda _: users[asks[-1]])
    reached = recorded(web)
    cookie, token = form_of()
    request = get(path_of(route))
    if route.method == "POST":
        request = post(path_of(route), cookie, token, headers=SAME_SITE)
    for who, may in PERMISSIONS.items():
        asks.append(who)
        reached.clear()
        response = web.handle(request)
        if may is None:
            assert response.status == 401, who
        elif not {Permission.VIEW, route.permission} <= may:
            assert response.status == 403, who
            assert b"expected the permission" in response.body, who
        else:
            assert response.status == 200, who
        assert reached == ([name] if response.status == 200 else []), who


def test_what_needs_no_permission_is_known() -> None:
    """A new route without one has to be written here, and has no data in it."""
    free = {route.name for route in ROUTES if route.permission is None}
    assert free == {"static", "health"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_post_changes(method: str) -> None:
    """Other methods never reach a changing route."""
    web = pages()
    reached = recorded(web)
    for route in POSTS:
        cookie, token = form_of()
        made = post(path_of(ROUTE[route]), cookie, token, headers=SAME_SITE)
        web.handle(replace(made, method=method))
    assert not set(POSTS).intersection(reached)


def test_a_refusal_is_logged_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    """One line, whatever the path and the form hold."""
    web = pages(access=lambda _: User(name="victor\nforged line"))
    cookie, token = form_of()
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
    for request in (get("/nowhere"), get("/"), get(headers={"host": "evil"}), post("/holds")):
        headers = dict(web.handle(request).headers)
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("canary", [None, 1])
def test_many_letters_need_the_name_of_their_queue_unless_some_are_tried_first(
    monkeypatch: pytest.MonkeyPatch, canary: int | None
) -> None:
    """A canary stops before the others: nothing has to be typed."""
    monkeypatch.setattr("celery_dlq.web.pages.changes.TYPED_ABOVE", 1)
    web = pages(runs_jobs=False)
    for number in range(2):
        letter = a_letter(id=f"{number}", task_id=f"{number}")
        web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    plan = web.dlq.plan("redrive", DLQ, canary=canary, force=True).id
    body = web.handle(get(f"/jobs/{plan}")).body
    assert (b'name="typed"' in body) is (canary is None)
    cookie, token = form_of()
    started = web.handle(post(f"/jobs/{plan}/start", cookie, token, headers=SAME_SITE))
    assert started.status == (400 if canary is None else 303)


def test_a_cancelled_removal_is_resumed_with_the_name_of_its_queue_only() -> None:
    """A plan that was cancelled is over: its fifteen minutes may be, too."""
    web = pages(runs_jobs=False)
    letter = a_letter()
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    cookie, token = form_of()

    def send(job: str, verb: str, fields: str = "") -> Answer:
        path = f"/jobs/{job}/{verb}"
        return web.handle(post(path, cookie, token, fields=fields, headers=SAME_SITE))

    plans = jobs = web.dlq
    planned = plans.plan("discard", DLQ).id
    assert send(planned, "cancel").status == 303
    answer = send(planned, "resume", f"typed={DLQ}")
    assert answer.status == 409
    assert b"a plan that was cancelled" in answer.body
    assert b">Resume<" not in web.handle(get(f"/jobs/{planned}")).body

    started = plans.start(plans.plan("discard", DLQ).id).id
    assert send(started, "cancel").status == 303
    assert b'name="typed"' in web.handle(get(f"/jobs/{started}")).body
    for fields in ("", "typed=another-DLQ"):
        answer = send(started, "resume", fields)
        assert answer.status == 400
        assert b"to be typed; nothing was done" in answer.body
        assert jobs.job(started).state == "cancelled"
    assert send(started, "resume", f"typed={DLQ}").status == 303
    assert jobs.job(started).state in ("waiting", "running", "done")


def test_what_would_be_lost_is_forced_where_one_reads_of_it() -> None:
    """The first page of a redrive does not ask; the plan does, if there is something to lose."""
    web = pages(runs_jobs=False)
    letter = a_letter()
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    cookie, token = form_of()
    assert b"lost" not in web.handle(get(f"/queues/{DLQ}/redrive")).body
    plan = web.dlq.plan("redrive", DLQ, to_queue="typo")
    assert b'name="force"' in web.handle(get(f"/jobs/{plan.id}")).body
    start = f"/jobs/{plan.id}/start"
    refused = web.handle(post(start, cookie, token, headers=SAME_SITE))
    assert (refused.status, web.dlq.job(plan.id).state) == (409, "planned")
    forced = web.handle(post(start, cookie, token, fields="force=1", headers=SAME_SITE))
    assert (forced.status, web.dlq.job(plan.id).options["force"]) == (303, True)
    discard = web.dlq.plan("discard", DLQ)
    assert b'name="force"' not in web.handle(get(f"/jobs/{discard.id}")).body


def test_what_is_seldom_asked_for_is_behind_more() -> None:
    """The first row of the filter has what a night asks for; a condition in use stays in sight."""
    web = pages()
    letter = a_letter()
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    shown = web.handle(get(f"/queues/{DLQ}/letters")).body.decode()
    first, _, more = shown.partition('<details class="more">')
    for name in ("worker_hostname", "min_deliveries", "root_id", "group_id"):
        assert f'name="{name}"' in more
        assert f'name="{name}"' not in first
        used = web.handle(get(f"/queues/{DLQ}/letters", query=f"{name}=1")).body
        assert b'<details class="more" open>' in used


def test_arguments_with_control_characters_can_be_edited() -> None:
    """The form has JSON that means the same, whatever is invisible in it."""
    web = pages()
    body = json.dumps([["a\x85b\u202ec\u200bd\U000e0041"], {}, {}]).encode()
    letter = a_letter(body=body, content_type="application/json")
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    cookie, token = form_of()
    path = f"/queues/{DLQ}/letters/{letter.id}/edit"
    shown = web.handle(get(path)).body.decode()
    fields = dict(re.findall(r'<textarea id="(\w+)"[^>]*>(.*?)</textarea>', shown, re.DOTALL))
    typed = {name: unescape(text) for name, text in fields.items()}
    assert json.loads(typed["args"]) == json.loads(body)[0]
    raw = urlencode({"args": '["\x85"]', "kwargs": "no JSON"})
    again = web.handle(post(path, cookie, token, fields=raw, headers=SAME_SITE))
    assert again.status == 400
    assert '["\\u0085"]' in unescape(again.body.decode())
    typed["args"] = typed["args"].replace('"a', '"z')
    answer = web.handle(post(path, cookie, token, fields=urlencode(typed), headers=SAME_SITE))
    assert answer.status == 303, answer.body
    (plan,) = web.dlq.jobs()
    _, after = web.dlq.edited_arguments(plan.id)
    assert after["args"] == ["z\x85b\u202ec\u200bd\U000e0041"]


def test_the_health_of_pages_that_cannot_be_shown_is_not_ok() -> None:
    """A store that answers one command and no other serves nobody."""
    web = pages()
    assert web.handle(get("/healthz")).status == 200
    jobs = web.dlq.assembly.backend.jobs
    with mock.patch.object(type(jobs), "all", side_effect=StoreUnavailable("no jobs")):
        shown = Pages(web.dlq).handle(get("/"))
        assert (shown.status, b"cannot be read: no jobs" in shown.body) == (200, True)
        assert Pages(web.dlq).handle(get("/healthz")).status == 503
