"""``dlq_redact``: the secret is in no page, file, stream, title, address, log or audit."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from builders import DLQ, a_letter, a_request, an_app, an_ended_delivery, key_of
from crawling import crawl
from looking import Watched, expect, press
from served import Pages

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.store.keys import Keys

CARD, TOKEN, MAIL = "4111111111111111", "s3cret-token", "ada@example.com"
SECRETS = (CARD, CARD[:10], TOKEN, MAIL)
RULES = ["args[0].number", "headers.authorization", r"re:\S+@example\.com"]


def shown(text: str) -> list[str]:
    """The secrets that a text shows."""
    return [secret for secret in SECRETS if secret in text]


@pytest.fixture
def letter(redis_url: str, client: redis.Redis) -> DeadLetter:
    """A letter full of secrets, from before there was the setting; an entry that is no letter.

    People wrote one, too: into a filter, a note and a hold.
    """
    args, kwargs = [{"number": CARD, "holder": "Ada"}], {"note": f"for {MAIL}"}
    headers = {**a_request(argsrepr=repr(args)), "Authorization": TOKEN}
    stored = a_letter(
        body=json.dumps([args, kwargs, {"callbacks": None}]).encode(),
        args_json=json.dumps(args),
        kwargs_json=json.dumps(kwargs),
        headers=json.dumps(headers),
        properties=json.dumps({"application_headers": headers}),  # as RabbitMQ has them
        description=f"cannot charge {CARD} for {MAIL}",
        exception_message=f"cannot charge {CARD} for {MAIL}",
        traceback=f"LookupError: {CARD}, {TOKEN}",
        history=(an_ended_delivery(exception_message=f"{CARD[:10]}…"),),
    )
    app = an_app(dlq_url=redis_url)
    app.task(shown, name="shop.mail")
    dlq = DeadLetters(app)
    dlq.store.dead_letter(stored, key_of(stored))
    dlq.discard(DLQ, grep=f"{MAIL} and no other")
    dlq.note(DLQ, stored.fingerprint, f"asked {MAIL}")
    dlq.hold("shop.mail", conditions=[f"kwargs.to={MAIL}"], reason=f"{MAIL} complains")
    client.xadd(Keys().letters(DLQ), {"card": f"{CARD} {MAIL}"})
    dlq.close()
    return stored


def test_the_secret_is_nowhere(
    letter: DeadLetter, serve: Callable[..., Pages], page: Any, watched: Watched, client: Any
) -> None:
    """Every page, the plan and the job of an edit, downloads, the stream, and the log."""
    watched.allowed.append("Failed to load resource")
    pages: Pages = serve(conf={"dlq_redact": RULES})
    heard: list[str] = []
    page.on("response", lambda answer: heard.append(json.dumps([answer.url, answer.all_headers()])))
    edit = f"{pages.url}/queues/{DLQ}/letters/{letter.id}/edit"
    page.goto(edit)
    kept = page.get_by_label("Positional arguments").input_value()
    page.get_by_label("Positional arguments").fill(kept.replace("Ada", "Bob"))
    page.get_by_label("To another queue").fill("elsewhere")
    press(page, "button", "Show the change")
    assert "Bob" in page.content()
    plan = page.url
    for name, url, status in crawl(page, pages, plan, edit, most=4):
        assert status == 200, (name, url)
        assert shown(page.content() + page.title() + page.url) == [], url
    for path in (f"/queues/{DLQ}/export/jsonl", "/events/poll"):
        status, _, body = pages.get(path)
        assert (status, shown(body.decode())) == (200, []), path
    status, _, body = pages.get(f"/queues/{DLQ}/letters/{letter.id}/body")
    assert (status, shown(body.decode("latin-1"))) == (403, [])
    assert shown("".join(heard)) == []
    assert shown(pages.output) == []


def test_an_edit_keeps_the_value_that_its_author_does_not_see(
    letter: DeadLetter, serve: Callable[..., Pages], page: Any, client: redis.Redis
) -> None:
    """The message that is published has it."""
    pages: Pages = serve(conf={"dlq_redact": RULES})
    page.goto(f"{pages.url}/queues/{DLQ}/letters/{letter.id}/edit")
    field = page.get_by_label("Positional arguments")
    field.fill(field.input_value().replace("Ada", "Bob"))
    press(page, "button", "Show the change")
    page.get_by_label("I have read the note").check()
    press(page, "button", "Edit 1 letter")
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    raw = json.loads(client.lindex("orders", 0))
    args, kwargs, _ = json.loads(base64.b64decode(raw["body"]))
    assert (args, kwargs) == ([{"number": CARD, "holder": "Bob"}], {"note": f"for {MAIL}"})
    assert shown(page.content()) == []
