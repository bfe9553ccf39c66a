"""Messages in any form, compressed or of protocol 1: operators find, hold and edit them alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
from command_line import Dlq
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter

Start = Callable[..., Worker]
Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]

FORMS = {
    "plain": (2, {}),
    "gzip": (2, {"compression": "gzip"}),
    "bzip2": (2, {"compression": "bzip2"}),
    "old": (1, {}),
    "old-gzip": (1, {"compression": "gzip"}),
}
UNREADABLE = {
    "yaml": (2, {"serializer": "yaml"}),
    "yaml-gzip": (2, {"serializer": "yaml", "compression": "gzip"}),
}
EVERY = {**FORMS, **UNREADABLE}


@contextmanager
def protocol(app: Any, number: int) -> Iterator[None]:
    """Let an app publish in one of Celery's protocols."""
    app.conf.task_protocol = number
    app.amqp.__dict__.pop("create_task_message", None)  # made from the setting
    try:
        yield
    finally:
        app.conf.task_protocol = 2
        app.amqp.__dict__.pop("create_task_message", None)


def publish(poison: ModuleType, task: str) -> dict[str, str]:
    """Publish a task in every form; its ids."""
    sent = {}
    for form, (number, how) in EVERY.items():
        with protocol(poison.app, number):
            one = getattr(poison, task).apply_async((f"acme-{form}",), **how)
            sent[form] = one.id
    return sent


def test_a_hold_knows_the_arguments_of_any_form_and_counts_what_it_cannot_read(
    poison: ModuleType, start_worker: Start, ran: Ran, dlq: Dlq
) -> None:
    """A tenant that compresses is held like another; YAML runs, and the operator is told."""
    worker = start_worker()
    hold = poison.dlq.hold("poison_app.healthy", conditions=["args[0]~acme"])
    poll(lambda: f"{hold.id} of" in worker.output, timeout_seconds=10)
    publish(poison, "healthy")
    poll(lambda: all(ran(f"acme-{form}") for form in UNREADABLE), timeout_seconds=20)
    poll(lambda: [one.held for one in poison.dlq.holds()] == [len(FORMS)], timeout_seconds=20)
    poll(lambda: [one.unread for one in poison.dlq.holds()] == [2], timeout_seconds=10)

    assert "2 messages could not be read; they were not held" in dlq("holds").stdout
    assert f"so {hold.id} does not hold it" in worker.output
    assert {ran(f"acme-{form}") for form in FORMS} == {0}
    assert poison.dlq.release(hold.id).published == len(FORMS)
    poll(lambda: all(ran(f"acme-{form}") == 1 for form in EVERY), timeout_seconds=30)


def test_letters_of_any_form_are_found_compared_exported_and_edited(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    dlq: Dlq,
    tmp_path: Path,
) -> None:
    """By `--where`, `--grep` and `--set`, with their bytes as they came."""
    sent = publish(poison, "fails")
    start_worker()
    by = {sent_id: form for form, sent_id in sent.items()}
    found = {by[one.task_id]: one for one in letters(count=len(EVERY))}

    listed = dlq("list", "orders-DLQ", "--where", "args[0]~acme", "--json")
    assert {by[one["task_id"]] for one in listed.lines} == set(FORMS)
    assert "2 letters could not be read; they were not listed" in listed.stderr
    assert {by[one.task_id] for one in poison.dlq.letters("orders-DLQ", grep="acme-old-gzip")} == {
        "old-gzip"
    }
    assert poison.dlq.page("orders-DLQ", conditions=("args[0]~acme",)).unread == 2
    planned = dlq("redrive", "orders-DLQ", "--where", "args[0]~acme", "--dry-run")
    assert "Would redrive 5 letters" in planned.stdout
    assert "2 letters could not be read; they were left out" in planned.stderr
    assert poison.dlq.differences("orders-DLQ", reason="failed").unread == 2

    poison.dlq.export(tmp_path / "lake")
    files = (tmp_path / "lake").rglob("dlq=*/**/*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in rows:
        form = by[row["task_id"]]
        known = json.dumps([f"acme-{form}"]) if form in FORMS else None
        assert (form, row["args_json"]) == (form, known)
        assert row["body"] == found[form].body
    assert json.loads(zlib.decompress(found["gzip"].body))[0] == ["acme-gzip"]

    for form in FORMS:
        change = f'args[0]="edited-{form}"'
        done = dlq(
            "redrive", "orders-DLQ", found[form].id, "--set", change, "--set", "kwargs.fixed=true"
        )
        assert done.exit_code == 0, done.stderr
    poll(lambda: all(ran(f"edited-{form}") == 1 for form in FORMS), timeout_seconds=30)
    refused = dlq("redrive", "orders-DLQ", found["yaml"].id, "--set", 'args[0]="x"')
    assert refused.exit_code == 1
    assert "expected a JSON message of Celery to edit" in refused.stderr
