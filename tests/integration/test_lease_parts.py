"""What a worker holds, and what the thread does about it, against a real Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
import redis
from servers import RedisServer
from waiting import poll

from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.broker import SCRIPTS, Broker, Connections
from celery_dlq.transport.redis.fetch import LeaseKeeper
from celery_dlq.transport.redis.leases import Leases

LEASE = 0.3


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of an empty Redis."""
    with redis.Redis.from_url(redis_url) as one:
        yield one


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    """It, as kombu's channel uses it."""
    return broker_on(client)


def broker_on(client: redis.Redis) -> Broker:
    return Broker(
        client=SimpleNamespace(
            connection_pool=Connections(client.connection_pool),
            execute_command=client.execute_command,
        ),
        url="redis://",
        unacked="unacked",
        index="unacked_index",
        prefix="",
        sep="|",
        steps=[0],
        priority_of=lambda _: 0,
        decode_body=lambda body, _encoding: body,
    )


MADE: list[Leases] = []


@pytest.fixture(autouse=True)
def _disconnect() -> Iterator[None]:
    yield
    for leases in MADE:
        if leases.connection is not None:
            leases.connection.close()
    MADE.clear()


def leases_on(broker: Broker, lease: float = LEASE) -> Leases:
    """What a worker holds; its process dies without a word."""
    leases = Leases(lease)
    leases.connected(broker)
    MADE.append(leases)
    return leases


def fetch(leases: Leases, broker: Broker, *, reply: bool = True) -> str:
    """Do what the channel does; without a reply, it is still in the socket."""
    tag = leases.new_tag()
    script = script_text("fetch", SCRIPTS)
    keys = (*broker.keys, "unacked_duty:x", "unacked_bell:x", "orders")
    args = (tag, leases.lease_seconds, '"orders"', f"0{leases.take_unsent()}")
    found = broker.client.execute_command("EVAL", script.text, len(keys), *keys, *args)
    assert found is not None
    if reply:
        leases.received(tag)
    return tag


def publish(client: redis.Redis, *names: str) -> None:
    for name in names:
        envelope = {"body": name, "headers": {}, "properties": {"delivery_info": {}}}
        client.lpush("orders", json.dumps(envelope))


def bodies(client: redis.Redis) -> list[str]:
    """The messages in the queue, the next one first."""
    return [json.loads(entry)["body"] for entry in reversed(client.lrange("orders", 0, -1))]


def call_on(client: redis.Redis) -> Any:
    return client.execute_command


def restore_expired(broker: Broker) -> LeaseKeeper:
    """Let a fresh worker look for dead ones, once."""
    keeper = LeaseKeeper(leases_on(broker, 60))
    keeper.use_broker(broker)
    with pytest.MonkeyPatch.context() as patch:
        intervals.change(patch, lease_max_hold_off=-1.0)  # it is over
        keeper.restore_expired(broker, 0.001)
    keeper.disconnect()
    return keeper


def lease_ends(client: redis.Redis) -> None:
    def ended() -> bool:
        seconds, micros = client.time()
        return client.zcount("unacked_leases", seconds + micros / 1e6, "+inf") == 0

    poll(ended)


def test_a_reply_that_lay_in_the_socket_for_too_long_does_not_start(
    client: redis.Redis, broker: Broker
) -> None:
    """The lease counts from the request: another worker has the message by now."""
    leases = leases_on(broker)
    publish(client, "one")
    tag = fetch(leases, broker, reply=False)
    lease_ends(client)
    assert restore_expired(broker).restored == 1

    leases.renew(call_on(client), broker)
    leases.received(tag)

    assert not leases.still_holds(tag)
    leases.acknowledge(tag)
    assert bodies(client) == ["one"]


def test_a_fetch_that_was_only_asked_for_is_not_lost(client: redis.Redis, broker: Broker) -> None:
    """A renewal may overtake it."""
    leases = leases_on(broker)
    publish(client, "one")
    early = leases.new_tag()
    leases.renew(call_on(client), broker)
    leases.received(early)
    assert leases.still_holds(early)
    assert leases.taken == 0


def test_what_a_turn_of_the_loop_acknowledged_goes_with_the_next_fetch_or_at_its_end(
    client: redis.Redis, broker: Broker
) -> None:
    """Other threads, which have no turns, send at once."""
    leases = leases_on(broker)
    leases.loop_goes_on, leases.loop_thread = True, threading.get_ident()
    publish(client, "one", "two", "three", "four")
    one, two, three = (fetch(leases, broker) for _ in range(3))
    leases.acknowledge(one)
    leases.acknowledge(two)
    assert client.hlen("unacked") == 3
    four = fetch(leases, broker)
    assert set(client.hkeys("unacked")) == {three.encode(), four.encode()}
    leases.acknowledge(three)
    leases.send_acknowledgements()
    poll(lambda: client.hkeys("unacked") == [four.encode()])
    thread = threading.Thread(target=leases.acknowledge, args=(four,))
    thread.start()
    thread.join()
    poll(lambda: client.hlen("unacked") == 0)


def test_a_message_whose_owner_is_unknown_neither_starts_nor_is_acknowledged(
    client: redis.Redis, broker: Broker
) -> None:
    """Redis does not answer after a standstill; the message returns when its lease ends."""
    leases = leases_on(broker)
    publish(client, "one")
    tag = fetch(leases, broker)
    lease_ends(client)
    leases.connected(broker_on(redis.Redis(port=1)))

    assert not leases.still_holds(tag)
    leases.connected(broker)
    leases.acknowledge(tag)
    leases.close()

    assert client.hlen("unacked") == 1
    assert restore_expired(broker).restored == 1
    assert bodies(client) == ["one"]


def test_a_message_that_kombu_gave_to_others_is_not_renewed(
    client: redis.Redis, broker: Broker
) -> None:
    """It knows the hash and the index only; this worker runs the message, and counts with care."""
    leases = leases_on(broker)
    publish(client, "one")
    tag = fetch(leases, broker)
    client.hdel("unacked", tag)
    client.zrem("unacked_index", tag)

    leases.renew(call_on(client), broker)

    assert leases.still_holds(tag)
    assert not leases.is_known(tag)
    assert restore_expired(broker).restored == 0


def test_a_message_whose_lease_ended_is_not_held_by_its_first_worker(
    client: redis.Redis, broker: Broker
) -> None:
    """The one that gave it to others leaves a note for it."""
    leases = leases_on(broker)
    publish(client, "one")
    tag = fetch(leases, broker)
    client.zadd(broker.leases, {tag: 1})
    assert restore_expired(broker).restored == 1

    leases.renew(call_on(client), broker)

    assert not leases.still_holds(tag)
    assert leases.taken == 1
    assert client.zcard(broker.restored) == 1


def test_leases_are_renewed_and_bells_ring_on_a_full_redis() -> None:
    """Else its live workers would lose their messages to each other, or never learn of one."""
    with RedisServer() as server:
        client = server.client()
        broker = broker_on(client)
        leases = leases_on(broker)
        publish(client, "one")
        tag = fetch(leases, broker)
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            client.set("x", "y")
        before = client.zscore("unacked_leases", tag)

        leases.renew(call_on(client), broker)

        assert client.zscore("unacked_leases", tag) > before
        client.eval(script_text("ring", SCRIPTS).text, 3, "unacked", "bell", "duty", "")
        assert client.rpop("bell") == b"1"


def test_many_messages_of_a_dead_worker_come_back_in_order(
    client: redis.Redis, broker: Broker
) -> None:
    """More than one call's; a record that nobody can read keeps none of them back."""
    leases = leases_on(broker)
    names = [f"m{number}" for number in range(250)]
    publish(client, *names)
    tags = [fetch(leases, broker) for _ in names]
    client.hset("unacked", tags[200], "no record")
    leases.renew(call_on(client), broker)
    lease_ends(client)

    keeper = restore_expired(broker)

    assert keeper.restored == 249
    assert bodies(client) == [name for name in names if name != "m200"]
    assert client.zcard("unacked_leases") == 0


def test_what_is_at_work_is_held_without_its_connection(
    client: redis.Redis, broker: Broker
) -> None:
    """What waits goes back in order; so does what is put off then."""
    leases = leases_on(broker)
    publish(client, "acknowledged", "put off", "waiting 1", "waiting 2")
    tags = [fetch(leases, broker) for _ in range(4)]
    assert leases.begin(tags[0])
    assert leases.begin(tags[1])
    assert leases.begin(tags[2])
    assert leases.put_off(tags[2])

    leases.connection_closes(tags)
    assert not leases.still_holds(tags[2])
    assert not leases.begin(tags[2])
    assert leases.to_return() == tags[2:]
    leases.acknowledge(tags[0])
    assert leases.to_return() == []
    assert not leases.put_off(tags[1])

    assert leases.to_return() == [tags[1]]
    assert leases.to_return() == []
    leases.return_later(tags[1:])
    leases.close()
    assert bodies(client) == ["put off", "waiting 1", "waiting 2"]
    assert client.hlen("unacked") == client.zcard("unacked_leases") == 0


def test_an_interrupted_fetch_goes_back_at_once(client: redis.Redis, broker: Broker) -> None:
    """Whether Redis executed it is unknown."""
    leases = leases_on(broker, 60)
    publish(client, "one")
    tag = fetch(leases, broker, reply=False)
    leases.interrupted(tag)
    leases.interrupted(leases.new_tag())
    keeper = LeaseKeeper(leases)
    keeper.use_broker(broker)

    keeper.give_back(broker)

    keeper.disconnect()
    assert bodies(client) == ["one"]


def test_threads_acknowledge_beside_the_thread_that_confirms(
    client: redis.Redis, broker: Broker
) -> None:
    """None is forgotten, whoever comes first."""
    leases = leases_on(broker, 60)
    publish(client, *(f"m{number}" for number in range(400)))
    tags = [fetch(leases, broker) for _ in range(400)]
    keeper = LeaseKeeper(leases)
    keeper.connected(broker)
    threads = [
        threading.Thread(target=lambda mine: [*map(leases.acknowledge, mine)], args=(tags[n::4],))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    keeper.stop()
    leases.close()

    assert [client.hlen("unacked"), *map(client.zcard, broker.keys[1:])] == [0, 0, 0]
    assert client.llen("orders") == 0


def test_after_a_silence_of_redis_nobody_is_taken_for_dead_at_once(
    client: redis.Redis, broker: Broker
) -> None:
    """Live workers renew within seconds; then it is known who is dead."""
    publish(client, "one")
    fetch(leases_on(broker, 1), broker)
    lease_ends(client)
    keeper = LeaseKeeper(leases_on(broker, 1))
    keeper.use_broker(broker)

    keeper.restore_expired(broker, 0.001)
    assert bodies(client) == []

    poll(
        lambda: keeper.restore_expired(broker, 0.001) or bodies(client) == ["one"],
        timeout_seconds=5,
    )
    keeper.disconnect()


def test_a_worker_that_stood_still_finds_out_about_all_of_its_messages(
    client: redis.Redis, broker: Broker
) -> None:
    """However many others were given in the meantime, from it or from others."""
    leases = leases_on(broker)
    publish(client, "first", "last")
    first = fetch(leases, broker)
    lease_ends(client)
    assert restore_expired(broker).restored == 1
    at = client.zscore(broker.restored, first)
    client.zadd(broker.restored, {f"of-another-app-{number}": at for number in range(20_000)})
    fetch(leases, broker)
    lease_ends(client)
    assert restore_expired(broker).restored == 1

    leases.renew(call_on(client), broker)

    assert leases.taken == 2


def test_giving_back_many_messages_leaves_time_to_renew(
    client: redis.Redis, broker: Broker
) -> None:
    """Else another worker takes what runs here."""
    leases = leases_on(broker, 1.0)
    pipe, waiting = client.pipeline(), [leases.new_tag() for _ in range(20_000)]
    for tag in waiting:
        pipe.hset(broker.unacked, tag, b'[{"body": "x"},"","orders"]')
        leases.received(tag)
    pipe.execute()
    leases.connection_closes(waiting)
    publish(client, "runs")
    held, keeper = fetch(leases, broker), LeaseKeeper(leases)
    keeper.connected(broker)
    try:
        until, gaps = time.monotonic() + 3, []
        while time.monotonic() < until:
            seconds, micros = client.time()
            gaps.append(client.zscore(broker.leases, held) - (seconds + micros / 1e6))
    finally:
        keeper.stop()

    assert min(gaps) > 0
    assert client.llen("orders") > 100


def test_each_message_goes_back_to_where_its_own_app_reads(client: redis.Redis) -> None:
    """Apps of one database may separate priorities in other ways, and have others."""
    envelope = {
        "body": "x",
        "headers": {},
        "properties": {
            "priority": 5,
            "delivery_info": {"exchange": "", "routing_key": "orders"},
        },
    }
    apps = {
        "usual": replace(broker_on(client), sep="\x06\x16", steps=[0, 3, 6, 9]),
        "other": replace(broker_on(client), sep=":", steps=[0, 5]),
        "third": replace(broker_on(client), sep="\x06\x16", steps=[0, 4]),
    }
    lists = {"usual": b"orders\x06\x163", "other": b"orders:5", "third": b"orders\x06\x164"}
    apps = {
        name: replace(app, priority_of=lambda e: e["properties"]["priority"])
        for name, app in apps.items()
    }
    for dead, broker in apps.items():
        leases = leases_on(broker)
        client.lpush("orders", json.dumps(envelope))
        fetch(leases, broker)
        lease_ends(client)
        for alive in apps.values():
            restore_expired(alive)
        assert [*client.scan_iter("orders*")] == [lists[dead]]
        client.delete(lists[dead])
