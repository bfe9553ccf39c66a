"""Redriven messages run as the ones they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import redis
from celery import chain, chord
from click.testing import CliRunner
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, Reason
from celery_dlq.cli.commands import dlq

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]


@pytest.fixture
def fix_the_bug(redis_url: str) -> Callable[[], None]:
    """Let ``fails`` succeed from now on."""

    def fix() -> None:
        with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
            client.set("fixed", "yes")

    return fix


def test_a_redriven_message_succeeds_under_its_old_id_and_its_letter_is_gone(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    fix_the_bug: Callable[[], None],
) -> None:
    """Fix the bug, redrive the group: the main job of an operator."""
    start_worker()
    sent = [poison.fails.delay(f"order-{n}") for n in range(5)]
    stays = poison.to_dlq.delay("stays")
    found = letters(count=6)
    fingerprint = next(letter.fingerprint for letter in found if letter.task_id == sent[0].id)
    fix_the_bug()

    report = poison.dlq.redrive("orders-DLQ", fingerprint=fingerprint)

    assert (report.published, report.failed, report.skipped) == (5, {}, 0)
    poll(lambda: all(ran(f"order-{n}") == 2 for n in range(5)))
    assert [letter.task_id for letter in poison.dlq.letters("orders-DLQ")] == [stays.id]
    for result in sent:
        state = poll(lambda r=result: poison.app.backend.get_state(r.id) == "SUCCESS")  # type: ignore[misc]
        assert state
    groups = poison.dlq.groups("orders-DLQ")
    assert [(g.letters, g.task_name) for g in groups] == [(1, "poison_app.to_dlq")]


def test_a_redriven_message_that_dies_again_says_so(
    poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """The new letter counts the redrive, starts its deliveries at one, and names its past."""
    start_worker()
    sent = poison.requeues.delay("again")
    (first,) = letters()

    report = poison.dlq.redrive("orders-DLQ")
    second = poll(
        lambda: [x for x in poison.dlq.letters("orders-DLQ") if x.id != first.id],
        timeout_seconds=30,
    )[0]

    assert second.task_id == first.task_id == sent.id
    assert (second.redrives, second.deliveries) == (1, 3)
    assert second.reason is Reason.MAX_DELIVERIES_EXCEEDED
    assert second.body == first.body
    headers = second.decoded("headers")
    assert headers["dlq_redrive"] == report.redrive_id
    assert headers["dlq_letter"] == first.id
    assert headers["dlq_redrives"] == 1


def test_a_letter_keeps_the_message_as_it_was_published(
    poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """Body bytes, headers and properties are those of the message, whatever its content."""
    poison.fails.apply_async(("Größe ☃",), headers={"tenant": 42}, priority=3)
    with poison.app.connection_for_read() as connection:
        raw = json.loads(connection.default_channel.client.lindex("orders\x06\x163", 0))
    start_worker()

    (letter,) = letters()

    import base64

    assert letter.body == base64.b64decode(raw["body"])
    assert letter.decoded("headers") == raw["headers"]
    assert letter.decoded("headers")["tenant"] == 42
    assert letter.decoded("properties")["priority"] == 3
    assert (letter.content_type, letter.content_encoding) == ("application/json", "utf-8")
    assert json.loads(letter.args_json or "") == ["Größe ☃"]


def test_callbacks_and_chain_go_on_after_a_redrive(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    fix_the_bug: Callable[[], None],
) -> None:
    """The links of the workflow are in the body, and the body is untouched."""
    start_worker()
    chain(poison.fails.s("first"), poison.healthy.s()).apply_async()
    poison.fails.apply_async(("linked",), link=poison.healthy.s())
    found = letters(count=2)
    fix_the_bug()

    poison.dlq.redrive("orders-DLQ", ids=frozenset(letter.id for letter in found))

    poll(lambda: ran("first done") == 1 and ran("linked done") == 1, timeout_seconds=30)


def test_a_chord_fails_with_its_member_and_a_redrive_does_not_run_its_body(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    fix_the_bug: Callable[[], None],
) -> None:
    """So say the dry run and the letter."""
    start_worker()
    body = chord([poison.healthy.s("a"), poison.fails.s("b")])(poison.healthy.si("body"))
    (letter,) = letters(count=1)
    poll(lambda: body.state == "FAILURE", timeout_seconds=30)
    assert poison.dlq.dry_run("orders-DLQ").chords == 1
    shown = CliRunner().invoke(dlq, ["show", letter.id], obj=SimpleNamespace(app=poison.app))
    assert "chord" in shown.output
    assert "does not run" in shown.output
    dry = CliRunner().invoke(
        dlq, ["redrive", "orders-DLQ", "--all", "--dry-run"], obj=SimpleNamespace(app=poison.app)
    )
    assert "Parts of chords: 1." in dry.output
    fix_the_bug()

    poison.dlq.redrive("orders-DLQ")

    state_of = poison.app.backend.get_state  # an AsyncResult keeps what it saw
    poll(lambda: state_of(letter.task_id) == "SUCCESS", timeout_seconds=30)
    again = chord([poison.healthy.s("c")])(poison.healthy.si("another body"))
    poll(lambda: again.state == "SUCCESS", timeout_seconds=30)  # the queue's work is done
    assert state_of(body.id) == "FAILURE"
    assert ran("body") == 0


def test_two_redrives_at_once_publish_each_letter_once(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    fix_the_bug: Callable[[], None],
) -> None:
    """Letters are claimed: what one operator has, the other skips."""
    import threading

    worker = start_worker()
    for n in range(60):
        poison.fails.delay(f"order-{n}")
    letters(count=60)
    worker.stop()
    fix_the_bug()
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(poison.dlq.redrive("orders-DLQ")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(report.published for report in reports) == 60
    start_worker()
    poll(lambda: all(ran(f"order-{n}") >= 2 for n in range(60)), timeout_seconds=30)
    assert {ran(f"order-{n}") for n in range(60)} == {2}


def test_a_redrive_that_died_is_finished_by_the_next_without_publishing_twice(
    poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str
) -> None:
    """Letters noted as published are only removed."""
    worker = start_worker()
    for n in range(3):
        poison.fails.delay(f"order-{n}")
    ids = [letter.id for letter in letters(count=3)]
    worker.stop()
    store = poison.dlq.store
    store.claims.claim("orders-DLQ", ids[:2], owner="dead", lease_seconds=0)
    store.claims.mark_published("orders-DLQ", ids[:1], owner="dead")

    report = poison.dlq.redrive("orders-DLQ")

    assert (report.finished, report.published, report.maybe_twice) == (1, 2, 1)
    assert not list(poison.dlq.letters("orders-DLQ"))
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("orders") == 2
