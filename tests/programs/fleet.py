"""A fleet on one Redis: ``PYTHONPATH=tests:tests/programs python -m fleet --workers 20 100 1000``.

A worker here is the real transport, its leases and their thread, and the real heartbeat; plain ones
are kombu's transport. There is no pool: a message is acknowledged ten milliseconds after it was
taken. A few processes play all workers, so latencies are upper bounds; what Redis pays is exact.
Prints Markdown. Ends with an error if a message was lost, or was taken twice without a kill.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kombu
from kombu.asynchronous import Hub
from servers import RedisServer
from waiting import poll

QUEUE, WORK_SECONDS, LEASE_SECONDS = "orders", 0.01, 6.0
LAPSE_SECONDS = 4.0  # the longest duty, a look, and a slow machine
KINDS = ("plain", "guarded")


class Player:
    """Workers of one process."""

    def __init__(self, url: str, kind: str, first: int, workers: int, taken: str) -> None:
        self.hub = Hub()
        self.taken = Path(taken).open("a", buffering=1)  # noqa: SIM115 - as long as it plays
        self._keep: list[Any] = []
        for number in range(first, first + workers):
            self._join(url, kind, number)

    def _join(self, url: str, kind: str, number: int) -> None:
        connection = kombu.Connection(url, transport_options={"visibility_timeout": 3600})
        if kind == "guarded":
            self._guard(connection, url, number)
        channel = connection.default_channel
        channel.basic_qos(0, 4, False)
        consumer = kombu.Consumer(channel, [kombu.Queue(QUEUE)], on_message=self._take)
        consumer.consume()
        connection.register_with_event_loop(self.hub)
        self._keep.append((connection, consumer))

    def _guard(self, connection: Any, url: str, number: int) -> None:
        from celery_dlq.store.records import WorkerInfo
        from celery_dlq.store.store import Store
        from celery_dlq.transport.redis.broker import broker_of
        from celery_dlq.transport.redis.channel import reliable
        from celery_dlq.transport.redis.fetch import LeaseKeeper
        from celery_dlq.transport.redis.leases import Leases
        from celery_dlq.worker.heartbeat import Heartbeat

        leases = Leases(LEASE_SECONDS)
        leases.sends_in_turns = True
        keeper = LeaseKeeper(leases)

        def connected(channel: Any) -> None:
            leases.connected(broker_of(channel))
            keeper.connected(broker_of(channel))

        transport = reliable(connection.get_transport_cls(), leases, connected)
        connection.get_transport_cls = lambda: transport
        store = Store(url)
        info = WorkerInfo(
            hostname=f"w{number}@fleet",
            pid=number,
            version="0",
            started_at=datetime.now(timezone.utc),
            queues=(QUEUE,),
            tasks=(),
            policies={},
        )
        heartbeat = Heartbeat(store.workers, info, store.instructions, lambda _found, _now: None)

        def beat() -> None:
            with suppress(Exception):
                heartbeat.tick()

        # Real workers do not beat in one instant.
        self.hub.call_later(random.random(), lambda: self.hub.call_repeatedly(1.0, beat))  # noqa: S311
        self._keep.append((leases, keeper, store))

    def _take(self, message: Any) -> None:
        key, at = json.loads(message.body)
        self.taken.write(f"{key} {time.time() - at:.6f}\n")
        self.hub.call_later(WORK_SECONDS, message.ack)

    def play(self) -> None:
        """Work until a signal."""
        signal.signal(signal.SIGTERM, lambda *_: self.hub.stop())
        print("ready", flush=True)
        with suppress(SystemExit):
            self.hub.run_forever()


@dataclass(slots=True)
class Fleet:
    """Players of one kind, and what they took."""

    server: RedisServer
    kind: str
    workers: int
    folder: Path
    players: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sent: int = 0

    def start(self, processes: int) -> None:
        """Start the processes, and wait until all workers consume."""
        each = -(-self.workers // processes)
        for number in range(0, self.workers, each):
            options = [self.server.url, self.kind, number, min(each, self.workers - number)]
            taken = str(self.folder / f"{self.kind}-{number}")
            text = json.dumps([*options, taken])
            command = [sys.executable, "-m", "fleet", "--player", text]
            self.players.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for player in self.players:
            assert player.stdout is not None
            assert player.stdout.readline() == b"ready\n", "a player did not start"

    def send(self, messages: int, every: float) -> list[float]:
        """Publish messages; return how long each waited until it was taken."""
        client, before = self.server.client(), self.sent
        begun = time.monotonic()
        for number in range(messages):
            client.lpush(QUEUE, _entry(str(self.sent)))
            self.sent += 1
            time.sleep(max(0.0, begun + (number + 1) * every - time.monotonic()))
        poll(lambda: len(self.taken()) >= self.sent, timeout_seconds=120, every_seconds=0.05)
        taken = self.taken()
        return sorted(taken[str(key)][0] for key in range(before, self.sent))

    def taken(self) -> dict[str, list[float]]:
        """The waits of each message, as often as it was taken."""
        found: dict[str, list[float]] = {}
        for path in self.folder.glob(f"{self.kind}-*"):
            for line in path.read_text().splitlines():
                key, _, waited = line.partition(" ")
                if waited:
                    found.setdefault(key, []).append(float(waited))
        return found

    def check(self, *, killed: bool) -> None:
        """Every message was taken and acknowledged; once, unless its worker was killed."""
        client = self.server.client()
        poll(lambda: not client.exists(QUEUE, "unacked"), timeout_seconds=60, every_seconds=0.1)
        taken = self.taken()
        lost = {str(key) for key in range(self.sent)} - taken.keys()
        twice = Counter(len(waits) for waits in taken.values())
        assert not lost, f"lost: {sorted(lost)[:10]}"
        assert killed or set(twice) <= {1}, f"taken so often: {twice}"

    def stop(self) -> None:
        """End all processes."""
        for player in self.players:
            player.kill()
            player.wait()


def _entry(key: str) -> str:
    body = base64.b64encode(json.dumps([key, time.time()]).encode()).decode()
    properties = {
        "correlation_id": key,
        "delivery_tag": key,
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "delivery_mode": 2,
        "priority": 0,
        "body_encoding": "base64",
    }
    envelope = {"body": body, "content-encoding": "utf-8", "content-type": "application/x-data"}
    return json.dumps({**envelope, "headers": {"id": key}, "properties": properties})


def cpu(client: Any) -> tuple[float, int]:
    """CPU seconds of the server, and commands that it executed, those of scripts too."""
    used, stats = client.info("cpu"), client.info("commandstats")
    calls = sum(one["calls"] for one in stats.values())
    return used["used_cpu_user"] + used["used_cpu_sys"], calls


def measured(fleet: Fleet, seconds: float, messages: int) -> Iterator[list[str]]:
    """One row for each phase."""
    client, workers = fleet.server.client(), fleet.workers
    time.sleep(3 + workers / 200)
    before, begun = cpu(client), time.monotonic()
    time.sleep(seconds)
    after, took = cpu(client), time.monotonic() - begun
    idle = (after[0] - before[0]) / took
    rate = (after[1] - before[1]) / took / workers
    name = f"{workers} {fleet.kind}"
    yield [name, "idle", f"{idle / workers * 1000:.3f} ms/s a worker", f"{rate:.1f}/s", "", ""]
    phases = ("20 a second", messages, 0.05), ("300 a second", 6 * messages, 1 / 300)
    for phase, number, every in (*phases, ("a burst", 5 * messages, 0.0)):
        before, begun = cpu(client), time.monotonic()
        waits = fleet.send(number, every)
        after, took = cpu(client), time.monotonic() - begun
        micros = (after[0] - before[0] - idle * took) / number * 1e6
        calls = (after[1] - before[1] - rate * workers * took) / number
        median, p99 = statistics.median(waits) * 1000, waits[int(len(waits) * 0.99)] * 1000
        yield [
            name,
            phase,
            f"{micros:.0f} µs a message",
            f"{calls:.0f}",
            f"{median:.1f}",
            f"{p99:.1f}",
        ]
    fleet.check(killed=False)


def fault(fleet: Fleet, messages: int) -> list[str]:
    """Half of the processes are killed while messages arrive; the others take all."""
    victims = fleet.players[::2]
    for player in victims:
        player.send_signal(signal.SIGKILL)
    waits = fleet.send(messages, 0.02)
    fleet.check(killed=True)
    assert waits[-1] < LAPSE_SECONDS, f"a message waited {waits[-1]:.1f} s for a worker that lives"
    median, longest = statistics.median(waits) * 1000, waits[-1] * 1000
    return [
        f"{fleet.workers} {fleet.kind}",
        "half killed",
        "",
        "",
        f"{median:.1f}",
        f"longest {longest:.0f}",
    ]


def main() -> None:
    """Measure each size of the fleet, plain and guarded in turn."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--player", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument("--workers", type=int, nargs="+", default=[20, 100, 1000])
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--seconds", type=float, default=10.0, help="of the idle phase")
    options.add_argument("--messages", type=int, default=100)
    given = options.parse_args()
    if given.player:
        Player(*given.player).play()
        return
    titles = ["workers", "phase", "CPU of Redis", "commands", "median ms", "p99 ms"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for workers in given.workers:
        for kind in given.kinds:
            with RedisServer("--maxclients", "9000") as server, ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
                fleet = Fleet(server, kind, workers, folder)
                stack.callback(fleet.stop)
                fleet.start(given.processes)
                for row in measured(fleet, given.seconds, given.messages):
                    print(f"| {' | '.join(row)} |", flush=True)
                if kind == "guarded":
                    print(f"| {' | '.join(fault(fleet, given.messages))} |", flush=True)


if __name__ == "__main__":
    main()
