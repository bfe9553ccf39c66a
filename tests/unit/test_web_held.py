"""The messages of a hold on the pages: looked at, edited and stopped before anybody starts them."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import pytest
from builders import a_letter, key_of
from web_pages import SAME_SITE, Answer, Pages, form_of, get, pages, post

from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.edit import Edit
from celery_dlq.web.http import Permission, User

AMOUNTS = (5000, 7000)


def pay(amount: int, note: str) -> None:
    """Nothing here runs it."""


@pytest.fixture
def hold() -> tuple[Pages, str, list[DeadLetter]]:
    """A hold with two payments."""
    web = pages()
    web.dlq.app.task(pay, name="shop.pay", shared=False)
    name = web.dlq.hold("shop.pay", conditions=["kwargs.amount>=1000"]).id
    found = []
    for amount in AMOUNTS:
        kwargs = {"amount": amount, "note": "<b>"}
        letter = a_letter(
            dead_letter_queue=name,
            task_id=f"pay-{amount}",
            task_name="shop.pay",
            content_type="application/json",
            body=json.dumps([[], kwargs, {}]).encode(),
            args_json="[]",
            kwargs_json=json.dumps(kwargs),
        )
        web.dlq.assembly.backend.held.dead_letter(letter, key_of(letter))
        found.append(letter)
    return web, name, found


def sent(web: Pages, path: str, fields: dict[str, str]) -> Answer:
    """Send a form."""
    cookie, token = form_of()
    return web.handle(post(path, cookie, token, fields=urlencode(fields), headers=SAME_SITE))


def test_a_hold_leads_to_its_messages(hold: tuple[Pages, str, list[DeadLetter]]) -> None:
    """All of them, or those with an argument; a wrong condition is named beside the form."""
    web, name, (first, second) = hold
    assert f'href="/holds/{name}"' in web.handle(get("/holds")).body.decode()
    shown = web.handle(get(f"/holds/{name}")).body.decode()
    assert shown.index(second.id) < shown.index(first.id)
    assert "Release 2 messages" in shown
    some = web.handle(get(f"/holds/{name}", query="where=kwargs.amount%3D7000")).body.decode()
    assert (second.id in some, first.id in some) == (True, False)
    wrong = web.handle(get(f"/holds/{name}", query="where=amount"))
    assert (wrong.status, b"conditions look like" in wrong.body) == (400, True)
    assert web.handle(get("/holds/hold-none")).status == 404
    empty = web.dlq.hold(queue="celery").id
    assert b"has no messages" in web.handle(get(f"/holds/{empty}")).body


def test_a_held_message_is_edited_on_its_page(hold: tuple[Pages, str, list[DeadLetter]]) -> None:
    """What cannot be used is said, with what was typed; what was edited is shown."""
    web, name, (first, _second) = hold
    path = f"/holds/{name}/{first.id}"
    shown = web.handle(get(path)).body.decode()
    assert "5000" in shown
    assert "<b>" not in shown.partition("<main")[2]
    for fields in ({"args": "[]", "kwargs": "[]"}, {"args": "{", "kwargs": "{}"}):
        assert sent(web, f"{path}/edit", fields).status == 400
    fields = {"args": "[]", "kwargs": '{"amount": 4000}', "note": "OPS-9"}
    assert sent(web, f"{path}/edit", fields).status == 303
    assert [one.id for one in web.dlq.held_messages(name)][-1] == first.id
    assert b"edited by olga" in web.handle(get(path)).body
    assert web.dlq.changes(limit=1)[0].detail["note"] == "OPS-9"


def test_a_form_that_was_opened_before_another_edit_is_refused_once(
    hold: tuple[Pages, str, list[DeadLetter]],
) -> None:
    """It says who changed what, and keeps what was typed; then it may be saved all the same."""
    web, name, (first, _second) = hold
    path = f"/holds/{name}/{first.id}"

    def seen_on(page: Answer) -> str:
        return page.body.decode().partition('name="seen" value="')[2].partition('"')[0]

    fields = {"args": "[]", "kwargs": '{"amount": 4000}', "seen": seen_on(web.handle(get(path)))}
    assert fields["seen"]
    web.dlq.edit_held(name, first.id, Edit(assign={"kwargs.note": "from rita"}))
    refused = sent(web, f"{path}/edit", fields)
    text = refused.body.decode()
    assert (refused.status, "has changed meanwhile" in text) == (400, True)
    assert text.count("from rita") >= 2  # in the error, and as it is now
    assert "4000" in text
    found = json.loads(list(web.dlq.held_messages(name))[-1].kwargs_json or "")
    assert found == {"amount": 5000, "note": "from rita"}
    assert sent(web, f"{path}/edit", fields | {"seen": seen_on(refused)}).status == 303


def test_a_held_message_is_stopped_on_its_page(hold: tuple[Pages, str, list[DeadLetter]]) -> None:
    """After a question; who may not hold sees the buttons, with the reason."""
    web, name, (first, second) = hold
    path = f"/holds/{name}/{first.id}"
    asked = sent(web, f"{path}/discard", {})
    assert b"nothing brings it back" in asked.body
    assert len(list(web.dlq.held_messages(name))) == 2
    assert sent(web, f"{path}/discard", {"confirmed": "yes"}).status == 303
    assert [one.id for one in web.dlq.held_messages(name)] == [second.id]
    assert web.handle(get(path)).status == 404
    reader = pages(access=lambda _: User(name="rita", permissions={Permission.VIEW}))
    reader.app.site.dlq = web.dlq
    shown = reader.handle(get(f"/holds/{name}/{second.id}")).body.decode()
    assert "disabled" in shown
    assert "textarea" not in shown


@pytest.mark.parametrize(
    ("back", "to"),
    [
        ("/queues/orders-DLQ?by=letters", "/queues/orders-DLQ?by=letters"),
        ("", "/holds"),
        ("//evil.example/", "/holds"),
        ("https://evil.example/", "/holds"),
        ("/\\evil.example", "/holds"),
        ("/x\r\nSet-Cookie: a=b", "/holds"),
    ],
)
def test_who_holds_and_releases_comes_back_to_where_it_was_asked(
    hold: tuple[Pages, str, list[DeadLetter]], back: str, to: str
) -> None:
    """The page of a cause, from which a redrive is next; never one of somebody else."""
    web, name, _letters = hold
    shown = web.handle(get("/audit", query="x=1")).body.decode()
    assert '<input type="hidden" name="back" value="/audit?x=1">' in shown
    for path, fields in (("/holds", {"task": "shop.pay"}), ("/holds/end", {"id": name})):
        asked = sent(web, path, {**fields, "back": back})
        assert f'<a href="{to}">Do nothing</a>' in asked.body.decode()
        done = sent(web, path, {**fields, "back": back, "confirmed": "yes"})
        assert (done.status, dict(done.headers)["location"]) == (303, to)
