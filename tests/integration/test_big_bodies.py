"""Letters with large bodies: what shows or prints many of them holds few."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace

import click
import pytest
from builders import DLQ, a_letter, key_of
from celery import Celery
from click.testing import CliRunner

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands

LETTERS = 60
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def shop(redis_server: object) -> Iterator[DeadLetters]:
    """An app with sixty letters of a megabyte."""
    server = redis_server
    server.client().flushall()  # type: ignore[attr-defined]
    app = Celery("shop", broker=server.url, set_as_current=False)  # type: ignore[attr-defined]
    made = DeadLetters(app)
    for _ in range(LETTERS):
        letter = a_letter(body=b"x" * MEGABYTE)
        made.store.dead_letter(letter, key_of(letter))
    for _ in range(8):
        letter = a_letter(body=b"x" * 10 * MEGABYTE, dead_letter_queue="huge-DLQ")
        made.store.dead_letter(letter, key_of(letter))
    yield made
    made.close()


@pytest.mark.parametrize("command", ["list --limit 60", "tail --lines 60"])
@pytest.mark.parametrize("as_json", [False, True])
def test_few_bodies_are_held_at_once(
    shop: DeadLetters, monkeypatch: pytest.MonkeyPatch, command: str, *, as_json: bool
) -> None:
    """An operator's machine has to show a thousand letters of ten megabytes, too."""
    lines: list[int] = []
    monkeypatch.setattr(click, "echo", lambda text, **_: lines.append(len(text)))
    name, *options = command.split()
    context = SimpleNamespace(app=shop.app, no_color=False)
    arguments = [name, DLQ, *options, *(["--json"] if as_json else [])]
    assert peak_of(arguments, context) < 32 * MEGABYTE
    if as_json:
        assert len(lines) == LETTERS
        assert min(lines) > MEGABYTE


def test_the_first_page_is_no_exception(shop: DeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the size of letters before one was read, so one is read."""
    monkeypatch.setattr(click, "echo", lambda *_, **__: None)
    context = SimpleNamespace(app=shop.app, no_color=False)
    assert peak_of(["list", "huge-DLQ", "--json"], context) < 80 * MEGABYTE


def peak_of(arguments: list[str], context: object) -> int:
    """The most memory that a command took, in bytes."""
    tracemalloc.start()
    try:
        done = CliRunner().invoke(commands, arguments, obj=context, catch_exceptions=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.exit_code == 0
    return peak
