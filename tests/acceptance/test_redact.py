"""``dlq_redact`` with a real worker: nobody sees the secret, and the redriven task receives it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import command_line
import pytest
import redis
from builders import a_letter, a_request, an_ended_delivery, key_of
from fake_sentry import FakeSentry
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter
from celery_dlq.store.keys import Keys

CARD, TOKEN, MAIL = "4111111111111111", "s3cret-token", "ada@example.com"
SECRETS = (CARD, CARD[:10], TOKEN, MAIL)
RULES = ["args[0].number", "headers.authorization", r"re:\S+@example\.com"]
MARKER = "[redacted]"
MESSAGE = ("body", "headers", "properties")

Start = Callable[..., Worker]


@pytest.fixture
def sentry() -> Iterator[FakeSentry]:
    with FakeSentry() as made:
        yield made


@pytest.fixture
def start(redis_url: str, tmp_path: Path, sentry: FakeSentry) -> Iterator[Start]:
    """Start the worker of the observed app, whose Sentry is the fake one and gets values."""
    started: list[Worker] = []

    def run(**conf: Any) -> Worker:
        options = {"dsn": sentry.dsn, "send_default_pii": True}
        env = {"OBSERVED_SENTRY": json.dumps(options), "OBSERVED_RETRIES": "1"}
        log = tmp_path / "worker.log"
        started.append(Worker(redis_url, log, conf, env=env, app="observed_app"))
        return started[-1].start()

    yield run
    for worker in started:
        worker.stop()


def publish(observed: ModuleType) -> str:
    """Send a task with secrets; returns its id."""
    sent = observed.charges.apply_async(
        args=[{"number": CARD, "holder": "Ada"}],
        kwargs={"note": f"for {MAIL}"},
        headers={"authorization": TOKEN},
    )
    return str(sent.id)


def shows(text: str) -> list[str]:
    """The secrets that a text shows."""
    return [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize("reports", [True, False])
def test_a_secret_is_shown_nowhere_and_the_redriven_task_receives_it(
    observed: ModuleType, start: Start, sentry: FakeSentry, redis_url: str, reports: bool
) -> None:
    """The letter's texts, the worker's log, Sentry's events of the retry and of the death."""
    worker = start(dlq_redact=RULES, dlq_sentry=reports)
    publish(observed)
    poll(lambda: any(queue.letters for queue in observed.dlq.queues()), timeout_seconds=30)
    (letter,) = observed.dlq.letters("orders-DLQ")
    poll(lambda: sentry.events, timeout_seconds=30)
    worker.stop()  # and what the pool processes had to say is flushed

    assert shows(letter.body.decode()) == [CARD, CARD[:10], MAIL]
    assert TOKEN in letter.headers
    texts = {name: value for name, value in letter.to_json().items() if name not in MESSAGE}
    assert shows(json.dumps(texts)) == []
    assert letter.exception_message == f"cannot charge {MARKER} for {MARKER}"
    said = [one.exception_message for one in letter.history]
    assert said == [letter.exception_message] * 2

    (ours,) = [line for line in worker.output.splitlines() if "dead-lettered to" in line]
    assert MARKER in ours
    assert "raised unexpected" in worker.output  # Celery's own line, with a traceback
    assert "Traceback (most recent call last)" in worker.output
    assert shows(worker.output) == []
    assert shows(json.dumps(sentry.events)) == []
    assert MARKER in json.dumps(sentry.events)

    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("mended", "yes")
        worker.start()
        observed.dlq.redrive("orders-DLQ")
        charged = poll(lambda: client.get("charged"), timeout_seconds=30)
    assert json.loads(charged) == [{"number": CARD, "holder": "Ada"}, f"for {MAIL}"]


@pytest.fixture
def letter(poison: ModuleType) -> DeadLetter:
    """A letter full of secrets, as a worker stored it before there was the setting."""
    args, kwargs = [{"number": CARD, "holder": "Ada"}], {"note": f"for {MAIL}"}
    stored = a_letter(
        body=json.dumps([args, kwargs, {"callbacks": None}]).encode(),
        args_json=json.dumps(args),
        kwargs_json=json.dumps(kwargs),
        headers=json.dumps(
            {**a_request(argsrepr=repr(args), task="poison_app.fails"), "Authorization": TOKEN}
        ),
        description=f"cannot charge {CARD} for {MAIL}",
        exception_message=f"cannot charge {CARD} for {MAIL}",
        traceback=f"LookupError: {CARD}, {TOKEN}",
        history=(an_ended_delivery(exception_message=f"{CARD[:10]}…"),),
    )
    poison.dlq.store.dead_letter(stored, key_of(stored))
    return stored


def test_no_command_shows_a_secret(
    dlq: command_line.Dlq, letter: DeadLetter, redis_url: str, poison: ModuleType
) -> None:
    """Also of a letter from before, of an entry that is no letter, and of what people wrote."""
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(Keys("dlq").letters("orders-DLQ"), {"card": CARD})
    queue = "orders-DLQ"
    poison.dlq.discard(queue, grep=f"{MAIL} and no other")
    poison.dlq.note(queue, letter.fingerprint, f"asked {MAIL}")
    poison.dlq.hold(
        "poison_app.healthy", conditions=[f"kwargs.to={MAIL}"], reason=f"{MAIL} complains"
    )
    for command in (
        ("show", letter.id),
        ("list", queue),
        ("tail", queue),
        ("groups", queue),
        ("queues",),
        ("jobs",),
        ("audit",),
        ("note", letter.fingerprint, "--queue", queue),
        ("holds",),
        ("redrive", queue, "--all", "--dry-run"),
    ):
        for more in ((), ("--json",)):
            done = dlq(*command, *more, conf={"dlq_redact": RULES})
            assert shows(done.stdout + done.stderr) == [], command
            if command[0] in ("show", "list", "tail", "note", "holds"):
                assert MARKER in done.stdout, command
    assert shows(dlq("show", letter.id).stdout)  # else the test would prove nothing


def test_an_edit_keeps_what_its_author_cannot_see(
    dlq: command_line.Dlq,
    letter: DeadLetter,
    poison: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The editor shows markers; the message that is sent has the values; its trail has none."""
    editor = tmp_path / "editor"
    editor.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/seen\nsed -i s/Ada/Bob/ "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    conf = {"dlq_redact": RULES}
    refused = dlq("redrive", "orders-DLQ", letter.id, "--set", 'args.0.number="1"', conf=conf)
    assert refused.exit_code == 1
    assert "expected the value at 'args.0.number' to stay as it is" in refused.stderr
    assert shows(refused.stderr) == []

    done = dlq("redrive", "orders-DLQ", letter.id, "--edit", conf=conf)

    assert done.exit_code == 0, done.stderr
    assert shows((tmp_path / "seen").read_text("utf-8")) == []
    with poison.app.connection_for_read() as connection:
        raw = json.loads(connection.default_channel.client.lindex("orders", 0))
    args, kwargs, _ = json.loads(base64.b64decode(raw["body"]))
    assert (args, kwargs) == ([{"number": CARD, "holder": "Bob"}], {"note": f"for {MAIL}"})
    assert raw["headers"]["Authorization"] == TOKEN
    assert shows(raw["headers"]["dlq_edited"]) == []
    assert "Bob" in raw["headers"]["dlq_edited"]
