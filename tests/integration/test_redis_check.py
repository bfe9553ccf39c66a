"""The check of a Redis at a worker's start, on real servers that are wrong in some way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from builders import DLQ, a_delivery, a_key, a_letter, an_ended_delivery, key_of
from cluster import ClusterServers
from servers import RedisServer
from waiting import poll

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.features.exchange.publisher import Outbox, OutboxEntry
from celery_dlq.features.sentry.reports import Reports
from celery_dlq.store.connect import connect
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import CountStatus, MessageKey

QUEUES = (DLQ, "payments-DLQ")
TIMEOUT_SECONDS = 0.5
LIMITED = ("on", ">hush", "~dlq:*", "&*", "+@all", "-@dangerous", "-@admin", "+client|setname")
"""A user without dangerous and admin commands; in Redis 6 all of CLIENT is an admin's."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Give a server of one's own, to be made wrong."""
    with RedisServer() as started:
        yield started


@pytest.fixture
def user(server: RedisServer) -> str:
    """Give the URL of a user who may do what is needed, and no more."""
    allow(server, "reset", *LIMITED)
    return server.url.replace("redis://", "redis://worker:hush@")


def allow(server: RedisServer, *rules: str) -> None:
    """Change what the user may do."""
    server.client().execute_command("ACL", "SETUSER", "worker", *rules)


def check(url: str) -> None:
    """Check a Redis as a worker does."""
    backend = Store(url, timeout_seconds=TIMEOUT_SECONDS)
    try:
        backend.check(QUEUES)
    finally:
        backend.close()


def refusal(url: str, error: type[Exception] = SettingsError) -> str:
    """The line with which a check ends."""
    with pytest.raises(error) as raised:
        check(url)
    line = str(raised.value)
    assert line.startswith("expected the store at redis://127.0.0.1:"), line
    assert "hush" not in line
    assert "\n" not in line
    return line


def test_a_check_leaves_nothing_behind(server: RedisServer) -> None:
    """But the format; nor, in the worker that checks, a connection that its pool would inherit."""
    backend = Store(server.url, timeout_seconds=TIMEOUT_SECONDS)
    backend.check(QUEUES)
    assert not backend.connection.is_open
    assert server.client().keys() == [b"dlq:{app}:format"]
    backend.close()


def test_a_check_does_not_touch_what_is_there(server: RedisServer) -> None:
    """Nor is it disturbed by keys of another type."""
    client = server.client()
    for key in (f"dlq:{{{DLQ}}}:letters", "dlq:queues"):
        client.set(key, "another program's")
    check(server.url)
    assert client.dbsize() == 2 + 1


def test_the_least_that_a_user_may_do_is_enough(server: RedisServer, user: str) -> None:
    """Neither admin nor dangerous commands are needed: INFO, for one, is dangerous."""
    with redis.Redis.from_url(user) as client, pytest.raises(redis.ResponseError):
        client.info()
    check(user)


@pytest.mark.parametrize(
    "command",
    ["hset", "xadd", "zadd", "sadd", "pexpire", "xrange", "time", "del", "eval"],
)
def test_a_command_that_is_forbidden_is_named(server: RedisServer, user: str, command: str) -> None:
    """Not the first letter finds out, but the deploy."""
    allow(server, f"-{command}")
    line = refusal(user)
    assert "to allow its user what celery_dlq needs" in line
    assert command in line.lower()
    assert server.client().dbsize() == 0


@pytest.mark.parametrize("command", ["evalsha", "script"])
def test_a_way_to_run_scripts_that_is_forbidden_is_named(
    server: RedisServer, user: str, command: str
) -> None:
    """Both ways are used."""
    allow(server, f"-{command}")
    assert command in refusal(user)


@pytest.mark.parametrize(
    "patterns",
    [
        ["~dlq:queues", f"~dlq:{{{DLQ}}}:*", "~dlq:{payments-DLQ}:*"],
        ["~dlq:queues", f"~dlq:{{{DLQ}}}:*", "~dlq:{app}:*"],
        ["~dlq:queues", "~dlq:{payments-DLQ}:*", "~dlq:{app}:*"],
        ["~dlq:{*"],
        ["~shop:*"],
    ],
)
def test_each_kind_of_key_must_be_allowed(
    server: RedisServer, user: str, patterns: list[str]
) -> None:
    """Those of the app, of every dead-letter queue, and the list of queues."""
    allow(server, "resetkeys", *patterns)
    assert "ACL SETUSER, on the keys ~dlq:*" in refusal(user)


def test_a_wrong_password_is_told(server: RedisServer, user: str) -> None:
    """Without saying it."""
    assert "to accept the user and password" in refusal(user.replace("hush", "hush2"))
    server.client().config_set("requirepass", "other")
    assert "to accept the user and password" in refusal(server.url)


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")


def make_replica(client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", 1)


def want_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", "1")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (fill, "to have memory left"),
        (make_replica, "to be a master"),
        (want_replicas, "to accept writes"),
    ],
)
def test_a_redis_that_refuses_writes_is_unavailable(
    server: RedisServer, break_it: Callable[[redis.Redis], None], expected: str
) -> None:
    """PING succeeds on all of these."""
    break_it(server.client())
    assert server.client().ping()
    assert expected in refusal(server.url, StoreUnavailable)


def test_a_node_of_a_cluster_needs_another_url() -> None:
    """PING succeeds there, too, and then nearly every command is MOVED."""
    with RedisServer("--cluster-enabled", "yes") as node:
        assert "redis+cluster://" in refusal(node.url)


def test_a_cluster_is_checked_through_its_own_client(cluster_servers: ClusterServers) -> None:
    """The keys of each script share a slot."""
    cluster_servers.flush()
    backend = Store(cluster_servers.url)
    backend.check(QUEUES)
    backend.close()
    assert sum(server.client().dbsize() for server in cluster_servers.masters) == 1  # the format


def test_a_renamed_command_is_named_without_its_arguments() -> None:
    """A renamed AUTH is answered with the password in the text."""
    with RedisServer("--rename-command", "AUTH", "HIDDEN") as renamed:
        line = refusal(renamed.url.replace("redis://", "redis://:hush@"))
    assert "AUTH" in line
    assert "to know the commands of Redis 6.2" in line


def test_a_redis_that_hangs_costs_one_time_out(server: RedisServer) -> None:
    """The check fails by the connection whose circuit breaker the worker uses."""
    backend = Store(server.url, timeout_seconds=TIMEOUT_SECONDS)
    server.pause()
    begun, letter = time.monotonic(), a_letter()
    an_entry = OutboxEntry(letter_id=letter.id, exchange="fanout", routing_key="orders")
    with pytest.raises(StoreUnavailable):
        backend.check(QUEUES)
    for _ in range(5):
        for write in (
            lambda: backend.letters.dead_letter(letter, key_of(letter)),
            lambda: backend.part(Reports).report_of(letter),
            lambda: backend.part(Outbox).add_entry(DLQ, an_entry),
        ):
            with pytest.raises(StoreUnavailable):
                write()
    assert time.monotonic() - begun < 3 * TIMEOUT_SECONDS
    server.resume()
    poll(lambda: stored(backend, letter), timeout_seconds=10)
    backend.close()


def stored(backend: Store, letter: Any) -> bool:
    """True once a letter could be stored."""
    try:
        backend.letters.dead_letter(letter, key_of(letter))
    except StoreUnavailable:
        return False
    return True


# -- where CLIENT REPLY is forbidden ----------------------------------------------------


@pytest.fixture
def limited(server: RedisServer) -> Iterator[Store]:
    """Give a backend whose user may not ask Redis to be silent."""
    allow(server, "reset", *LIMITED[:5], "-client", "+client|setname")
    backend = Store(
        server.url.replace("redis://", "redis://worker:hush@"), timeout_seconds=TIMEOUT_SECONDS
    )
    yield backend
    backend.close()


def count_of(server: RedisServer, backend: Store, key: MessageKey) -> int:
    """The count of a message as Redis has it."""
    return int(server.client().hget(backend.keys.run(key), f"count:{key.retries}") or 0)


def test_counts_are_exact_where_replies_cannot_be_skipped(
    limited: Store, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Replies are read where they belong; one line says what it costs."""
    limited.check(QUEUES)
    counter, keys = limited.counter, [a_key() for _ in range(50)]
    with caplog.at_level(logging.WARNING):
        for key in keys:
            assert counter.count_first(key, a_delivery())
            assert count_of(server, limited, key) == 1  # at once: nothing waits for a reply
            counter.record_end(key, an_ended_delivery())
    assert [counter.history(key)[0].ended_at for key in keys] == [
        an_ended_delivery().ended_at
    ] * len(keys)
    count = counter.count_delivery(keys[0], a_delivery(), None)
    assert (count.status, count.number) == (CountStatus.COUNTED, 2)
    counter.flush()
    assert limited.connection.errors == 0
    assert caplog.text.count("CLIENT REPLY is refused") == 1
    assert "hush" not in caplog.text


def test_a_lost_connection_counts_once_where_replies_cannot_be_skipped(
    limited: Store, server: RedisServer
) -> None:
    """What was sent and not answered is sent again, and says so."""
    counter, connection = limited.counter, limited.connection
    for _ in range(5):
        key = a_key()
        assert counter.count_first(key, a_delivery())
        server.close_connections()
        other = a_key()
        assert counter.count_first(other, a_delivery())
        assert (count_of(server, limited, key), count_of(server, limited, other)) == (1, 1)
    assert connection.errors == 0


def test_a_reply_that_is_lost_counts_once_where_replies_cannot_be_skipped(
    limited: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command was executed; the repetition finds its own start."""
    counter, connection, key = limited.counter, limited.connection, a_key()
    counter.count_first(a_key(), a_delivery())
    replies, lost = connection.replies, threading.Event()

    def losing(number: int) -> list[Any]:
        found = replies(number)
        if not lost.is_set():
            lost.set()
            raise redis.ConnectionError("closed before the reply")
        return found

    monkeypatch.setattr(connection, "replies", losing)
    counter.heartbeat({key.dead_letter_queue})  # so that none is in between
    assert counter.count_first(key, a_delivery())
    assert lost.is_set()
    assert count_of(server, limited, key) == 1


def test_a_refused_count_is_seen_where_replies_cannot_be_skipped(
    limited: Store, server: RedisServer
) -> None:
    """Its message runs uncounted, as in any outage."""
    assert limited.counter.count_first(a_key(), a_delivery())
    make_replica(server.client())
    assert not limited.counter.count_first(a_key(), a_delivery())
    server.client().replicaof("NO", "ONE")
    assert limited.counter.count_first(a_key(), a_delivery())


def test_replies_are_skipped_where_that_is_allowed(server: RedisServer) -> None:
    """The usual case still costs one write and no read."""
    connection = PipelinedConnection(connect(server.url, 1.0, retries=0), server.url)
    assert connection.send_unanswered([("SET", "a", 1)])
    assert connection.send_and_wait("GET", "a") == b"1"
    assert connection.skips_replies
    connection.close()
