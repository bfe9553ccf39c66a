"""Connections are cut, and workers die, at each command of reliable fetch."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256
from typing import Any

import kombu
import pytest
import redis
from command_proxy import CommandProxy, Fault, runs, sends
from servers import RedisServer
from waiting import poll

from celery_dlq.transport.redis.broker import broker_of
from celery_dlq.transport.redis.channel import reliable
from celery_dlq.transport.redis.fetch import LeaseKeeper
from celery_dlq.transport.redis.leases import Leases

QUEUE = "work"
KEYS = ("unacked", "unacked_index", "unacked_leases")
LEASE_SECONDS = 3.0
WAIT_SECONDS = 10 * LEASE_SECONDS
MESSAGES = 12


COMMANDS = {
    "fetch": runs("fetch"),
    "acknowledgement": sends("HDEL"),
    "confirmation": sends("ZREM"),
    "renewal": runs("renew"),
    "search": runs("expired"),
    "restoring": runs("restore"),
    "tracking": sends("CLIENT", "TRACKING"),
    "look": sends("EXISTS"),
    "bell": sends("BRPOP"),
}


class Ledger:
    """What was published, who holds it, what was acknowledged.

    Args:
        client: Of the server itself.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.holders: dict[str, Holder] = {}
        self.acknowledged: set[str] = set()
        self.published: set[str] = set()

    def publish(self, names: list[str]) -> None:
        with kombu.Connection(self._url()) as connection:
            for name in names:
                connection.default_channel.basic_publish(
                    connection.default_channel.prepare_message(json.dumps(name)), "", QUEUE
                )
        self.published.update(names)

    def delivered(self, name: str, holder: Holder) -> None:
        assert name not in self.acknowledged, f"{name} was delivered after its acknowledgement"
        assert name not in self.holders, f"{name} was delivered while another holder lives"
        self.holders[name] = holder

    def check(self) -> None:
        """Each message is in its list, unacknowledged, or was acknowledged."""
        with self._client.pipeline() as pipe:
            pipe.lrange(QUEUE, 0, -1)
            pipe.hgetall(KEYS[0])
            pipe.zrange(KEYS[1], 0, -1)
            pipe.zrange(KEYS[2], 0, -1)
            waiting, records, index, leases = pipe.execute()
        listed = [_name(json.loads(entry)) for entry in waiting]
        recorded = [_name(json.loads(record)[0]) for record in records.values()]
        assert len(listed) == len(set(listed)), "a message is twice in its list"
        lost = self.published - {*listed, *recorded} - self.acknowledged
        assert not lost, f"lost: {sorted(lost)}"
        assert not records.keys() - {*index, *leases}, "unacknowledged, and nobody would restore it"

    def is_clean(self) -> bool:
        """True if Redis has nothing of the messages any more."""
        return not self._client.exists(QUEUE, *KEYS)

    def died(self, holder: Holder, proxy: CommandProxy) -> None:
        """A holder is gone; what it did not bring to Redis has not happened."""
        poll(lambda: not proxy.ports & {_port(one) for one in self._client.client_list()})
        for name, _message in holder.held:
            self.holders.pop(name, None)
        records = self._client.hvals(KEYS[0])
        self.acknowledged -= {_name(json.loads(record)[0]) for record in records}

    def _url(self) -> str:
        return f"redis://127.0.0.1:{self._client.connection_pool.connection_kwargs['port']}/0"


def _port(client: dict[str, str]) -> int:
    return int(client["addr"].rpartition(":")[2])


def _name(envelope: dict[str, Any]) -> str:
    return str(json.loads(b64decode(envelope["body"])))


class Holder:
    """A worker, as far as its transport goes.

    Args:
        ledger: Told of every delivery.
        port: Of the Redis or of a proxy.
        prefetch: Most messages that it holds.
        keeps: Returns how many messages it does not acknowledge now.
    """

    def __init__(
        self,
        ledger: Ledger,
        port: int,
        *,
        prefetch: int = 4,
        keeps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ledger = ledger
        self._url = f"redis://127.0.0.1:{port}/0"
        self._prefetch = prefetch
        self._keeps = keeps
        self.leases = Leases(LEASE_SECONDS)
        self.keeper = LeaseKeeper(self.leases)
        self.held: list[tuple[str, Any]] = []
        self.reconnections = 0
        self.connect()

    def connect(self) -> None:
        connection = kombu.Connection(
            self._url, transport_options={"visibility_timeout": 3600, "max_retries": 3}
        )
        transport = reliable(connection.get_transport_cls(), self.leases, self._connected)
        connection.get_transport_cls = lambda: transport
        self.connection = connection
        self.channel = connection.default_channel
        self.channel.basic_qos(0, self._prefetch, False)
        self.channel.queue_declare(QUEUE)
        consumer = kombu.Consumer(self.channel, [kombu.Queue(QUEUE)], on_message=self._on_message)
        consumer.consume()

    def step(self) -> None:
        """Take what is there, acknowledge the oldest; after an error, connect as Celery does."""
        errors = (*self.connection.connection_errors, *self.connection.channel_errors)
        try:
            with suppress(TimeoutError):
                self.connection.drain_events(timeout=0.05)
            if len(self.held) > self._keeps():
                name, message = self.held.pop(0)
                self._ledger.acknowledged.add(name)
                message.ack()
                self._ledger.holders.pop(name)
        except errors:
            self._reconnect()

    def die(self, proxy: CommandProxy) -> None:
        """End as a killed process does: nothing is sent any more."""
        proxy.shut()
        self.keeper.stopped = True
        self._ledger.died(self, proxy)
        self.held.clear()
        self.leases.held.clear()
        self.leases.acknowledged.clear()
        self.close()

    def close(self) -> None:
        self.keeper.stop()
        self.leases.close()
        self.connection.collect()

    def _reconnect(self) -> None:
        self.reconnections += 1
        given_back = [name for name, _message in self.held]
        self.held.clear()
        for name in given_back:
            self._ledger.holders.pop(name)
        with suppress(Exception):
            self.connection.collect()
        self.connect()

    def _connected(self, channel: Any) -> None:
        broker = broker_of(channel)
        self.leases.connected(broker)
        self.keeper.connected(broker)

    def _on_message(self, message: Any) -> None:
        name = str(json.loads(message.body))
        self._ledger.delivered(name, self)
        self.held.append((name, message))


class Scene:
    """A Redis of its own, a proxy before it, a ledger and holders; a context manager.

    Args:
        kind: When the proxy cuts: before the command, or after it.
        command: Where it cuts.
    """

    def __init__(self, kind: str, command: str) -> None:
        self.kind, self.command = kind, command
        self._stack = ExitStack()

    def __enter__(self) -> Scene:
        self.server = self._stack.enter_context(RedisServer())
        self.proxy = self._stack.enter_context(CommandProxy(self.server.port))
        self.ledger = Ledger(self.server.client())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def holder(self, port: int | None = None, **more: Any) -> Holder:
        """Start a holder, which is closed in the end."""
        one = Holder(self.ledger, port or self.server.port, **more)
        self._stack.callback(lambda: one.keeper.stopped or one.close())
        return one

    def fault(self, **more: Any) -> Fault:
        """Let the proxy cut at the command."""
        return self.proxy.fault(self.kind, COMMANDS[self.command], **more)


def at_each_command(check: Callable[[Scene], None], kind: str) -> None:
    """Check all at the same time, each with servers of its own: each waits for leases."""

    def one(command: str) -> None:
        with Scene(kind, command) as scene:
            check(scene)

    with ThreadPoolExecutor(len(COMMANDS)) as threads:
        found = {command: threads.submit(one, command) for command in COMMANDS}
    for command, done in found.items():
        if problem := done.exception():
            raise AssertionError(command) from problem


def left_by_a_dead_worker(scene: Scene) -> None:
    """Let a worker die that held three messages; where the bell is asked, others are on duty."""
    scene.ledger.publish([f"dead-{n}" for n in range(3)])
    with CommandProxy(scene.server.port) as way:
        dead = scene.holder(way.port, keeps=lambda: 3, prefetch=3)
        poll(lambda: dead.step() or len(dead.held) == 3)
        dead.die(way)
    if scene.command == "bell":
        others_are_on_duty(scene.server)


def others_are_on_duty(server: RedisServer) -> None:
    """For longer than it takes a worker to wait for the bell."""
    lists = sorted([QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in (3, 6, 9))])
    digest = sha256("\n".join(lists).encode()).hexdigest()[:16]
    server.client().set(f"{KEYS[0]}_duty:{digest}", "another", px=int(3000 * LEASE_SECONDS))


def work(ledger: Ledger, *holders: Holder, until: Callable[[], bool], seconds: float) -> None:
    """Let holders work until something is so; the invariant holds all the time."""
    deadline = time.monotonic() + seconds
    while not until():
        for one in holders:
            one.step()
        ledger.check()
        assert time.monotonic() < deadline, (
            f"left: {ledger.published - ledger.acknowledged}, held: {[*ledger.holders]}"
        )


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_cut_at_any_command_loses_nothing_and_doubles_nothing(kind: str) -> None:
    """Two connections are cut at the command; the worker goes on and acknowledges each once."""

    def check(scene: Scene) -> None:
        ledger = scene.ledger
        left_by_a_dead_worker(scene)
        fault = scene.fault(times=2)
        ledger.publish([f"{n}" for n in range(MESSAGES)])
        one = scene.holder(scene.proxy.port, keeps=lambda: int(not fault.met.is_set()))
        work(ledger, one, until=fault.met.is_set, seconds=WAIT_SECONDS)
        ledger.publish([f"later-{n}" for n in range(MESSAGES)])
        work(ledger, one, scene.holder(prefetch=2), until=ledger.is_clean, seconds=WAIT_SECONDS)
        assert ledger.acknowledged == ledger.published

    at_each_command(check, kind)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_worker_that_dies_at_any_command_leaves_all_to_the_others(kind: str) -> None:
    """After the lease another worker has acknowledged what the dead one had not."""

    def check(scene: Scene) -> None:
        ledger = scene.ledger
        left_by_a_dead_worker(scene)
        ledger.publish([f"{n}" for n in range(MESSAGES)])
        fault = scene.fault(last=True)
        one = scene.holder(scene.proxy.port, keeps=lambda: 1)
        with suppress(Exception):  # it cannot connect again
            work(ledger, one, until=fault.met.is_set, seconds=WAIT_SECONDS)
        assert fault.met.is_set()
        one.die(scene.proxy)
        ledger.check()
        work(ledger, scene.holder(), until=ledger.is_clean, seconds=WAIT_SECONDS)
        assert ledger.acknowledged == ledger.published

    at_each_command(check, kind)
