"""Channels with reliable fetch, beside kombu's own: what comes, from where, and in which order."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import kombu
import pytest
import redis
from kombu import Exchange, Queue
from kombu.transport import redis as kombu_redis
from servers import RedisServer
from waiting import poll

from celery_dlq.transport.redis.broker import broker_of
from celery_dlq.transport.redis.channel import reliable
from celery_dlq.transport.redis.leases import Leases

Connect = Callable[..., kombu.Connection]
Got = list[tuple[str, str]]

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sorted": {"queue_order_strategy": "sorted"},
    "priority": {"queue_order_strategy": "priority"},
    "ten-steps": {"priority_steps": list(range(10))},
    "steps-from-three": {"priority_steps": [3, 6], "sep": ":"},
    "prefix": {"global_keyprefix": "shop:{a}:", "sep": ":"},
    "one-step": {"priority_steps": [0]},
}
QUEUES = ("c", "a", "b.6", "b")


@pytest.fixture
def connect(redis_url: str) -> Iterator[Connect]:
    """Open connections with kombu's fetch or with ours; all are closed after the test."""
    opened: list[tuple[kombu.Connection, Leases]] = []

    def connect(
        fetch: str, options: dict[str, Any] | None = None, *, database: int = 0, url: str = ""
    ) -> kombu.Connection:
        url = url or f"{redis_url.rpartition('/')[0]}/{database}"
        connection = kombu.Connection(url, transport_options=options or {})
        leases = Leases(60)
        if fetch == "reliable":
            transport = reliable(
                kombu_redis.Transport, leases, lambda channel: leases.connected(broker_of(channel))
            )
            connection.get_transport_cls = lambda: transport  # type: ignore[method-assign]
        opened.append((connection, leases))
        return connection

    yield connect
    for connection, leases in opened:
        connection.close()
        leases.close()


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    """The broker's database."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def both(connect: Connect, run: Callable[[kombu.Connection], Any], **options: Any) -> Any:
    """Do something with kombu's fetch and with ours; it must be the same."""
    theirs = run(connect("kombu", options, database=1))
    ours = run(connect("reliable", options, database=0))
    assert ours == theirs
    return ours


def queue(name: str, **more: Any) -> Queue:
    return Queue(name, Exchange(""), routing_key=name, **more)


def publish(connection: kombu.Connection, name: str, body: str, **more: Any) -> None:
    connection.Producer().publish(body, exchange="", routing_key=name, **more)


def drain(
    connection: kombu.Connection,
    *,
    until: Callable[[], bool] = lambda: False,
    quiet_seconds: float = 0.3,
) -> None:
    """Receive until nothing comes any more."""
    while not until():
        try:
            connection.drain_events(timeout=quiet_seconds)
        except TimeoutError:
            return


class Receiver:
    """A consumer that keeps what it got.

    Args:
        connection: Where it consumes.
        names: Of the queues.
        prefetch: The prefetch count.
        hold: Number of messages that it keeps before it acknowledges the oldest.
    """

    def __init__(
        self,
        connection: kombu.Connection,
        names: Sequence[str],
        *,
        prefetch: int = 0,
        hold: int = 0,
        **more: Any,
    ) -> None:
        self.got: Got = []
        self.messages: list[Any] = []
        self._hold = hold
        self.consumer = connection.Consumer(
            [queue(name) for name in names], callbacks=[self._receive], auto_declare=False, **more
        )
        self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def _receive(self, body: str, message: Any) -> None:
        self.got.append((message.delivery_info["routing_key"], body))
        self.messages.append(message)
        if len(self.messages) > self._hold and not self.consumer.no_ack:
            self.messages.pop(0).ack()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("prefetch", "hold"), [(0, 0), (4, 2)])
def test_order_fairness_and_priorities_are_kombus(
    connect: Connect, options: dict[str, Any], prefetch: int, hold: int
) -> None:
    """Several queues, several priorities, messages that arrive in between."""

    def run(connection: kombu.Connection) -> Got:
        for n in range(4):
            for name in QUEUES:
                for priority in (0, 9, 4, 3):
                    publish(connection, name, f"{name} {priority} {n}", priority=priority)
        receiver = Receiver(connection, QUEUES, prefetch=prefetch, hold=hold)
        drain(connection, until=lambda: len(receiver.got) >= 40)
        for n in range(4):
            publish(connection, "a", f"later {n}", priority=9)
        drain(connection)
        return receiver.got

    assert len(both(connect, run, **options)) == 4 * 4 * 4 + 4


def test_messages_of_8100_lists_come(connect: Connect) -> None:
    """Lua takes no more than 8,000 of them at once: while it looks, and when it is woken."""
    names = [f"tenant-{number:03d}" for number in range(810)]
    connection = connect("reliable", {"priority_steps": list(range(10))})
    receiver = Receiver(connection, names)
    drain(connection)
    for number in (809, 0, 404, 809):  # each wakes a receiver that is idle
        for priority in (9, 0):
            publish(connection, names[number], str(priority), priority=priority)
        drain(connection)
        assert sorted(receiver.got) == [(names[number], "0"), (names[number], "9")]
        receiver.got.clear()
    tracemalloc.start()
    try:  # each message leaves another order of the queues, with the names of all lists
        for name in names[:20]:
            publish(connection, name, "x")
        drain(connection)
        assert len(receiver.got) == 20
        assert tracemalloc.get_traced_memory()[0] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_nothing_comes_beyond_the_prefetch_count(connect: Connect, broker: redis.Redis) -> None:
    """Also when it grows and shrinks while messages are held."""

    def run(connection: kombu.Connection) -> list[int]:
        for n in range(12):
            publish(connection, "a", str(n))
        seen = []
        receiver = Receiver(connection, ["a"], prefetch=1, hold=99)
        for count in (1, 3, 5, 2, 6):
            receiver.consumer.qos(prefetch_count=count)
            drain(connection)
            seen.append(len(receiver.got))
        for message in receiver.messages[:4]:
            message.ack()
        drain(connection)
        return [*seen, len(receiver.got), connection.default_channel._size("a")]

    assert both(connect, run) == [1, 3, 5, 5, 6, 10, 2]


def test_who_takes_the_last_message_wakes_the_next_worker_when_it_is_full(
    connect: Connect, broker: redis.Redis
) -> None:
    """Else a few workers are left alone with a flood that begins slowly. No thread looks here."""
    then = {"1": ["2"], "2": ["3", "4"]}
    connections, taken = [connect("reliable") for _ in range(3)], []

    def take(body: str, _message: Any) -> None:
        taken.append(body)
        for following in then.get(body, ()):
            publish(connections[0], "a", following)

    def step() -> list[str]:
        for connection in connections:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.02)
        return sorted(taken)

    for connection in connections:
        connection.default_channel.dlq_leases.loop_goes_on = True  # of a pool, unlike solo
        consumer = connection.Consumer([queue("a")], callbacks=[take], auto_declare=False)
        consumer.qos(prefetch_count=2)
        consumer.consume()
    poll(lambda: step() or broker.info("clients")["blocked_clients"] == 2)
    for body in ("0", "1"):
        publish(connections[0], "a", body)
        poll(lambda body=body: body in step())
    poll(lambda: step() == ["0", "1", "2", "3", "4"], timeout_seconds=5)


@pytest.mark.parametrize("loop_goes_on", [True, False])
def test_who_is_on_duty_takes_a_message_and_stays_unless_its_loop_stands_still(
    connect: Connect, broker: redis.Redis, loop_goes_on: bool
) -> None:
    """Without room it wakes another when the next message comes, so one message wakes one worker.

    No thread looks here.
    """
    connections, taken = [connect("reliable") for _ in range(3)], []
    named = [connection.default_channel.dlq_leases for connection in connections]
    for connection, leases in zip(connections, named, strict=True):
        leases.loop_goes_on = loop_goes_on
        receive = partial(lambda name, body, _message: taken.append((body, name)), leases.name)
        consumer = connection.Consumer([queue("a")], callbacks=[receive], auto_declare=False)
        consumer.qos(prefetch_count=1)
        consumer.consume()

    def step() -> int:
        for connection in connections:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.02)
        return len(taken)

    def on_duty() -> str:
        return broker.get(broker.keys("unacked_duty:*")[0]).decode()

    poll(lambda: step() or broker.info("clients")["blocked_clients"] == 2)
    publish(connections[0], "a", "0")
    poll(lambda: step() == 1)
    for _ in range(5):
        step()
    assert (on_duty() == taken[0][1]) is loop_goes_on
    assert broker.info("clients")["blocked_clients"] == (2 if loop_goes_on else 1)
    for number in (1, 2):
        publish(connections[0], "a", str(number))
        poll(lambda number=number: step() == number + 1, timeout_seconds=5)
    assert {name for _, name in taken} == {leases.name for leases in named}


def test_a_message_for_who_is_on_duty_is_one_read_for_redis_beside_its_publication(
    connect: Connect, broker: redis.Redis
) -> None:
    """The fetch also asks to be told of the next one, and lets the duty last."""
    connection = connect("reliable")
    connection.default_channel.dlq_leases.loop_goes_on = True
    receiver = Receiver(connection, ["a"], hold=99)
    publish(connection, "a", "first")
    entry = broker.lindex("a", 0)
    drain(connection)
    reads = [broker.info("stats")["total_reads_processed"]]
    for number in range(9):
        broker.lpush("a", entry)
        drain(connection, until=lambda number=number: len(receiver.got) == number + 2)
        reads.append(broker.info("stats")["total_reads_processed"])
    assert len(receiver.got) == 10
    # This question is the third; now and then there is a look for what plain workers held.
    assert median(after - before for before, after in pairwise(reads)) == 3


def test_queues_that_are_added_and_cancelled_while_idle(connect: Connect) -> None:
    """An idle channel fetches from the queues of now; kombu after its `BRPOP` of a second."""
    quiet = partial(drain, quiet_seconds=1.3)

    def run(connection: kombu.Connection) -> Got:
        receiver = Receiver(connection, ["a"])
        quiet(connection)
        publish(connection, "b", "before")
        receiver.consumer.add_queue(queue("b"))
        receiver.consumer.consume()
        quiet(connection)
        publish(connection, "b", "after")
        quiet(connection)
        receiver.consumer.cancel_by_queue("b")
        quiet(connection)
        publish(connection, "b", "cancelled")
        publish(connection, "a", "still")
        quiet(connection)
        receiver.consumer.cancel_by_queue("a")
        quiet(connection)
        publish(connection, "a", "left")
        quiet(connection)
        receiver.consumer.add_queue(queue("a"))
        receiver.consumer.consume()
        quiet(connection)
        return receiver.got

    assert [body for _, body in both(connect, run)] == ["before", "after", "still", "left"]


def test_a_redis_that_forgets_what_it_tracks_makes_no_idle_worker_spin(connect: Connect) -> None:
    """Its `tracking-table-max-keys` is too low: each look made Redis tell of a change at once."""
    with RedisServer("--tracking-table-max-keys", "1") as server:
        connection = connect("reliable", url=server.url)
        receiver = Receiver(connection, QUEUES)
        drain(connection)
        before = server.client().info("stats")["total_commands_processed"]
        with suppress(TimeoutError):
            connection.drain_events(timeout=3)
        sent = server.client().info("stats")["total_commands_processed"] - before
        assert sent < 300, sent
        publish(connection, "b", "1")
        drain(connection, until=lambda: bool(receiver.got), quiet_seconds=5)
        assert receiver.got == [("b", "1")]


def test_requeued_messages_are_the_last_of_their_queue(connect: Connect) -> None:
    """With their priority, and marked as redelivered; rejected ones are gone."""

    def run(connection: kombu.Connection) -> list[tuple[str, Any]]:
        for n in range(6):
            publish(connection, "a", str(n), priority=9 if n == 3 else 0)
        receiver = Receiver(connection, ["a"], hold=99)
        drain(connection, until=lambda: len(receiver.got) >= 3)
        for message, requeue in zip(receiver.messages, (True, False, True), strict=False):
            message.reject(requeue=requeue)
        receiver.messages.clear()
        drain(connection)
        return [(m.body, m.delivery_info.get("redelivered")) for m in receiver.messages]

    assert len(both(connect, run)) == 5


def test_what_is_not_acknowledged_returns_when_the_channel_closes(
    connect: Connect, broker: redis.Redis
) -> None:
    """In order, before what was in the queue; for both kinds of worker."""

    def run(connection: kombu.Connection) -> Got:
        for n in range(6):
            publish(connection, "a", str(n))
        receiver = Receiver(connection, ["a"], prefetch=4, hold=99)
        drain(connection)
        receiver.messages[1].ack()
        leases = getattr(receiver.consumer.channel, "dlq_leases", None)
        connection.default_channel.close()
        receiver.consumer.channel.close()
        if leases is not None:
            leases.close()  # in a worker, a thread gives them back
        other = connection.clone()
        try:
            second = Receiver(other, ["a"])
            drain(other)
            return sorted(second.got)
        finally:
            other.close()

    assert [body for _, body in both(connect, run)] == ["0", "2", "3", "4", "5"]


def test_consumers_that_do_not_acknowledge_leave_nothing_behind(
    connect: Connect, broker: redis.Redis
) -> None:
    """Beside one that does, on the same channel."""

    def run(connection: kombu.Connection) -> Got:
        for n in range(3):
            publish(connection, "a", str(n))
            publish(connection, "b", str(n))
        channel = connection.channel()
        free = Receiver(channel, ["a"], no_ack=True, prefetch=1)
        held = Receiver(channel, ["b"], hold=99, prefetch=2)
        drain(connection)
        return [*sorted(free.got), *sorted(held.got)]

    got = both(connect, run)
    held = sum(name == "b" for name, _ in got)
    assert 0 < held < len(got)
    assert (broker.hlen("unacked"), broker.zcard("unacked_leases")) == (held, held)


def test_fanout_stays_publish_and_subscribe(connect: Connect) -> None:
    """Every subscriber gets a copy, beside its ordinary queue, also while that is idle."""

    def run(connection: kombu.Connection) -> list[str]:
        exchange = Exchange("news", type="fanout")
        channel = connection.channel()
        got: list[str] = []

        def receive(body: str, message: Any) -> None:
            got.append(body)
            message.ack()

        readers = [
            connection.channel().Consumer([Queue(f"reader-{n}", exchange)], callbacks=[receive])
            for n in range(2)
        ]
        ordinary = channel.Consumer([queue("a")], callbacks=[receive])
        for consumer in (*readers, ordinary):
            consumer.consume()
        drain(connection)
        producer = connection.Producer()
        for n in range(3):
            producer.publish(f"news {n}", exchange=exchange)
            publish(connection, "a", f"ordinary {n}")
            drain(connection)
        return got

    assert sorted(both(connect, run)) == sorted(
        [*(f"news {n}" for n in range(3) for _ in range(2)), *(f"ordinary {n}" for n in range(3))]
    )


@pytest.mark.skipif(
    not hasattr(kombu_redis.Channel, "_get_queue_expire"), reason="kombu 5.4 has no expires here"
)
def test_queues_that_expire_do_so(connect: Connect, broker: redis.Redis) -> None:
    """Their lists, for all priorities; a message that is held is not touched by that."""

    def run(connection: kombu.Connection) -> Got:
        short = queue("short", expires=0.5)
        short(connection.default_channel).declare()
        publish(connection, "short", "held")
        publish(connection, "short", "expires", priority=9)
        receiver = Receiver(connection, ["short"], prefetch=1, hold=99)
        drain(connection)
        poll(lambda: connection.default_channel._size("short") == 0)
        receiver.messages.pop().ack()
        drain(connection)
        return receiver.got

    assert both(connect, run) == [("short", "held")]


def test_a_frequent_look_for_what_plain_workers_held_keeps_its_connection(
    connect: Connect, broker: redis.Redis
) -> None:
    """`unacked_restore_interval` of a second opened one each time."""
    channel = connect("reliable").default_channel
    for _ in range(2):  # the first look is one of a kind
        channel.qos._vrestore_count = 0
        channel.qos.restore_visible()
    opened = broker.info("stats")["total_connections_received"]
    for _ in range(5):
        channel.qos._vrestore_count = 0
        channel.qos.restore_visible()
    assert broker.info("stats")["total_connections_received"] == opened


def test_each_fetch_reads_what_the_other_left(connect: Connect, broker: redis.Redis) -> None:
    """Messages, and records of those that a dead worker held, in both directions."""
    options = {"visibility_timeout": 1, "global_keyprefix": "shop:"}
    for dead, alive in (("kombu", "reliable"), ("reliable", "kombu")):
        broker.flushdb()
        first, second = connect(dead, options), connect(alive, options)
        for n in range(3):
            publish(first, "a", f"{dead} {n}", priority=3 * n, headers={"n": n})
        held = Receiver(first, ["a"], prefetch=2, hold=99)
        drain(first)
        assert len(held.got) == 2

        # It is dead: nobody renews; its leases end, and the visibility timeout.
        for key in ("shop:unacked_index", "shop:unacked_leases"):
            for tag in broker.zrange(key, 0, -1):
                broker.zadd(key, {tag: 1})
        receiver = Receiver(second, ["a"])
        drain(second)
        second.default_channel.qos._vrestore_count = 0
        second.default_channel.qos.restore_visible()
        drain(second)

        assert sorted(body for _, body in receiver.got) == [f"{dead} {n}" for n in range(3)]
        assert broker.hlen("shop:unacked") == 0
        for connection in (first, second):
            for channel in (connection.default_channel, *connection.transport.channels):
                channel.qos._delivered.clear()
