"""Commands that check first: a mistyped name does nothing, and no queue leads to a chain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
import redis
from builders import a_letter, a_request, key_of
from command_line import Dlq
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter

Start = Callable[..., Worker]
Cli = Callable[..., CompletedProcess[str]]
Letters = Callable[..., list[DeadLetter]]
QUEUE = "orders-DLQ"


@pytest.fixture
def cli(redis_url: str) -> Cli:
    """Run ``celery -A poison_app dlq …`` as a process of its own."""

    def run(*arguments: str, **env: str) -> CompletedProcess[str]:
        return run_python(redis_url, "-m", "celery", "-A", "poison_app", "dlq", *arguments, **env)

    return run


def put(poison: ModuleType, task: str = "poison_app.healthy") -> DeadLetter:
    """Store a letter of a task that would succeed now."""
    headers = json.dumps(a_request(task=task))
    letter = a_letter(task_name=task, headers=headers, body=b'[["x"], {}, {}]')
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def refused(done: CompletedProcess[str]) -> str:
    """The error of a command that was refused in one line, without a traceback."""
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_a_mistyped_queue_gets_nothing_unless_it_is_forced(
    cli: Cli, poison: ModuleType, redis_url: str
) -> None:
    """Exit code 1, the letter stays; with --force it goes, and the audit has it."""
    letter = put(poison)
    for more in (["--all"], [letter.id], [letter.id, "--set", "args.0=y"]):
        said = refused(cli("redrive", QUEUE, "--yes", *more, "--to-queue", "ordres"))
        assert "did you mean 'orders'?" in said
        assert "--force" in said
    with redis.Redis.from_url(redis_url) as broker:
        assert broker.llen("ordres") == 0
        assert [x.id for x in poison.dlq.letters(QUEUE)] == [letter.id]
        done = cli("redrive", QUEUE, "--yes", "--all", "--to-queue", "ordres", "--force")
        assert done.returncode == 0, done.stderr
        assert broker.llen("ordres") == 1
    (change,) = poison.dlq.changes()
    assert change.detail["options"] == {"to_queue": "ordres", "force": True}
    assert "force" in cli("audit").stdout


def test_letters_of_a_task_whose_code_is_gone_stay_and_the_others_go(
    cli: Cli, poison: ModuleType, start_worker: Start, ran: Callable[[str], int]
) -> None:
    """Named with their number; exit code 1, also for a program."""
    start_worker()
    put(poison)
    gone = [put(poison, "poison_app.gone").id for _ in range(2)]
    said = refused(cli("redrive", QUEUE, "--yes", "--all"))
    assert "Redriven from orders-DLQ: 1 letter" in said
    assert "refused 2 letters: task 'poison_app.gone' is not registered by" in said
    assert "2 would be lost or have no delivery left, and stay in orders-DLQ; --force" in said
    assert poll(lambda: ran("x"))
    assert {x.id for x in poison.dlq.letters(QUEUE)} == set(gone)
    done = cli("redrive", QUEUE, "--yes", "--task", "poison_app.gone", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["published"], report["refused"]) == (1, 0, 2)
    assert sum(report["refused_by"].values()) == 2


def test_names_that_nobody_knows_are_refused_with_the_name_that_was_meant(
    cli: Cli, poison: ModuleType, tmp_path: Path
) -> None:
    """Overrides and exports; nothing is written."""
    put(poison)
    override = ("max_deliveries=3", "--for", "1h")
    assert "did you mean 'orders'?" in refused(cli("policies", "set", "ordres", *override))
    said = refused(cli("policies", "set", QUEUE, *override))
    assert "got 'orders-DLQ', a dead-letter queue" in said
    target = tmp_path / "letters"
    said = refused(cli("export", str(target), "--queue", "orders-DQL"))
    assert "did you mean 'orders-DLQ'?" in said
    assert not target.exists()
    assert poison.dlq.assembly.backend.instructions.all() == poison.dlq.changes() == []


CONSUMES_LETTERS: dict[str, Any] = {
    "dlq_queues": {"*": {"max_deliveries": 3}, "slow": {"dead_letter_queue": "letters"}}
}


@pytest.mark.parametrize("name", [QUEUE, "letters"])
def test_a_worker_that_consumes_a_dead_letter_queue_keeps_its_letters_there(
    name: str, place: Place, poison: ModuleType, redis_url: str, start_worker: Start, dlq: Dlq
) -> None:
    """A pattern does not guard it, a decorator does; there is never a `…-DLQ-DLQ`."""
    if place.name == "sqs":
        pytest.skip("nothing here is different on SQS")
    start_worker(CONSUMES_LETTERS, arguments=("--queues", name), env=place.env)
    send = (
        "import poison_app as p; "
        f"p.to_dlq.apply_async(('a',), queue={name!r}); p.once.apply_async(('b',), queue={name!r})"
    )
    sent = run_python(redis_url, "-c", send, conf=CONSUMES_LETTERS, **place.env)
    assert sent.returncode == 0, sent.stderr
    poll(lambda: [q.letters for q in poison.dlq.queues()] == [2], timeout_seconds=30)
    assert [(x.dead_letter_queue, x.source_queue) for x in poison.dlq.letters(name)] == [
        (name, name)
    ] * 2
