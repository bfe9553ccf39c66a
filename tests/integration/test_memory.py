"""What a real Redis says of its memory, and what operators see of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from builders import DLQ, a_letter, an_app, key_of
from click.testing import CliRunner
from cluster import ClusterServers
from servers import RedisServer

from celery_dlq import DeadLetters, dead_letter_policy
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.operations.memory_check import MemoryCheck
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.store import Store
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.wiring import guard_of

MEGABYTES = 64
MASTER = {"master_name": "mymaster"}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis with a maximum, which each test may change."""
    with RedisServer("--maxmemory", f"{MEGABYTES}mb") as server:
        yield server


def installed(url: str, **settings: Any) -> DeadLetters:
    """The plugin on an app whose broker and letters are in this Redis."""
    values = {"dlq_queues": {"orders": {"max_deliveries": 3}}, "dlq_url": None, **settings}
    return DeadLetters(an_app(**{"broker_url": url, **values}))


def shown(dlq: DeadLetters, *arguments: str) -> str:
    """What the command line prints, errors too."""

    class Context:
        app = dlq.app

    done = CliRunner(env={"COLUMNS": "160"}).invoke(commands, ["queues", *arguments], obj=Context())
    assert done.exit_code == 0, done.output
    return done.output


def test_the_memory_of_redis_is_read(server: RedisServer) -> None:
    """What is in use, what is allowed, and what happens then."""
    client = server.client()
    client.config_set("maxmemory-policy", "volatile-lru")
    found = Store(server.url).memory()
    assert found is not None
    assert found.maximum == MEGABYTES * 2**20
    assert found.policy == "volatile-lru"
    assert 0 < (found.share or 0) < 0.5
    before = found.used
    client.set("x", b"x" * 10_000_000)
    found = Store(server.url).memory()
    assert found is not None
    assert found.used - before > 10_000_000


def test_a_user_who_may_not_ask_gets_no_error_and_asks_once(server: RedisServer) -> None:
    """Nothing is said, and there is no limit."""
    client = server.client()
    client.acl_setuser(
        "app", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"], commands=["-info"]
    )
    limited = Store(server.url.replace("redis://", "redis://app:pw@"))
    assert limited.memory() is None
    assert limited.memory() is None
    limited.close()
    refused = [entry for entry in client.acl_log() if entry["object"] in ("info", b"info")]
    assert [entry["count"] for entry in refused] == [1]
    dlq = installed(server.url.replace("redis://", "redis://app:pw@"))
    letter = a_letter()
    dlq.store.dead_letter(letter, key_of(letter))
    assert dlq.memory() is None
    assert dlq.warnings() == []
    assert DLQ in shown(dlq)
    dlq.close()


def test_in_a_cluster_the_fullest_master_counts(
    cluster_servers: ClusterServers, cluster_url: str
) -> None:
    """Each master has its own memory; queues on any of them can be asked for their bytes."""
    dlq = installed("memory://", dlq_url=cluster_url)
    queues = [f"q{number}-DLQ" for number in range(10)]
    for name in queues:
        letter = a_letter(dead_letter_queue=name, body=b"x" * 50_000)
        dlq.store.dead_letter(letter, key_of(letter))
    clients = [server.client() for server in cluster_servers.masters]
    try:
        for client, megabytes in zip(clients, (500, 200, 300), strict=True):
            client.config_set("maxmemory", f"{megabytes}mb")
        found = dlq.memory()
    finally:
        for client in clients:
            client.config_set("maxmemory", "0")
    assert found is not None
    assert found.maximum == 200 * 2**20
    assert [queue.name for queue in dlq.queues() if (queue.memory_bytes or 0) > 50_000] == queues
    assert any("has no maxmemory" in warning for warning in dlq.warnings())
    dlq.close()


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({}, {}, ["kept for ever"]),
        ({"maxmemory": 0}, {}, ["kept for ever", "has no maxmemory"]),
        ({"maxmemory": 0}, {"dlq_url": "redis://elsewhere.example"}, ["has no maxmemory"]),
        ({}, {"broker_url": "amqp://localhost//", "dlq_url": "redis://localhost"}, []),
        ({}, {"broker_url": "redis://127.0.0.1/3", "dlq_url": "redis://localhost"}, ["kept for"]),
        ({}, {"dlq_url": "sentinel://127.0.0.1", "dlq_transport_options": MASTER}, []),
        (
            {"maxmemory-policy": "allkeys-lru"},
            {},
            ["kept for ever", "may delete letters and counts of deliveries"],
        ),
        (
            {"maxmemory-policy": "volatile-ttl"},
            {"dlq_queues": {"orders": {"dead_letter_ttl": 3600}}},
            ["may delete counts of deliveries, and a message is then counted from 1 again"],
        ),
        ({}, {"dlq_queues": {"orders": {"dead_letter_max_length": 9}}}, []),
        ({}, {"dlq_queues": {"*": {}}}, ["letters of *-DLQ are kept for ever"]),
        ({"maxmemory": 0}, {"dlq_queues": {}}, []),
    ],
)
def test_what_endangers_letters_is_said(
    server: RedisServer, config: dict[str, Any], settings: dict[str, Any], expected: list[str]
) -> None:
    """A line each, and nothing where all is well."""
    for name, value in config.items():
        server.client().config_set(name, value)
    dlq = installed(server.url, **settings)
    memory = Store(server.url).memory
    # Not the app's table: it has the tasks that other tests registered for all apps.
    table = PolicyTable(dlq.settings.queues)
    found = MemoryCheck(dlq.settings, table, ["orders"], dlq.app.conf, memory).warnings()
    assert len(found) == len(expected), found
    for text, part in zip(found, expected, strict=True):
        assert part in text
        assert ": set " in text
    dlq.close()


def test_letters_of_a_task_with_a_policy_are_bounded_by_that_of_a_queue(
    server: RedisServer,
) -> None:
    """Its decorator cannot: these bounds are for a whole dead-letter queue."""
    dlq = installed(server.url, dlq_queues={}, task_default_queue="mails")

    @dlq.app.task(shared=False)
    @dead_letter_policy(max_deliveries=3)
    def send() -> None: ...

    (warning,) = dlq.warnings()
    assert "mails-DLQ" in warning
    dlq.close()


def test_a_worker_says_once_what_endangers_letters(
    server: RedisServer, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """At its first tick, when Redis has told it."""
    dlq = installed(server.url, dlq_spool_dir=str(tmp_path))
    guard: Guard = guard_of(dlq.assembly, hostname="w", pid=1, flags_redelivery=True)
    for _ in range(3):
        guard.tick()
    said = [r for r in caplog.records if "kept for ever" in r.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    guard.close()
    dlq.close()


def test_operators_see_what_letters_take(server: RedisServer) -> None:
    """Below the queues; as a field of their JSON. Warnings are the doctor's."""
    dlq = installed(server.url)
    for _ in range(100):
        letter = a_letter(body=b"x" * 100_000)
        dlq.store.dead_letter(letter, key_of(letter))
    (queue,) = dlq.queues()
    assert queue.memory_bytes is not None
    assert 10_000_000 < queue.memory_bytes < 15_000_000
    for letter in dlq.letters(DLQ, limit=50):
        dlq.store.claims.claim(DLQ, [letter.id], owner="me", lease_seconds=60)
        dlq.store.remove(DLQ, [letter.id], owner="me", keep_seconds=3600)
    (queue,) = dlq.queues()
    assert queue.letters == 50
    assert 10_000_000 < queue.memory_bytes < 15_000_000  # the bin takes memory, too
    text = shown(dlq)
    assert f"The letters take {queue.memory_bytes / 1e6:,.1f} MB of Redis, which uses " in text
    assert "kept for ever" not in text
    assert f'"memory_bytes": {queue.memory_bytes}' in shown(dlq, "--json")
    dlq.close()
