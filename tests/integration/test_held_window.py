"""The auditor's window: held messages are looked at, one is stopped, the others run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
from builders import a_letter, an_app, key_of
from celery.contrib.testing.worker import start_worker
from click.testing import CliRunner, Result
from waiting import poll

from celery_dlq import DeadLetters, LetterFilter
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.letters.bodies import argument_texts
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.edit import Edit
from celery_dlq.store.claims import ClaimState


@pytest.fixture(params=["redis", "rabbitmq"])
def shop(
    request: pytest.FixtureRequest, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DeadLetters, list[int], str]]:
    """Three payments of which the large ones are held; what has run, and the hold."""
    intervals.change(monkeypatch, tick=0.05, hold_noticed=timedelta(seconds=1))
    broker = redis_url
    if request.param == "rabbitmq":
        server = request.getfixturevalue("rabbit_server")
        server.delete_queues("orders")
        broker = server.url
    app, ran = an_app(), list[int]()
    app.conf.update(
        broker_url=broker,
        dlq_url=redis_url,
        dlq_queues={"orders": {"max_deliveries": 3}},
        dlq_redact=["kwargs.card"],
        task_default_queue="orders",
        worker_prefetch_multiplier=1,
    )

    def pay(amount: int, card: str, to: str = "") -> None:
        ran.append(amount)

    app.task(pay, name="shop.pay", shared=False, acks_late=True)
    dlq = DeadLetters(app)
    hold = dlq.hold("shop.pay", conditions=["kwargs.amount>=1000"], reason="four eyes")
    with start_worker(app, perform_ping_check=False, queues=["orders"], pool="solo"):
        for amount in (10, 5000, 7000):
            app.send_task("shop.pay", kwargs={"amount": amount, "card": "4111-1111"})
        poll(lambda: sum(one.held for one in dlq.holds()) == 2 and ran, timeout_seconds=30)
        yield dlq, ran, hold.id
    dlq.close()
    app.close()


def run(dlq: DeadLetters, *arguments: str) -> Result:
    """Run a command in this process."""
    context = SimpleNamespace(app=dlq.app, no_color=True)
    return CliRunner(env={"COLUMNS": "120"}).invoke(commands, ["held", *arguments], obj=context)


def test_what_is_held_is_seen_and_one_is_stopped(
    shop: tuple[DeadLetters, list[int], str],
) -> None:
    """Masked on the screen; whole in Python; the audit has who stopped it; the other one runs."""
    dlq, ran, hold = shop
    assert ran == [10]
    first, second = dlq.held_messages(hold)
    assert [json.loads(one.kwargs_json)["amount"] for one in (first, second)] == [5000, 7000]
    assert len(list(dlq.held_messages(hold, LetterFilter(conditions=("kwargs.amount=7000",))))) == 1

    listed = run(dlq, "list", hold)
    assert (listed.exit_code, listed.output.count("shop.pay")) == (0, 2)
    shown = run(dlq, "show", hold, first.id[:8])
    assert shown.exit_code == 0, shown.output
    assert "5000" in shown.output
    assert "4111-1111" not in shown.output + listed.output
    (line,) = run(dlq, "list", hold, "--where", "kwargs.amount=7000", "--json").output.splitlines()
    assert json.loads(line)["id"] == second.id
    assert run(dlq, "discard", hold, second.id[:8]).exit_code == 2  # nobody can be asked
    claims = dlq.assembly.backend.held.claims  # as a release has it, which may have sent it
    claims.claim(hold, [second.id], owner="a release", lease_seconds=60)
    refused = run(dlq, "discard", hold, second.id[:8], "--yes")
    assert refused.exit_code == 1
    with pytest.raises(DLQError, match="is being released"):
        dlq.discard_held(hold, second.id)
    claims.release(hold, [second.id], owner="a release")
    stopped = run(dlq, "discard", hold, second.id[:8], "--note", "OPS-9", "--yes")
    assert stopped.exit_code == 0, stopped.output
    change = dlq.changes(limit=1)[0]
    assert (change.action, change.target, change.detail["note"]) == ("purged", hold, "OPS-9")
    assert run(dlq, "show", hold, second.id[:8]).exit_code == 1

    dlq.release(hold)
    poll(lambda: len(ran) == 2, timeout_seconds=30)
    assert ran == [10, 5000]


def test_arguments_are_letters_and_no_numbers_of_letters(
    shop: tuple[DeadLetters, list[int], str],
) -> None:
    """Publishers escape what is not ASCII; in rows and on one message people read it."""
    dlq, _ran, hold = shop
    card = 'Zoë\\u0041 "配送" \x1b\U0001f600'
    dlq.app.send_task("shop.pay", kwargs={"amount": 1001, "card": "", "to": card})
    poll(lambda: sum(one.held for one in dlq.holds()) == 3, timeout_seconds=30)
    *_others, last = dlq.held_messages(hold)
    for shown in (run(dlq, "list", hold), run(dlq, "show", hold, last.id)):
        assert r'"Zoë\\u0041 \"配送\" \u001b😀"' in shown.output, shown.output
    letter = a_letter(args_json='["\\ud83d", 1.00000000000000000001]', kwargs_json="{}")
    assert argument_texts(letter) == [r'["\ud83d", 1.00000000000000000001]']


def test_a_hold_that_is_not_there_is_named(redis_url: str) -> None:
    """And one without messages is empty."""
    app: Any = an_app(broker_url=redis_url, dlq_queues={"orders": {"max_deliveries": 3}})
    dlq = DeadLetters(app)
    with pytest.raises(NotFound, match="expected the id of a hold"):
        dlq.held_messages("hold-none")
    hold = dlq.hold(queue="orders")
    assert list(dlq.held_messages(hold.id)) == []
    assert "has none" in run(dlq, "list", hold.id).output
    assert run(dlq, "list").output == run(dlq, "list", hold.id).output  # the only one
    other = dlq.hold(queue="orders", conditions=["kwargs.amount=7"])
    refused = run(dlq, "list")
    assert (refused.exit_code, hold.id in refused.output) == (2, True)
    for one in (hold, other):
        dlq.release(one.id)
    assert "nothing is held" in run(dlq, "list").output
    dlq.close()


def test_a_held_message_is_edited_before_anybody_starts_it(
    shop: tuple[DeadLetters, list[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays held, as the newest, with who changed what; what was hidden stays as it was."""
    dlq, ran, hold = shop
    first, second = dlq.held_messages(hold)
    done = run(dlq, "edit", hold, first.id[:8], "--set", "kwargs.amount=4000", "--note", "OPS-9")
    assert done.exit_code == 0, done.output
    assert [one.id for one in dlq.held_messages(hold)] == [second.id, first.id]
    edited = list(dlq.held_messages(hold))[-1]
    assert json.loads(edited.kwargs_json or "") == {"amount": 4000, "card": "4111-1111"}
    assert json.loads(edited.decoded("headers")["dlq_edited"])[0]["to"].count("4000") == 1
    change = dlq.changes(limit=1)[0]
    assert (change.action, change.target, change.detail["note"]) == ("edited", hold, "OPS-9")
    assert change.detail["changed"] == ["kwargs.amount"]
    assert "4111-1111" not in run(dlq, "show", hold, first.id[:8]).output
    masked = Edit(args=[], kwargs={"amount": 4500, "card": "[redacted]"})
    dlq.edit_held(hold, second.id, masked)
    monkeypatch.setenv("EDITOR", "true")
    assert "nothing was done" in run(dlq, "edit", hold, first.id[:8]).output
    assert run(dlq, "edit", hold, first.id[:8], "--set", "kwargs.none.x=1").exit_code == 1

    dlq.release(hold)
    poll(lambda: len(ran) == 3, timeout_seconds=30)
    assert ran == [10, 4000, 4500]


@pytest.fixture
def payment(redis_url: str) -> Iterator[tuple[DeadLetters, str, DeadLetter]]:
    """A payment that is held, without a worker."""
    app = an_app(broker_url=redis_url, dlq_queues={"orders": {"max_deliveries": 3}})
    app.conf.dlq_redact = ["kwargs.card"]
    dlq = DeadLetters(app)
    hold = dlq.hold(queue="orders").id
    kwargs = {"amount": 5000, "card": "4111-1111"}
    letter = a_letter(
        dead_letter_queue=hold,
        task_id="pay-5000",
        task_name="shop.pay",
        content_type="application/json",
        body=json.dumps([[1, 2], kwargs, {}]).encode(),
        args_json="[1,2]",
        kwargs_json=json.dumps(kwargs),
    )
    dlq.assembly.backend.held.dead_letter(letter, key_of(letter))
    yield dlq, hold, letter
    dlq.close()
    app.close()


def test_each_command_shows_the_arguments_and_names_the_next(
    payment: tuple[DeadLetters, str, DeadLetter],
) -> None:
    """Masked, and of a message that waits: it has not died. Each also answers in JSON."""
    dlq, hold, letter = payment
    short, kwargs = letter.id[:8], '{"amount":5000,"card":"[redacted]"}'
    listed = run(dlq, "list", hold).output
    assert (listed.count("[1,2]"), listed.count(kwargs), listed.count(short)) == (1, 1, 4), listed
    shown = run(dlq, "show", hold, short).output
    assert "pay-5000" in shown
    assert kwargs in shown
    for text in (listed, shown):
        assert "4111-1111" not in text
        assert "deliver" not in text
        assert "died" not in text
        for verb in ("edit", "discard"):
            assert f"dlq held {verb} {hold} {short}\n" in text
    edited = run(dlq, "edit", hold, short, "--set", "args[1]=7", "--json").output
    assert json.loads(edited)["args_json"] == "[1,7]"
    assert "4111-1111" not in edited
    assert "edited" in run(dlq, "show", hold, short).output
    assert json.loads(run(dlq, "discard", hold, short, "--yes", "--json").output)["id"] == letter.id
    assert list(dlq.held_messages(hold)) == []


def test_of_two_editors_the_later_one_is_told_what_changed(
    payment: tuple[DeadLetters, str, DeadLetter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other one saved stays; what was typed is printed, because the file is gone."""
    dlq, hold, letter = payment
    opened, go = tmp_path / "opened", tmp_path / "go"
    editor = tmp_path / "editor"
    editor.write_text(
        f"#!/bin/sh\ntouch {opened}\n"
        f"for i in $(seq 600); do [ -e {go} ] && break; sleep 0.05; done\n"
        'sed -i s/5000/6000/ "$1"\n'
    )
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(run, dlq, "edit", hold, letter.id[:8])
        poll(opened.exists, timeout_seconds=30)
        dlq.edit_held(hold, letter.id, Edit(assign={"args[1]": 7}))
        go.touch()
        refused = slow.result(30)
    assert refused.exit_code == 1
    assert "has changed meanwhile" in refused.output
    assert "[[1, 7]," in refused.output  # to what
    assert '"amount": 6000' in refused.output  # what was typed
    assert "4111-1111" not in refused.output
    (found,) = dlq.held_messages(hold)
    assert json.loads(found.args_json or "") == [1, 7]
    assert json.loads(found.kwargs_json or "") == {"amount": 5000, "card": "4111-1111"}
    assert run(dlq, "edit", hold, letter.id[:8]).exit_code == 0
    (found,) = dlq.held_messages(hold)
    assert json.loads(found.kwargs_json or "")["amount"] == 6000


def test_an_edit_and_a_release_never_both_have_a_message(
    shop: tuple[DeadLetters, list[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a release has is not edited; a release that comes in between leaves it to the edit."""
    dlq, ran, hold = shop
    first, second = dlq.held_messages(hold)
    claims, change = dlq.assembly.backend.held.claims, Edit(assign={"kwargs.amount": 1})
    claims.claim(hold, [first.id], owner="a release", lease_seconds=60)
    with pytest.raises(DLQError, match="is being released"):
        dlq.edit_held(hold, first.id, change)
    claims.release(hold, [first.id], owner="a release")

    apply = dlq.assembly.settings.redaction
    states = []

    def meanwhile(*_: object) -> Any:
        states.extend(claims.claim(hold, [second.id], owner="a release", lease_seconds=60))
        return original(*_)

    original = type(apply).restored
    monkeypatch.setattr(type(apply), "restored", meanwhile)
    dlq.edit_held(hold, second.id, change)
    monkeypatch.undo()
    assert states == [ClaimState.HELD]
    held = dlq.assembly.backend.held
    assert held.length(hold) == 2
    with monkeypatch.context() as patched:  # it was gone before the copy came
        patched.setattr(
            type(apply), "restored", lambda *a: (held.remove(hold, [first.id]), original(*a))[1]
        )
        with pytest.raises(NotFound, match="just left"):
            dlq.edit_held(hold, first.id, change)
    assert [one.id for one in dlq.held_messages(hold)] == [second.id]
    dlq.release(hold)
    poll(lambda: len(ran) == 2, timeout_seconds=30)
    assert ran == [10, 1]
