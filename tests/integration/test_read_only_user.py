"""A Redis user who may only read, as docs/how-to/redis-acl.md has it: commands and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from builders import DLQ, a_letter, an_app, key_of
from click.testing import CliRunner
from servers import RedisServer
from web_pages import ALL, ROUTES, SAME_SITE, SECRET, Pages, form_of, get, post

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.web import User

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "redis-acl.md"
PAGES = [one for one in ROUTES if one.method == "GET" and one.name != "export"]  # that one streams
PASSWORD = "a-long-password"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis of its own: users are the server's."""
    with RedisServer() as started:
        yield started


@pytest.fixture(scope="module")
def known(server: RedisServer) -> dict[str, str]:
    """What is there to be read: a letter, a cause with a note, a job, a hold, an override."""
    owner = DeadLetters(an_app(dlq_url=server.url))
    letter, other = a_letter(), a_letter()
    for one in (letter, other):
        owner.store.dead_letter(one, key_of(one))
    owner.note(DLQ, letter.fingerprint, "looked at")
    owner.discard(DLQ, ids=frozenset([other.id]))
    (job,) = owner.jobs()
    owner.app.task(name="shop.charge", shared=False)(charge)
    hold = owner.hold(task="shop.charge").id
    held = replace(letter, dead_letter_queue=hold)
    owner.assembly.backend.held.dead_letter(held, key_of(held))
    owner.close()
    names = {"queue": DLQ, "letter": letter.id, "fingerprint": letter.fingerprint}
    return {**names, "job": job.id, "hold": hold}


@pytest.fixture(scope="module")
def viewer(server: RedisServer) -> Iterator[DeadLetters]:
    """An app that reaches the store as the page's user."""
    name = ["viewer", "reset", "resetchannels", "on", f">{PASSWORD}"]
    found = re.search(f"ACL SETUSER {' '.join(name)}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    server.client().execute_command("ACL", "SETUSER", *name, *found[1].split())
    url = server.url.replace("redis://", f"redis://viewer:{PASSWORD}@")
    dlq = DeadLetters(an_app(dlq_url=url, dlq_queues={"orders": {"max_deliveries": 3}}))
    yield dlq
    dlq.close()


def charge() -> None:
    """A task."""


def run(dlq: DeadLetters, line: str) -> Any:
    """Run a command."""

    class Context:
        app = dlq.app

    return CliRunner().invoke(commands, line.split(), obj=Context())


@pytest.mark.parametrize(
    "line",
    [
        "audit",
        "breaker",
        "differences {queue}",
        "groups {queue}",
        "holds",
        "jobs",
        "jobs status {job}",
        "list {queue}",
        "list {queue} --json",
        "list {queue} --grep bad",
        "policies",
        "queues",
        "redrive {queue} --all --dry-run",
        "show {letter}",
        "trim --dry-run",
    ],
)
def test_every_command_that_reads(viewer: DeadLetters, known: dict[str, str], line: str) -> None:
    """It prints what it prints for others."""
    done = run(viewer, line.format(**known))
    assert done.exit_code == 0, done.output


def test_the_doctor_says_that_this_user_is_no_workers(
    viewer: DeadLetters, known: dict[str, str]
) -> None:
    """And reads the rest all the same: the hold, and that there is no worker."""
    kinds = {one.check for one in viewer.doctor()}
    assert {"store-refuses", "hold", "no-worker"} <= kinds
    assert "store" not in kinds


@pytest.mark.parametrize("route", PAGES, ids=lambda r: r.name)
def test_every_page(
    viewer: DeadLetters, known: dict[str, str], server: RedisServer, route: Any
) -> None:
    """It is shown, and nothing but the connection's name is refused."""
    server.client().execute_command("ACL", "LOG", "RESET")
    web = Pages(viewer, access=lambda _: User(name="olga", permissions=ALL), secret=SECRET)
    static = {"hash": web.app.site.templates.static["style.css"], "file": "style.css"}
    parts = {**known, **static}
    path = re.sub(r"\{(\w+)\}", lambda part: quote(parts[part[1]], safe=""), route.pattern)
    answer = web.handle(get(path))
    web.close()
    assert answer.status == 200, answer.body.decode()
    refused = {entry["object"] for entry in server.client().acl_log()}
    assert refused <= {"client", "client|setname", "client|setinfo"}


def test_what_would_change_something_says_what_is_refused(
    viewer: DeadLetters, known: dict[str, str]
) -> None:
    """On the terminal, and on the page: Redis runs, and the user may not."""
    done = run(viewer, "discard {queue} --all --yes".format(**known))
    assert done.exit_code == 1
    assert "to allow its user" in done.output
    assert "check that Redis runs" not in done.output
    web = Pages(viewer, access=lambda _: User(name="olga", permissions=ALL), secret=SECRET)
    cookie, token = form_of()
    path = f"/queues/{known['queue']}/discard"
    answer = web.handle(post(path, cookie, token, headers=SAME_SITE))
    web.close()
    text = answer.body.decode()
    assert answer.status == 503
    assert "The store refuses this" in text
    assert "workers keep" not in text
