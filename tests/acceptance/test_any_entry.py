"""Whatever bytes lie in a guarded list of a Redis broker: the worker goes on, nothing is lost."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from command_line import Dlq
from raw import BODY
from servers import RedisServer
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, Reason
from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

QUICK = {"dlq_lease": 5}
MISSING = object()
JSON_VALUES = [MISSING, None, True, 0, 1.5, float("nan"), "", "x", [], ["x"], {}, {"a": 1}, 2**70]
PLACES = [
    ("headers",),
    ("properties",),
    ("body",),
    ("content-type",),
    ("content-encoding",),
    ("headers", "id"),
    ("headers", "task"),
    ("headers", "compression"),
    ("headers", "redelivered"),
    ("properties", "correlation_id"),
    ("properties", "reply_to"),
    ("properties", "priority"),
    ("properties", "body_encoding"),
    ("properties", "delivery_tag"),
    ("properties", "delivery_info"),
    ("properties", "delivery_info", "exchange"),
    ("properties", "delivery_info", "routing_key"),
    ("properties", "delivery_info", "priority"),
]
NO_MESSAGES = {
    "no-json": b"not json",
    "empty": b"",
    "zero": b"\x00",
    "no-utf-8": b'\xff\xfe{"',
    "null": b"null",
    "number": b"5",
    "NaN": b"NaN",
    "text": b'"text"',
    "list": b'[["x"], {}, {}]',
    "object": b"{}",
    "no-envelope": b'{"id": "x", "task": "poison_app.healthy", "args": ["x"], "kwargs": {}}',
    "deep-list": b"[" * 900 + b"]" * 900,
    "deep-object": b'{"a":' * 900 + b"1" + b"}" * 900,
    "too-deep": b"[" * 100_000,
    "record": b'{},"","admin"],["x"',
    "a-type-of-kombu": b'{"properties": {"__type__": "datetime", "__value__": 5}}',
}


def envelope(token: str, body: str | None = None, **headers: Any) -> dict[str, Any]:
    """A sound message for a task that leaves the mark ``token``."""
    text = BODY.replace(b'"x"', json.dumps(token).encode())
    return {
        "body": base64.b64encode(text).decode() if body is None else body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {
            "lang": "py",
            "task": "poison_app.healthy",
            "id": token,
            "retries": 0,
            "ignore_result": True,
            **headers,
        },
        "properties": {
            "correlation_id": token,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "orders"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"tag-{token}",
        },
    }


def replaced(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    at = tree
    for name in path[:-1]:
        at = at[name]
    at.pop(path[-1], None)
    if value is not MISSING:
        at[path[-1]] = value
    return tree


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    """The broker's database."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def rest(broker: redis.Redis) -> bool:
    """True when nothing is queued or unacknowledged."""
    return not (
        broker.llen("orders")
        or broker.hlen("unacked")
        or broker.zcard("unacked_index")
        or broker.zcard("unacked_leases")
    )


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_an_entry_that_is_no_message_is_a_letter_with_its_bytes(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    broker: redis.Redis,
    pool: str,
) -> None:
    """Whatever it is; a plain worker would have ended. What is behind it runs."""
    entries = dict(NO_MESSAGES)
    for name, body in {"half": "W1s", "no-ascii": "\u20ac"}.items():
        entries[f"base64-{name}"] = json.dumps(envelope(name, body)).encode()
    unknown = replaced(envelope("encoding"), ("properties", "body_encoding"), "rot13")
    entries["body-encoding"] = json.dumps(unknown).encode()
    entries["twice"] = json.dumps(envelope("1")).encode() * 2
    entries["cut-off"] = json.dumps(envelope("1")).encode()[:-9]
    worker = start_worker(pool=pool)

    broker.lpush("orders", *entries.values(), *entries.values())
    broker.lpush("orders", json.dumps(envelope("behind")))
    poll(lambda: ran("behind"), timeout_seconds=60)
    poll(lambda: rest(broker))

    found = letters(count=len(entries))
    assert sorted(letter.body for letter in found) == sorted(entries.values())
    assert {
        (one.reason, one.content_type, one.source_queue, one.task_name, one.headers)
        for one in found
    } == {(Reason.UNDECODABLE_MESSAGE, CONTENT_TYPE_OF_ENTRY, "orders", "", "{}")}
    assert worker.process.poll() is None
    assert "Unrecoverable error" not in worker.output


def test_every_part_of_every_type_runs_or_is_a_letter(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, broker: redis.Redis
) -> None:
    """Each once, and the worker lives on; ``tests/programs/fuzz`` tells which of the two."""
    entries = {
        f"case-{place}-{number}-": replaced(envelope(f"case-{place}-{number}-"), path, value)
        for place, path in enumerate(PLACES)
        for number, value in enumerate(JSON_VALUES)
    }
    worker = start_worker()

    broker.lpush("orders", *(json.dumps({**entry, "note": t}) for t, entry in entries.items()))
    broker.lpush("orders", json.dumps(envelope("behind")))
    poll(lambda: ran("behind"), timeout_seconds=60)
    poll(lambda: rest(broker), timeout_seconds=30)

    kept = [f"{one.task_id} {one.properties} {one.body!r}" for one in letters()]
    ended = {token: ran(token) + sum(f"{token}" in text for text in kept) for token in entries}
    assert {token: n for token, n in ended.items() if n != 1} == {}
    assert worker.process.poll() is None
    assert "Unrecoverable error" not in worker.output


def test_a_byte_that_is_no_utf_8_is_replaced_as_kombu_does(
    poison: ModuleType, start_worker: Start, ran: Ran, broker: redis.Redis
) -> None:
    """In a header it does no harm: plain Celery runs the task."""
    entry = json.dumps(envelope("odd", note="NOTE")).encode().replace(b"NOTE", b"\xff\xfe")
    start_worker()

    broker.lpush("orders", entry, json.dumps(envelope("behind")))
    poll(lambda: ran("behind"), timeout_seconds=60)
    poll(lambda: rest(broker))

    assert ran("odd") == 1
    assert not poison.dlq.queues()


def test_fifty_megabytes_are_a_letter(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, broker: redis.Redis
) -> None:
    """As an entry that is no JSON, and as a body that is no base64."""
    worker = start_worker()
    no_json = b"x" * 50_000_000
    no_base64 = json.dumps(envelope("large", "x" * 50_000_001)).encode()

    broker.lpush("orders", no_json, no_base64, json.dumps(envelope("behind")))
    poll(lambda: ran("behind"), timeout_seconds=60)
    poll(lambda: rest(broker), timeout_seconds=30)

    assert {letter.body for letter in letters(count=2)} == {no_json, no_base64}
    assert worker.process.poll() is None


def test_an_operator_sees_exports_and_discards_such_a_letter(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    dlq: Dlq,
    broker: redis.Redis,
    tmp_path: Path,
) -> None:
    """Its bytes are shown as they are, and exported as they are."""
    start_worker()
    broker.lpush("orders", b"\xff<b>not json\x1b[31m")
    (letter,) = letters()

    (listed,) = dlq("list", "orders-DLQ", "--json").lines
    assert (listed["id"], listed["reason"]) == (letter.id, "undecodable_message")
    shown = dlq("show", letter.id)
    assert shown.exit_code == 0, shown.stderr
    assert CONTENT_TYPE_OF_ENTRY in shown.stdout
    assert "not json" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert dlq("groups", "orders-DLQ").exit_code == 0
    exported = dlq("export", str(tmp_path / "lake"))
    assert exported.exit_code == 0, exported.stderr
    assert pq.read_table(tmp_path / "lake")["body"].to_pylist() == [letter.body]
    assert dlq("discard", "orders-DLQ", letter.id, "--yes").exit_code == 0
    assert not list(poison.dlq.letters("orders-DLQ"))


def test_a_worker_killed_between_storing_and_acknowledging_leaves_one_letter(
    poison: ModuleType, start_worker: Start, letters: Letters, broker: redis.Redis
) -> None:
    """The entry comes back byte for byte, and finds its letter there."""
    broken = json.dumps(envelope("broken", "W1s")).encode() + b"  "
    nameless = replaced(envelope("nameless"), ("headers",), {})
    nameless["properties"] = {"delivery_info": nameless["properties"]["delivery_info"]}
    for entry in (b"not json", broken, json.dumps(nameless).encode()):
        with redis.Redis.from_url(poison.URL + "/2") as traces:
            traces.flushdb()
        before = len(list(poison.dlq.letters("orders-DLQ"))) if poison.dlq.queues() else 0
        broker.lpush("orders", entry)
        first = start_worker(QUICK, env={"POISON_DIE_AFTER_STORING": "1"}, wait=False)
        first.process.wait(30)
        first.kill()
        assert len(letters(count=before + 1)) == before + 1
        assert broker.hlen("unacked") == 1

        second = start_worker(QUICK)
        poll(lambda: rest(broker), timeout_seconds=30)
        second.stop()

        assert len(letters()) == before + 1
    assert {b"not json", broken} < {letter.body for letter in letters()}


def test_while_the_store_is_down_the_entry_is_not_acknowledged(
    poison: ModuleType, start_worker: Start, ran: Ran, broker: redis.Redis
) -> None:
    """Its letter waits, healthy work goes on, and no second worker is given it."""
    with RedisServer() as store:
        conf = {**QUICK, "dlq_url": store.url, "dlq_transport_options": {"socket_timeout": 0.5}}
        worker = start_worker(conf)
        other = start_worker(conf)
        store.kill()
        broker.lpush("orders", b"not json")
        broker.lpush("orders", json.dumps(envelope("behind")))
        poll(lambda: ran("behind"), timeout_seconds=20)
        poll(lambda: "not dead-lettered yet" in worker.output + other.output)
        poll(lambda: broker.hlen("unacked") == 1)
        (tag,) = broker.hkeys("unacked")
        end = broker.zscore("unacked_leases", tag)
        poll(lambda: broker.zscore("unacked_leases", tag) > end + 5, timeout_seconds=20)
        assert broker.hkeys("unacked") == [tag]

        store.start()
        poll(lambda: rest(broker), timeout_seconds=30)

        assert (worker.output + other.output).count("not dead-lettered yet") == 1
        assert len(store.client().keys("*orders-DLQ*")) > 0


def test_in_a_queue_without_a_policy_celery_logs_and_acknowledges_it(
    poison: ModuleType, start_worker: Start, ran: Ran, broker: redis.Redis
) -> None:
    """The worker goes on: another queue of it is guarded."""
    worker = start_worker()
    broker.lpush("unguarded", *NO_MESSAGES.values())
    broker.lpush("unguarded", json.dumps(envelope("behind")))
    poll(lambda: ran("behind"), timeout_seconds=30)
    poll(lambda: not broker.llen("unguarded") and rest(broker))

    assert poison.dlq.queues() == []
    assert worker.process.poll() is None
    assert worker.output.count("Can't decode message body") == len(NO_MESSAGES)


def test_without_reliable_fetch_it_ends_the_worker_as_ever(
    poison: ModuleType, start_worker: Start, broker: redis.Redis
) -> None:
    """What plain Celery does, and why the fetch is on by default."""
    worker = start_worker({"dlq_reliable_fetch": False})
    broker.lpush("orders", b"not json")
    worker.process.wait(30)
    assert "Unrecoverable error" in worker.output
