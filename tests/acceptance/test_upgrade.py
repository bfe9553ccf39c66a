"""Upgrade and rollback: two versions on one Redis, and what is left without the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from next_version import make_next_version
from waiting import poll
from workers import HERE, Worker, environment

from celery_dlq import DeadLetter, Reason
from celery_dlq.operations.edit import Edit

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]
Dlq = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def next_path(tmp_path: Path) -> str:
    """The folder in which Python finds the next version first."""
    return f"{make_next_version(tmp_path)}:{HERE}"


@pytest.fixture
def next_dlq(redis_url: str, next_path: str) -> Dlq:
    """Run ``celery dlq … --json`` of the next version; give its lines."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *arguments, "--json"],
            env=environment(redis_url, PYTHONPATH=next_path),
            cwd=HERE,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def fix_the_bug(redis_url: str) -> None:
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("fixed", "yes")


def test_two_versions_write_list_and_redrive_each_others_letters(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
    next_path: str,
    next_dlq: Dlq,
    tmp_path: Path,
) -> None:
    """A rolling upgrade: workers and operators of both versions, one Redis, every letter whole."""
    start_worker(arguments=("--hostname", "this@host"), wait=False)
    start_worker(arguments=("--hostname", "next@host"), env={"PYTHONPATH": next_path})
    sent = 0

    def both_stored() -> bool:
        nonlocal sent
        for _ in range(4):
            poison.fails.delay(f"order-{sent}")
            sent += 1
        found = letters(count=sent)
        return {letter.worker_hostname for letter in found} == {"this@host", "next@host"}

    poll(both_stored, timeout_seconds=30)
    poison.requeues.delay("poison")
    mine = letters(count=sent + 1)
    # Each version reads both kinds; the older keeps what it does not know.
    for letter in mine:
        new = letter.worker_hostname == "next@host"
        assert letter.schema_version == (2 if new else 1)
        assert letter.extra == ({"region": "süd".encode()} if new else {})
    theirs = {letter["id"]: letter for letter in next_dlq("list", "orders-DLQ", "--limit", "999")}
    assert {letter.id for letter in mine} == set(theirs)
    for letter in mine:
        region = theirs[letter.id].pop("region")
        assert region == ("süd" if letter.schema_version == 2 else None)
        assert theirs[letter.id] == letter.to_json()
    # Deliveries of one message are counted by both.
    (dead,) = (x for x in mine if x.reason is Reason.MAX_DELIVERIES_EXCEEDED)
    assert ran("poison") == dead.deliveries == 3
    # Through the bin of the older version and back, and through its export.
    known = next(x for x in mine if x.schema_version == 2 and x.reason is Reason.FAILED)
    poison.dlq.discard("orders-DLQ", ids=frozenset([known.id]))
    poison.dlq.restore(known.id)
    assert next_dlq("show", known.id)[0]["region"] == "süd"
    assert poison.dlq.get(known.id).extra == known.extra
    assert poison.dlq.export(tmp_path / "letters").letters == len(mine)
    # Each version redrives letters of the other, and both run them.
    fix_the_bug(redis_url)
    failed = [x for x in mine if x.reason is Reason.FAILED]
    old = [x.id for x in failed if x.schema_version == 1]
    new_ids = frozenset(x.id for x in failed if x.schema_version == 2)
    assert next_dlq("redrive", "orders-DLQ", *old, "--yes")[0]["published"] == len(old)
    assert poison.dlq.redrive("orders-DLQ", ids=new_ids).published == len(new_ids)
    poll(lambda: all(ran(f"order-{n}") == 2 for n in range(sent)), timeout_seconds=30)
    assert [x.id for x in poison.dlq.letters("orders-DLQ")] == [dead.id]


@pytest.fixture
def without_the_plugin(tmp_path: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """A Python command and its environment, for all packages but ours."""
    packages = tmp_path / "packages"
    packages.mkdir()
    folders = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    for path in (path for folder in folders for path in folder.iterdir()):
        link = packages / path.name
        if not path.name.startswith("celery_dlq") and not link.exists():
            link.symlink_to(path)
    # Without `site` no .pth file is read, which an editable install would be found by.
    return (sys.executable, "-S"), {"PYTHONPATH": f"{packages}:{HERE}"}


def test_ordinary_workers_run_what_the_plugin_leaves_in_the_queues(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    redis_url: str,
    without_the_plugin: tuple[tuple[str, ...], dict[str, str]],
) -> None:
    """Uninstalled: plain, delayed, redriven and edited messages are Celery's own messages."""
    worker = start_worker()
    for key in ("redriven", "edited", "later", "stays"):
        poison.fails.delay(key)
    found = {json.loads(x.args_json or "")[0]: x for x in letters(count=4)}
    worker.stop()
    poison.dlq.redrive("orders-DLQ", ids=frozenset([found["redriven"].id]))
    poison.dlq.redrive("orders-DLQ", ids=frozenset([found["later"].id]), delay=timedelta(seconds=1))
    poison.dlq.edit(found["edited"].id, Edit(assign={"args.0": "mended"}))
    poison.fails.delay("plain")
    poison.delayed.delay("delayed")
    poison.retries.delay("retried")
    with poison.app.connection_for_read() as connection:
        client = connection.default_channel.client
        raw = [*client.lrange("orders", 0, -1), *client.lrange("slow", 0, -1)]
    ours = {name for text in raw for name in json.loads(text)["headers"] if name[:4] == "dlq_"}
    assert {"dlq_redrive", "dlq_letter", "dlq_redrives", "dlq_edited"} <= ours
    assert "dlq_default_delay" in ours

    command, env = without_the_plugin
    plain = start_worker(app="plain_app", python=command, env=env)
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as traces:
        keys = ("redriven", "mended", "later", "plain", "delayed")
        poll(lambda: all(traces.exists(f"plain:{key}") for key in keys), timeout_seconds=30)
        poll(lambda: traces.lrange("plain:retried", 0, -1) == [b"0", b"1"], timeout_seconds=30)
        plain.stop()
        assert [traces.llen(f"plain:{key}") for key in keys] == [1] * len(keys)
    assert "ERROR" not in plain.output
    assert "Traceback" not in plain.output
    for key in ("redriven", "edited", "later"):
        assert poison.app.backend.get_state(found[key].task_id) == "SUCCESS"
    with redis.Redis.from_url(redis_url) as broker:
        left = [broker.llen("orders"), broker.llen("slow"), broker.hlen("unacked")]
    assert left == [0, 0, 0]
    # What was not redriven waits for whoever installs the plugin again.
    assert [x.id for x in poison.dlq.letters("orders-DLQ")] == [found["stays"].id]
