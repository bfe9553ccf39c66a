"""What stands in Redis in another form: an earlier main's, a later format, and damaged values."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from command_line import Dlq
from waiting import poll
from workers import Worker

from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.instructions import Override
from celery_dlq.store.keys import FORMAT, Keys

sys.path.append(str(Path(__file__).parents[1] / "wire"))

from record_store import restored

WIRE = Path(__file__).parents[1] / "wire"
STORES = sorted(WIRE.glob("store_v*.json"))
RECORDED: dict[str, Any] = json.loads(STORES[-1].read_text("utf-8"))
Start = Callable[..., Worker]

READING = (
    ("queues",),
    ("list", "orders-DLQ"),
    ("groups", "orders-DLQ"),
    ("differences", "orders-DLQ", "--task", "poison_app.fails"),
    ("holds",),
    ("breaker",),
    ("policies",),
    ("jobs",),
    ("audit",),
    ("trim", "--dry-run"),
)
"""What operators look at; none of it changes anything."""


@pytest.fixture
def client(redis_url: str) -> Any:
    """A client of the empty store."""
    with redis.Redis.from_url(redis_url) as found:
        yield found


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.stem)
def test_what_an_earlier_version_left_is_read(
    path: Path, client: Any, poison: ModuleType, dlq: Dlq, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded by that version with a worker and an operator: letters, holds, overrides, jobs."""
    restored(client, json.loads(path.read_text("utf-8")))
    with caplog.at_level(logging.WARNING):
        for command in READING:
            done = dlq(*command)
            assert done.exit_code == 0, (command, done.stderr)
        assert [q.letters for q in poison.dlq.queues()] == [4]
        assert sum(group.letters for group in poison.dlq.groups("orders-DLQ")) == 4
        assert {group.status.state.value for group in poison.dlq.groups("orders-DLQ")} >= {"muted"}
        fingerprints = [group.fingerprint for group in poison.dlq.groups("orders-DLQ")]
        notes = [one.text for f in fingerprints for one in poison.dlq.notes("orders-DLQ", f)]
        assert notes == ["the partner is down"]
        assert sorted(held.held for held in poison.dlq.holds()) == [1, 2]
        assert [held.hold.task for held in poison.dlq.breakers()] == ["poison_app.fails"]
        assert [o.value for o in poison.dlq.assembly.backend.instructions.in_force(Override)] == [9]
        assert {job.kind for job in poison.dlq.jobs()} == {"discard", "redrive"}
        assert len(list(poison.dlq.discarded("orders-DLQ"))) == 1
        assert len(poison.dlq.changes()) >= 5
    assert [record.getMessage() for record in caplog.records] == []


def test_a_worker_writes_the_format_down(client: Any, start_worker: Start) -> None:
    """The first to start; the others find it."""
    start_worker()
    assert client.get(Keys().format()) == b"%d" % FORMAT


def test_commands_refuse_a_later_format_in_one_line(
    client: Any, poison: ModuleType, dlq: Dlq
) -> None:
    """They would misread it, or write what the later version misreads."""
    poison.dlq.close()  # a command is a process of its own
    client.set(Keys().format(), FORMAT + 1)
    for command in (*READING, ("hold", "--task", "poison_app.fails")):
        done = dlq(*command)
        assert done.exit_code == 1
        assert re.fullmatch(
            r"Error: expected the store at redis://\S+ to have the format 1, got '2', which a "
            r"later celery_dlq wrote; install that version here\n",
            done.stderr,
        ), done.stderr
    assert client.keys() == [Keys().format().encode()]


def test_workers_run_tasks_beside_a_later_format_and_write_nothing_there(
    client: Any, poison: ModuleType, start_worker: Start, ran: Callable[[str], int]
) -> None:
    """As while the store is away: healthy tasks run, letters wait; nothing is written there."""
    client.set(Keys().format(), FORMAT + 1)
    worker = start_worker()
    poison.healthy.delay("well")
    poison.fails.delay("dies")
    poll(lambda: ran("well") == 1 and ran("dies") >= 1, timeout_seconds=30)
    assert "to have the format 1, got '2', which a later celery_dlq wrote" in worker.output
    assert "Traceback" not in worker.output.partition("ready.")[0]
    assert [key for key in client.keys("dlq:*") if key != Keys().format().encode()] == []
    client.delete(Keys().format())  # the later version is taken back
    poll(lambda: sum(q.letters for q in poison.dlq.queues()) == 1, timeout_seconds=60)


def test_the_api_raises_it(client: Any, poison: ModuleType) -> None:
    """Like a store that is away."""
    poison.dlq.close()
    client.set(Keys().format(), "later")
    with pytest.raises(StoreUnavailable, match="got 'later', which a later celery_dlq wrote"):
        poison.dlq.queues()


GARBAGE = (b'\xff{"garbage": |:', b"{}", b"[]", b"7", b"", b"null", b"1e999")


def _damage(client: Any, name: str) -> None:
    """Replace the values of a key, and keep its type."""
    kind, garbage = client.type(name), GARBAGE[0]
    if kind == b"hash":
        for number, field in enumerate(client.hkeys(name)):
            client.hset(name, field, GARBAGE[number % len(GARBAGE)])
        for number, one in enumerate(GARBAGE):
            client.hset(name, b"\xffother %d" % number, one)
            client.hset(name, b'["orders","other %d"]' % number, one)
    elif kind == b"string":
        client.set(name, garbage)
    elif kind == b"set":
        client.sadd(name, garbage)
    elif kind == b"zset":
        client.zadd(name, {garbage: 1})
    else:
        client.xadd(name, {b"\xff": garbage})
        newest, fields = client.xrevrange(name, count=2)[1]
        client.xdel(name, newest)
        client.xadd(name, dict.fromkeys(fields, garbage))


DAMAGED = sorted(
    {re.sub(r"(run:\d+|redriven|marker|breaker_ends):.*", r"\1:", name) for name in RECORDED}
)


@pytest.mark.parametrize("how", ["values", "type"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_value_is_one_line_and_the_rest_is_shown(
    kind: str, how: str, client: Any, poison: ModuleType, dlq: Dlq
) -> None:
    """Neither a traceback nor the end of a command about something else."""
    restored(client, RECORDED)
    (hostname,) = client.hkeys(Keys().worker_infos())
    client.zadd(Keys().nodes(), {hostname: int(time.time() * 1000)})
    for name in [name for name in RECORDED if name.startswith(kind)]:
        if how == "values":
            _damage(client, name)
        else:
            was = client.type(name)
            client.delete(name)
            client.rpush(name, "a list") if was != b"list" else client.set(name, "text")
    for command in READING:
        done = dlq(*command)
        assert "Traceback" not in done.stdout + done.stderr
        if done.exit_code:
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stderr.startswith("Error: "), done.stderr


def test_a_worker_starts_and_runs_among_damaged_values(
    client: Any, poison: ModuleType, start_worker: Start, ran: Callable[[str], int]
) -> None:
    """What all workers read at their start and every second: overrides, holds, demands, jobs."""
    restored(client, RECORDED)
    for name in RECORDED:
        _damage(client, name)
    for number, one in enumerate(GARBAGE):
        client.hset(Keys().instructions(), f"demand:task-{number}", one)
    before = poison.dlq.store.length("orders-DLQ")
    worker = start_worker()
    poison.healthy.delay("well")
    poison.fails.delay("dies")
    poll(lambda: ran("well") == 1, timeout_seconds=30)
    poll(lambda: poison.dlq.store.length("orders-DLQ") > before, timeout_seconds=30)
    for what in ("the override", "the hold", "the demand"):
        poll(
            lambda what=what: re.search(f"Skipped {what} .*, which cannot be read: ", worker.output)
        )
    assert worker.output.count("Traceback") == 1, worker.output  # that of the task


def test_all_that_an_earlier_version_held_is_released_at_once(
    client: Any, poison: ModuleType, dlq: Dlq, start_worker: Start, ran: Callable[[str], int]
) -> None:
    """Before the plugin goes: a hold's messages, and those of an open circuit breaker."""
    restored(client, RECORDED)
    assert dlq("release", "--all", "--limit", "1").exit_code == 2
    assert dlq("release").exit_code == 2
    start_worker()
    reports = dlq("release", "--all", "--json").lines
    probe = 1  # of the circuit breaker: the worker may have taken it by then
    assert sum(report["published"] for report in reports) in (3 - probe, 3)
    poll(lambda: ran("held-1") + ran("held-2") == 2, timeout_seconds=30)
    poll(lambda: ran("held by the breaker") == 1, timeout_seconds=30)
    assert dlq("holds").stdout.startswith("Nothing is held.")
    nothing = dlq("release", "--all")
    assert nothing.stdout.startswith("Nothing is held.")
    assert nothing.exit_code == 0


def test_a_hold_that_cannot_be_released_does_not_keep_the_others(
    client: Any, poison: ModuleType, dlq: Dlq, start_worker: Start
) -> None:
    """One of another broker: an error line, the exit code, and the next one."""
    restored(client, RECORDED)
    found = client.hgetall(Keys().instructions()).items()
    holds = {name: json.loads(text) for name, text in found if name.startswith(b"hold:")}
    first = min(holds, key=lambda name: holds[name]["since"])
    client.hset(Keys().instructions(), first, json.dumps({**holds[first], "broker": "amqp /"}))
    start_worker()
    done = dlq("release", "--all", "--json")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: expected a hold of the broker 'redis /0'")
    assert len(done.stderr.splitlines()) == len(done.stdout.splitlines()) == 1
