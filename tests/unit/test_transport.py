"""The transport's parts: entries, the connection that wakes, and whether a Redis can be used."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.asynchronous import Hub
from kombu.transport.redis import Channel, Transport
from kombu.utils.eventio import READ
from kombu.utils.json import dumps
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.transport.redis.broker import broker_of, refuses_for_now
from celery_dlq.transport.redis.channel import ReliableChannel, reliable
from celery_dlq.transport.redis.entries import (
    EntryMessage,
    FetchedEntry,
    record_end,
    recorded,
    redelivered,
)
from celery_dlq.transport.redis.fetch import refusal
from celery_dlq.transport.redis.leases import Leases
from celery_dlq.transport.redis.wake import (
    FETCH,
    TRACKED,
    FetchConnection,
    ReliablePoller,
    Watch,
    reply_error,
)
from celery_dlq.transport.sqs.visibility import Receipts
from celery_dlq.worker.bootsteps import assembly_of

ENVELOPE: dict[str, Any] = {
    "body": "W10=",
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": {},
    "properties": {
        "delivery_tag": "of-the-publisher",
        "delivery_info": {"exchange": "", "routing_key": "orders"},
        "body_encoding": "base64",
        "priority": 0,
    },
}


def message_of(raw: bytes) -> EntryMessage:
    return EntryMessage(FetchedEntry(raw, "tag-1", "orders"), channel=_Channel())


class _Channel:
    def decode_body(self, body: str, encoding: str | None = None) -> Any:
        return base64.b64decode(body) if encoding else body


def test_a_message_has_the_tag_of_its_fetch() -> None:
    """Two copies of one message have the publisher's tag in common, and nothing else."""
    message = message_of(dumps(ENVELOPE).encode())
    assert message.delivery_tag == "tag-1"
    assert message.errors == []
    assert message.delivery_info["routing_key"] == "orders"


@pytest.mark.parametrize(
    "raw", [b"", b"no json", b"\xff\xfe", b"[]", b"7", b"{}", b'{"properties": 1}', b"[" * 10_000]
)
def test_an_entry_that_is_no_envelope_is_a_message_that_cannot_be_decoded(raw: bytes) -> None:
    """It keeps its bytes, its queue and the tag by which it is acknowledged."""
    message = message_of(raw)
    assert message.delivery_tag == "tag-1"
    assert message.body == raw
    assert message.errors
    assert message.delivery_info == {"exchange": "", "routing_key": "orders"}


def test_a_message_that_lapses_is_held_no_longer() -> None:
    """It comes back when its lease ends; a request asks for that by the name that SQS has, too."""
    leases = Leases(60)
    tag = leases.new_tag()
    leases.received(tag)
    assert tag in leases.held
    leases.let_lapse(tag)
    assert tag not in leases.held
    assert callable(Receipts.let_lapse)


def test_an_entry_is_known_again_when_it_is_fetched_again() -> None:
    """Its bytes are its identity."""

    def identity(raw: bytes) -> object:
        return message_of(raw).properties["delivery_tag"]

    assert identity(b"x") == identity(b"x") != identity(b"y")


@pytest.mark.parametrize("queue", ["orders", 'a "quoted" one', 'ünï,"",', "back\\slash"])
@pytest.mark.parametrize("entry", [dumps(ENVELOPE).encode(), b"no json", b'["",",",""]', b""])
def test_a_record_gives_back_its_entry_and_its_queue(entry: bytes, queue: str) -> None:
    """Whatever they contain; it is put together in Lua by the same concatenation."""
    record = b"[" + entry + b',"",' + record_end(queue).encode() + b"]"
    assert recorded(record) == (entry, queue)


def test_a_record_of_kombu_is_not_taken_for_ours() -> None:
    """Kombu writes a blank behind each comma, and restores its own."""
    assert recorded(dumps([ENVELOPE, "", "orders"]).encode()) is None


def test_a_restored_entry_says_so_as_kombu_writes_it() -> None:
    """Both marks where they can be; an entry that is no envelope stays as it is."""

    def decode(body: Any, _encoding: Any) -> Any:
        return body

    entry, envelope = redelivered(dumps(ENVELOPE).encode(), decode)
    assert json.loads(entry) == envelope
    assert envelope["headers"]["redelivered"] is True
    assert envelope["properties"]["delivery_info"]["redelivered"] is True
    assert redelivered(b"no json", decode) == (b"no json", None)
    assert redelivered(b"[]", decode) == (b"[]", None)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("LOADING Redis is loading the dataset in memory", True),
        ("NOAUTH Authentication required.", True),
        ("NOSCRIPT No matching script.", False),
        ("NOPERM this user has no permissions to run the 'eval' command", False),
        ("READONLY You can't write against a read only replica.", False),
        ("ERR unknown command", False),
    ],
)
def test_an_error_of_redis_is_what_redis_py_makes_of_it(text: str, lost: bool) -> None:
    """Kombu connects anew after some; others end the worker, or wait for writes."""
    found = reply_error(text)
    assert isinstance(found, RedisConnectionError) is lost
    assert isinstance(found, NoScriptError) is text.startswith("NOSCRIPT")
    assert isinstance(found, ResponseError) is not lost
    assert refuses_for_now(found) is text.startswith("READONLY")


class _Made:
    """A connection as redis-py makes it, on one end of a pair of sockets."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent: list[tuple[Any, ...]] = []
        self.closed = False

    def connect(self) -> None:
        """It is."""

    def send_command(self, *args: Any) -> None:
        self.sent.append(args)

    def pack_commands(self, commands: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        return commands

    def send_packed_command(self, commands: Sequence[tuple[Any, ...]], check_health: bool) -> None:
        assert not check_health, "it would read the replies, and connect on another socket"
        self.sent += commands

    def read_response(self) -> bytes:
        return b"OK"

    def disconnect(self) -> None:
        self.closed = True


@pytest.fixture
def fetching() -> Iterator[tuple[FetchConnection, socket.socket, _Made]]:
    """Give an open connection, the socket of its Redis, and what redis-py made."""
    ours, redis = socket.socketpair()
    ours.settimeout(5.0)
    made = _Made(ours)
    connection = FetchConnection(lambda **_: made, Watch([]))
    assert connection.open(tracks=True) is ours
    made.sent.clear()
    yield connection, redis, made
    ours.close()
    redis.close()


WRITTEN = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$6\r\norders\r\n"
CHANGED = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$8\r\nrevision\r\n"
FLUSHED = b">2\r\n$10\r\ninvalidate\r\n_\r\n"
WATCHES = b"+OK\r\n:1\r\n"
BELL = ("BRPOP", "bell", "1"), None
SAID_SO = ("", None, True)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b":0\r\n", [("EXISTS", 0, False)]),
        (b":3\r\n", [("EXISTS", 3, True)]),
        (b":0\r\n_\r\n", [("EXISTS", 0, False), ("BRPOP", None, False)]),
        (
            b":0\r\n*2\r\n$1\r\nb\r\n$1\r\n1\r\n",
            [("EXISTS", 0, False), ("BRPOP", [b"b", b"1"], True)],
        ),
        (WRITTEN, [SAID_SO]),
        (FLUSHED, [SAID_SO]),
        (WRITTEN + b":0\r\n" + WRITTEN, [SAID_SO, ("EXISTS", 0, False), SAID_SO]),
        (b":0\r\n_\r\n:1\r\n", [("EXISTS", 0, False), ("BRPOP", None, False), (FETCH, 1, True)]),
        (b"", []),
        (b":0", []),
    ],
)
def test_what_redis_says_is_news_or_not(
    fetching: tuple[FetchConnection, socket.socket, _Made],
    sent: bytes,
    expected: Sequence[tuple[str, Any, bool]],
) -> None:
    """In the order in which it came; a flush of everything names no key; nothing blocks."""
    connection, redis, made = fetching
    connection.send((("EXISTS", "orders"), 0))
    connection.send(BELL)
    connection.send(fetch=[b"EVALSHA"])
    redis.sendall(sent)
    assert list(connection.read_replies()) == expected
    assert made._sock.gettimeout() == 5.0


def test_a_refused_fetch_is_for_the_channel(
    fetching: tuple[FetchConnection, socket.socket, _Made],
) -> None:
    """It knows what the errors of redis-py mean."""
    connection, redis, _ = fetching
    connection.send(fetch=[b"EVALSHA"])
    redis.sendall(b"-NOSCRIPT No matching script.\r\n")
    ((name, reply, _news),) = connection.read_replies()
    assert name == FETCH
    assert isinstance(reply, NoScriptError)


def test_a_reply_may_come_in_two_parts(
    fetching: tuple[FetchConnection, socket.socket, _Made],
) -> None:
    """The event loop calls again when there is more."""
    connection, redis, _ = fetching
    connection.send((("EXISTS", "orders"), 12))
    redis.sendall(b":1")
    assert list(connection.read_replies()) == []
    assert connection.awaits_reply()
    redis.sendall(b"2\r\n")
    assert list(connection.read_replies()) == [("EXISTS", 12, False)]
    assert not connection.awaits_reply()


def test_whoever_waits_for_a_reply_gets_it(
    fetching: tuple[FetchConnection, socket.socket, _Made],
) -> None:
    """A channel that closes does, for a bounded time."""
    connection, redis, _ = fetching
    connection.send(fetch=[b"EVALSHA"])
    assert list(connection.read_replies(0.01)) == []
    timer = threading.Timer(0.1, redis.sendall, [b":1\r\n"])
    timer.start()
    assert list(connection.read_replies(5.0)) == [(FETCH, 1, True)]
    timer.join()


def test_a_watch_is_quiet_only_while_a_change_would_be_told() -> None:
    """What changed before Redis tells, or while nobody listens, is read by whoever asks."""
    ours, redis = socket.socketpair()
    made, watch = _Made(ours), Watch(["revision"])
    tells = [TRACKED[0], ("EXISTS", "revision")]
    connection = FetchConnection(lambda **_: made, watch)
    connection.open(tracks=True)
    made.sent.clear()
    assert not watch.was_unchanged()
    assert not watch.was_unchanged()
    connection.send(BELL)
    assert made.sent == [*tells, BELL[0]]
    redis.sendall(WATCHES + b"_\r\n")
    assert [name for name, *_ in connection.read_replies()] == ["CLIENT", "BRPOP"]
    assert [watch.was_unchanged(), watch.was_unchanged()] == [
        False,
        True,
    ]  # it may have changed just before
    redis.sendall(CHANGED)
    assert list(connection.read_replies()) == []
    assert [watch.was_unchanged(), watch.was_unchanged()] == [False, False]
    connection.send(BELL)
    redis.sendall(WATCHES)
    list(connection.read_replies())
    assert made.sent == 2 * [*tells, BELL[0]]
    assert [watch.was_unchanged(), watch.was_unchanged()] == [False, True]
    connection.close()
    assert not watch.was_unchanged()
    ours.close()
    redis.close()


@pytest.mark.parametrize("sent", [None, b"-NOPERM no\r\n", b"what?\r\n"])
def test_a_lost_connection_or_a_refusal_is_an_error(
    fetching: tuple[FetchConnection, socket.socket, _Made], sent: bytes | None
) -> None:
    """The channel then polls; no other exception may leave the event loop's callback."""
    connection, redis, _ = fetching
    connection.send(BELL)
    if sent is None:
        redis.close()
    else:
        redis.sendall(sent)
    with pytest.raises(RedisError):
        list(connection.read_replies())


def test_a_refused_tracking_closes_the_connection() -> None:
    """`open` raises, and leaves no socket behind."""
    ours, redis = socket.socketpair()
    made = _Made(ours)

    def refused() -> bytes:
        raise RedisConnectionError("no")

    made.read_response = refused  # type: ignore[method-assign]
    connection = FetchConnection(lambda **_: made, Watch())
    with pytest.raises(RedisError):
        connection.open(tracks=True)
    assert made.closed
    assert connection.connection is None
    redis.close()
    ours.close()


@pytest.fixture
def channel_of() -> Iterator[Callable[..., Channel]]:
    """Give a function that opens a channel to a URL."""
    opened: list[Connection] = []

    def open_channel(url: str, **options: Any) -> Channel:
        opened.append(Connection(url, transport_options=options))
        return opened[-1].default_channel

    yield open_channel
    for connection in opened:
        connection.release()


def user(server: RedisServer, *rules: str) -> str:
    """The URL of a user with these rules."""
    server.client().execute_command("ACL", "SETUSER", "worker", "reset", "on", ">pw", *rules)
    return server.url.replace("redis://", "redis://worker:pw@")


def test_a_redis_that_allows_everything_is_used(
    redis_url: str, redis_server: RedisServer, channel_of: Callable[..., Channel]
) -> None:
    """The probe leaves nothing behind."""
    channel = channel_of(redis_url, global_keyprefix="shop:")
    assert refusal(channel) is None
    assert redis_server.client().keys() == []


@pytest.mark.parametrize(
    "command", ["eval", "evalsha", "zadd", "hget", "rpush", "zrevrangebyscore"]
)
def test_a_redis_that_forbids_a_command_is_not_used(
    redis_url: str,
    redis_server: RedisServer,
    channel_of: Callable[..., Channel],
    command: str,
) -> None:
    """Every command of the transport is tried, those inside the scripts, too."""
    del redis_url
    said = refusal(channel_of(user(redis_server, "~*", "&*", "+@all", f"-{command}")))
    assert said is not None
    assert said.startswith("expected Redis to allow what it needs, got ")


def test_keys_that_begin_with_unacked_are_enough(
    redis_url: str, redis_server: RedisServer, channel_of: Callable[..., Channel]
) -> None:
    """Beside those of kombu: ``unacked*``, ``_kombu*`` and the queues."""
    del redis_url
    assert refusal(channel_of(user(redis_server, "~unacked*", "&*", "+@all"))) is None
    assert refusal(channel_of(user(redis_server, "~orders*", "&*", "+@all"))) is not None


def test_a_user_who_may_not_switch_replies_off_acknowledges_with_replies(
    redis_url: str, redis_server: RedisServer, channel_of: Callable[..., Channel]
) -> None:
    """That is no reason to fetch as kombu does."""
    del redis_url
    # Redis before 7.0 can forbid the whole command only.
    newer = int(redis_server.client().info("server")["redis_version"].split(".")[0]) >= 7
    forbidden = "-client|reply" if newer else "-client"
    channel = channel_of(user(redis_server, "~*", "&*", "+@all", forbidden))
    assert refusal(channel) is None
    broker, client = broker_of(channel), redis_server.client()
    client.hset(broker.unacked, "tag", "a message")
    connection = PipelinedConnection(broker.client, broker.url)
    assert connection.send_unanswered([("HDEL", broker.unacked, "tag")])
    assert not client.hexists(broker.unacked, "tag")
    assert connection.send_and_wait("ECHO", "mine") == b"mine"
    connection.close()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("6.0.16", "expected Redis 6.2 or later, got 6.0.16"),
        ("5.0", "expected Redis 6.2 or later, got 5.0"),
        ("6.2.0", None),
        ("7.2.4", None),
        ("unstable", None),
    ],
)
def test_a_redis_that_is_too_old_is_not_used(
    redis_url: str,
    channel_of: Callable[..., Channel],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    expected: str | None,
) -> None:
    """By what its INFO says; what cannot be read as a version is tried."""
    monkeypatch.setattr(
        "celery_dlq.transport.redis.fetch.Redis.info", lambda *_: {"redis_version": version}
    )
    assert refusal(channel_of(redis_url)) == expected


def test_a_full_or_read_only_redis_is_no_reason_to_fall_back(
    channel_of: Callable[..., Channel],
) -> None:
    """It works again later, and a worker asks only when it connects."""
    with RedisServer("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        assert refusal(channel_of(server.url)) is None
    with RedisServer() as server:
        channel = channel_of(server.url)
        server.client().replicaof("127.0.0.1", 1)
        assert refusal(channel) is None


def test_a_node_of_a_cluster_is_named_as_one(channel_of: Callable[..., Channel]) -> None:
    """Its keys lie in different slots."""
    with RedisServer("--cluster-enabled", "yes") as server:
        said = refusal(channel_of(server.url))
    assert said is not None
    assert said.startswith("expected a broker that is no Redis Cluster")


def test_connections_for_acknowledgements_do_not_use_the_pool_up(
    redis_url: str, channel_of: Callable[..., Channel]
) -> None:
    """redis-py counts each that a pool makes towards ``max_connections``, closed ones too."""
    broker = broker_of(channel_of(redis_url, max_connections=2))
    for _ in range(5):
        connection = broker.client.connection_pool.make_connection()
        connection.send_command("PING")
        assert connection.read_response() == b"PONG"
        connection.disconnect()


def test_waits_for_acknowledgements_are_bounded(
    redis_url: str, channel_of: Callable[..., Channel]
) -> None:
    """By the user's timeouts, or by ours where there are none."""
    made = broker_of(channel_of(redis_url)).client.connection_pool.make_connection()
    made.disconnect()
    assert (made.socket_timeout, made.socket_connect_timeout) == (5.0, 5.0)
    channel = channel_of(redis_url, socket_timeout=2.0, socket_connect_timeout=1.0)
    made = broker_of(channel).client.connection_pool.make_connection()
    made.disconnect()
    assert (made.socket_timeout, made.socket_connect_timeout) == (2.0, 1.0)


def test_a_socket_that_nobody_knows_is_ignored() -> None:
    """The event loop may report one that was closed in the same turn."""
    assert ReliablePoller().handle_event(10_000, READ) is None


@pytest.fixture
def full_worker(redis_server: RedisServer) -> Iterator[tuple[Any, ReliablePoller]]:
    """Give a channel that has one message and no room for another, and its poller."""
    transport = reliable(Transport, Leases(60), lambda _channel: None)
    connection = Connection(redis_server.url)
    connection.get_transport_cls = lambda: transport  # type: ignore[method-assign]
    channel = connection.default_channel
    channel.basic_qos(0, 1, False)
    received: list[Any] = []
    channel.basic_consume("orders", no_ack=False, callback=received.append, consumer_tag="c")
    channel.basic_publish(channel.prepare_message("1"), "", "orders")
    connection.drain_events(timeout=5)
    assert received
    yield channel, connection.transport.cycle
    connection.release()


def test_a_closed_connection_does_not_keep_a_full_worker_busy(
    full_worker: tuple[Any, ReliablePoller], redis_server: RedisServer
) -> None:
    """Its socket is readable for ever; the next fetch opens another."""
    channel, poller = full_worker
    redis_server.client().client_kill_filter(_type="normal", skipme=True)
    events = poller.poller.poll(1)
    assert events
    for fileno, event in events:
        poller.handle_event(fileno, event)
    assert not poller.poller.poll(0.01)
    assert not poller.fds
    channel.basic_ack(next(iter(channel.qos._delivered)))
    channel.basic_publish(channel.prepare_message("2"), "", "orders")
    channel.connection.client.drain_events(timeout=5)


def test_what_was_fetched_for_a_consumer_that_is_gone_goes_back(
    full_worker: tuple[Any, ReliablePoller],
) -> None:
    """It was cancelled while its fetch was on the way."""
    channel, _ = full_worker
    consumed = dict(channel.consumed)
    channel.consumed.clear()
    channel.basic_ack(next(iter(channel.qos._delivered)))
    channel.basic_publish(channel.prepare_message("2"), "", "orders")

    def settled() -> bool:
        with suppress(TimeoutError):
            channel.connection.client.drain_events(timeout=0.1)
        return channel.fetching is None

    settled()
    channel.consumed.update(consumed)
    channel.basic_cancel("c")
    assert not channel.consumed
    poll(settled)
    assert len(channel.dlq_leases.to_return()) == 1
    assert not channel.dlq_leases.held


@pytest.fixture
def own_queue(redis_server: RedisServer) -> Iterator[tuple[Any, Leases, list[Any]]]:
    """Give a connection that consumes a queue, what it holds, and what it receives."""
    leases, received = Leases(60), []
    transport = reliable(Transport, leases, lambda channel: leases.connected(broker_of(channel)))
    connection = Connection(redis_server.url, transport_options={"unacked_restore_interval": 0.01})
    connection.get_transport_cls = lambda: transport  # type: ignore[method-assign]
    connection.default_channel.basic_consume("own", False, received.append, "c")
    yield connection, leases, received
    connection.release()
    leases.close()


def lost_by_a_plain_worker(redis_server: RedisServer, body: str) -> None:
    """A message that a worker without leases took, and never acknowledged."""
    with Connection(redis_server.url) as plain:
        channel = plain.default_channel
        channel.basic_publish(channel.prepare_message(body), "", "own")
        message = channel.basic_get("own")
        redis_server.client().zadd("unacked_index", {message.delivery_tag: 0})
        channel.qos._delivered.clear()  # it was killed


def test_in_an_event_loop_each_turn_fetches_and_kombu_waits_for_fanout_only(
    own_queue: tuple[Any, Leases, list[Any]], redis_server: RedisServer
) -> None:
    """What dead plain workers held comes, too; a closed connection leaves nothing in the loop."""
    connection, _, received = own_queue
    hub, transport = Hub(), connection.transport
    transport.register_with_event_loop(transport, hub)
    lost_by_a_plain_worker(redis_server, "lost")
    connection.default_channel.basic_publish(
        connection.default_channel.prepare_message("new"), "", "own"
    )
    turns = hub.create_loop()
    poll(lambda: next(turns) or len(received) == 2, timeout_seconds=30)
    assert {one.body for one in received} == {b"lost", b"new"}
    assert not transport.cycle.fds
    connection.release()
    assert not hub.readers
    assert transport.cycle.turn not in hub.on_tick
    hub.close()


def test_the_loop_is_given_a_socket_of_kombus_that_it_does_not_watch_yet(
    own_queue: tuple[Any, Leases, list[Any]],
) -> None:
    """A number may have been another socket's, which was closed: then its reader is another."""
    connection, *_ = own_queue
    channel, transport, hub = connection.default_channel, connection.transport, Hub()
    channel.exchange_declare("told", "fanout")
    channel.queue_declare("told")
    channel.queue_bind("told", "told", "")
    channel.basic_consume("told", True, print, "t")
    transport.register_with_event_loop(transport, hub)
    next(hub.create_loop())
    (fileno,) = [fd for fd, (call, _) in hub.readers.items() if call == transport.on_readable]
    assert list(transport.cycle.fds) == []
    assert transport.cycle.fds  # kombu before 5.7 looks whether there is any
    hub.readers[fileno] = (print, (fileno,))
    assert list(transport.cycle.fds) == [fileno]
    connection.release()
    hub.close()


def test_without_an_event_loop_what_dead_plain_workers_held_comes_too(
    own_queue: tuple[Any, Leases, list[Any]], redis_server: RedisServer
) -> None:
    """At the tenth look of an idle worker, as with kombu alone."""
    connection, _, received = own_queue
    lost_by_a_plain_worker(redis_server, "lost")

    def has_come() -> bool:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.01)
        return bool(received)

    poll(has_come)
    assert received[0].body == b"lost"


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give an app that is nobody's current one."""
    app = Celery("transport", broker="redis://127.0.0.1:1/0", set_as_current=False)
    yield app
    app.close()


def test_an_app_without_a_policy_keeps_kombus_transport(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all is changed there; a policy of a queue changes it."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # shared tasks of other tests
    DeadLetters(app)
    assert assembly_of(app).reliable_fetch() is None


def test_only_the_consumers_own_connection_is_changed(app: Celery) -> None:
    """Events and remote control connect through the same method of the consumer."""
    app.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
    DeadLetters(app)
    fetch = assembly_of(app).reliable_fetch()
    assert fetch is not None
    consumer = SimpleNamespace(ensure_connected=lambda connection: connection)
    consumer.connect = lambda: consumer.ensure_connected(app.connection_for_read())
    fetch.watch(consumer)
    fetch.watch(consumer)

    consumed = consumer.connect().get_transport_cls()
    other = consumer.ensure_connected(app.connection_for_write()).get_transport_cls()

    assert other is Transport
    assert issubclass(consumed, Transport)
    assert issubclass(consumed.Channel, ReliableChannel)
