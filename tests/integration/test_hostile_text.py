"""Letters and queues whose every text is hostile, in every output that shows them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pytest
from builders import NOW, a_letter, a_request, key_of
from celery import Celery
from click.testing import CliRunner, Result

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.events import Action
from celery_dlq.letters.record import DeadLetter, Delivery, Outcome
from celery_dlq.store.metrics import DEAD_LETTERS

EVIL = "\x1b(2J\x9b\u202e\udc80\nforged\r\x07"
QUEUE = f"orders{EVIL}-DLQ"
STORED = QUEUE.encode("utf-8", "backslashreplace").decode()
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def shop(redis_url: str) -> Iterator[DeadLetters]:
    """An app with letters of the worst kind."""
    app = Celery("shop", broker=redis_url, set_as_current=False)
    app.conf.dlq_queues = {f"orders{EVIL}": {"max_deliveries": 3}}
    made = DeadLetters(app)
    for number in range(2):
        letter = hostile_letter(number)
        made.store.dead_letter(letter, key_of(letter))
    yield made
    made.close()


def hostile_letter(number: int) -> DeadLetter:
    """Every text of it is chosen by an enemy."""
    task_id = f"{number}{EVIL}"
    headers = a_request(id=task_id, task=EVIL, argsrepr=EVIL, kwargsrepr=EVIL, x=EVIL)
    history = Delivery(
        number=1,
        started_at=NOW,
        worker_hostname=EVIL,
        worker_pid=1,
        outcome=Outcome.FAILED,
        exception_type=EVIL,
        exception_message=EVIL,
    )
    return a_letter(
        task_id=task_id,
        task_name=EVIL,
        source_queue=f"orders{EVIL}",
        dead_letter_queue=QUEUE,
        description=EVIL,
        exception_type=EVIL,
        exception_message=EVIL,
        traceback=EVIL,
        routing_key=EVIL,
        exchange=EVIL,
        content_type=EVIL,
        argsrepr=EVIL,
        kwargsrepr=EVIL,
        origin=EVIL,
        worker_hostname=EVIL,
        release=EVIL,
        headers=json.dumps(headers),
        history=(history,),
        args_json=json.dumps([EVIL]),
        kwargs_json=json.dumps({EVIL: EVIL}),
        body=json.dumps([[EVIL], {EVIL: EVIL}, {}]).encode(),
    )


def run(shop: DeadLetters, *arguments: str, exit_code: int = 0) -> Result:
    """One command; nothing it says steers a terminal."""
    context = SimpleNamespace(app=shop.app, no_color=False)
    done = CliRunner().invoke(commands, arguments, obj=context)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == exit_code, done.output
    assert not STEERING.findall(done.output), ascii(done.output)
    return done


def letter_id(shop: DeadLetters) -> str:
    """One of the letters."""
    return next(shop.letters(STORED)).id


def test_every_table_is_harmless(shop: DeadLetters) -> None:
    """Names keep to their lines, and nothing steers the terminal."""
    job = shop.discard(STORED, limit=1, grep="forged").job_id
    shop.override_policy(f"orders{EVIL}", timedelta(hours=1), max_deliveries=4)
    shop.assembly.jobs().audit.record(Action.EDITED, EVIL, {EVIL: EVIL, "other": [EVIL]}, letters=1)
    for command in (
        ["queues"],
        ["list", STORED],
        ["show", letter_id(shop)],
        ["groups", STORED],
        ["tail", STORED],
        ["audit"],
        ["jobs"],
        ["jobs", "status", job],
        ["policies"],
        ["list", STORED, "--discarded"],
        ["trim", "--dry-run"],
    ):
        run(shop, *command)
    run(shop, "redrive", STORED, "--all", "--dry-run")
    run(shop, "redrive", STORED, "--yes", "--all", "--to-queue", f"order{EVIL}", exit_code=1)


def test_json_says_what_is_there(shop: DeadLetters) -> None:
    """Each line is JSON, of the very values that Python gives."""
    shop.assembly.jobs().audit.record(Action.EDITED, EVIL, {"x": EVIL}, letters=1)
    shop.override_policy(f"orders{EVIL}", timedelta(hours=1), max_deliveries=4)
    expected: dict[str, Any] = {
        "list": [letter.to_json() for letter in shop.letters(STORED, newest_first=True)],
        "tail": [letter.to_json() for letter in shop.letters(STORED)],
        "audit": [change.to_json() for change in shop.changes(9)],
        "policies": list(shop.policies().to_json()),
    }
    for command, values in expected.items():
        arguments = [command, STORED] if command in ("list", "tail") else [command]
        said = run(shop, *arguments, "--json").stdout.splitlines()
        assert [json.loads(line) for line in said] == values
    for command in (["queues"], ["groups", STORED], ["show", letter_id(shop)]):
        assert json.loads(run(shop, *command, "--json").stdout.splitlines()[0])


@pytest.mark.parametrize("name", ["nothing", f"no{EVIL}", "\udcff"])
def test_an_error_is_one_line(shop: DeadLetters, name: str) -> None:
    """It names queues, whose names may be hostile; and what an operator typed may be no text."""
    for command in (
        ["list", name],
        ["show", name],
        ["redrive", name, "--yes", "--all"],
        ["jobs", "status", name],
        ["list", STORED, "--grep", name],
        ["redrive", STORED, "--yes", "--task", name],
        ["discard", STORED, "--exception", name, "--yes"],
        ["restore", name],
        ["policies", "--queue", name],
    ):
        said = run(shop, *command, exit_code=1).stderr
        assert said.startswith("Error: ")
        assert said.count("\n") == 1


def test_a_terminal_without_utf_8_ends_no_command(shop: DeadLetters) -> None:
    """What it cannot show is escaped, so that JSON says the same."""
    odd = a_letter(dead_letter_queue="odd-DLQ", description="é \u6f22 \U0001f600")
    shop.store.dead_letter(odd, key_of(odd))
    done = {
        command: CliRunner(charset="latin-1").invoke(
            commands, command.split(), obj=SimpleNamespace(app=shop.app, no_color=False)
        )
        for command in ("tail odd-DLQ --json", "list odd-DLQ", "queues", "audit", "policies")
    }
    assert {command: result.exception for command, result in done.items()} == dict.fromkeys(done)
    assert json.loads(done["tail odd-DLQ --json"].stdout)["description"] == odd.description


def test_a_question_is_one_line(shop: DeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may have pasted the queue's name."""
    store = shop.assembly.backend.letters
    raw = f"raw{EVIL.replace(chr(0xDC80), '')}-DLQ"
    for _ in range(2):
        letter = a_letter(dead_letter_queue=raw)
        store.dead_letter(letter, key_of(letter))
    monkeypatch.setattr(
        "celery_dlq.cli.context.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    )
    said = run(shop, "purge", raw, "--all", exit_code=1).output
    assert "Purge 2 letters of raw\\x1b(2J" in said


def test_metrics_can_be_scraped(shop: DeadLetters, redis_url: str) -> None:
    """One name that is no UTF-8 must not take away the metrics of all."""
    store = shop.assembly.backend.metrics
    assert store.add_counts({(DEAD_LETTERS.name, EVIL, QUEUE, "failed", EVIL): 3})
    server = shop.serve_metrics(port=0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            text = reply.read().decode()
    finally:
        server.shutdown()
        server.server_close()
    assert "forged" in text
    assert not STEERING.findall(text)
    assert not [line for line in text.splitlines() if line.startswith("forged")]
    assert re.search(r"^celery_dlq_dead_letters_total\{.*\} 3.0$", text, re.MULTILINE)


def test_an_export_has_all_letters(shop: DeadLetters, tmp_path: Path) -> None:
    """Parquet takes UTF-8 only."""
    assert shop.export(tmp_path / "all").letters == 2
    report = shop.export(
        tmp_path / "redacted", redact=["kwargs.card", "headers.x"], redact_key=b"k" * 32
    )
    assert (report.letters, report.unreadable) == (2, 0)
    for folder in ("all", "redacted"):
        table = ds.dataset(tmp_path / folder, partitioning="hive").to_table()
        assert table.num_rows == 2
        assert all("forged" in text for text in table.column("task_name").to_pylist())
