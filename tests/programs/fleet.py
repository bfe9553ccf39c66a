"""A fleet on one Redis: ``PYTHONPATH=tests:tests/programs python -m fleet --workers 20 100 1000``.

A worker here is the real transport, its leases and their thread, the real counter and heartbeat;
plain ones are kombu's transport. There is no pool: a message is acknowledged ten milliseconds after
it was taken. A few processes play all workers, so latencies are upper bounds; what Redis pays is
exact.
Prints Markdown. Ends with an error if a message was lost, or was taken twice without a kill.
"""

from __future__ import annotations

import argparse
import base64
import gc
import heapq
import json
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kombu
import redis
from kombu.asynchronous import Hub
from servers import RedisServer
from waiting import poll

QUEUE, WORK_SECONDS, LEASE_SECONDS = "orders", 0.01, 24.0
LAPSE_SECONDS = 2.5  # a look each second, and a slow machine
KINDS = ("plain", "guarded")
KEPT_TOGETHER = 10
TOGETHER = 1000
AOF = ("--appendonly", "yes", "--appendfsync", "always")


class Loop(Hub):
    """The event loop of one worker. It does not wait: its player waits for the loops of all."""

    due = 0.0  # its next turn without an event

    def _create_poller(self) -> None:
        super()._create_poller()
        poll = self._poller.poll

        def look(timeout: float) -> Any:
            events = poll(0)
            self.due = time.monotonic() + (0.0 if events else timeout)
            return events

        self._poller.poll = look

    def fileno(self) -> int:
        """To wait for."""
        fileno: int = self._poller._epoll.fileno()
        return fileno


class Player:
    """Workers of one process; each has its turn when something of it happens, as if alone."""

    def __init__(self, url: str, kind: str, first: int, workers: int, taken: str) -> None:
        self.url, self.kind = url, kind
        self.taken = Path(taken).open("a", buffering=1)  # noqa: SIM115 - as long as it plays
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int]] = []  # a heap
        make = Guarded if kind == "guarded" else Worker
        self.workers = [make(self, number) for number in range(first, first + workers)]

    def play(self) -> None:
        """Work until the process is killed."""
        for worker in self.workers:
            self._plan(worker)
        threading.Thread(target=self._keep, daemon=True).start()
        gc.freeze()  # Else a collection of what hundreds of workers hold takes seconds
        print("ready", flush=True)
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic())
            for key, _ in self._selector.select(wait):
                self._turn(key.data)
            now = time.monotonic()
            while self._due[0][0] <= now:
                at, number = heapq.heappop(self._due)
                worker = self.workers[number - self.workers[0].number]
                if at == worker.hub.due:
                    self._turn(worker)

    def _keep(self) -> None:
        """Keep the leases of all workers, as the thread of each does: some at a time."""
        from celery_dlq import timing

        while True:
            for first in range(0, len(self.workers), KEPT_TOGETHER):
                time.sleep(timing.current.lease_tick * KEPT_TOGETHER / len(self.workers))
                for worker in self.workers[first : first + KEPT_TOGETHER]:
                    worker.keep()

    def _turn(self, worker: Worker) -> None:
        try:
            worker.hub.run_once()
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            self._selector.unregister(worker.hub)
            worker.connect_again()
        self._plan(worker)

    def _plan(self, worker: Worker) -> None:
        if worker.hub not in self._selector.get_map():
            self._selector.register(worker.hub, selectors.EVENT_READ, worker)
        heapq.heappush(self._due, (worker.hub.due, worker.number))


def _answers(client: Any) -> bool:
    with suppress(redis.RedisError, OSError):
        return bool(client.ping())
    return False


class Worker:
    """kombu's transport, and messages that are acknowledged a moment later."""

    def __init__(self, player: Player, number: int) -> None:
        self.player, self.number, self.hub = player, number, Loop()
        self.connect()

    def connect(self) -> None:
        """Consume."""
        options = {"visibility_timeout": 3600}
        self.connection = kombu.Connection(self.player.url, transport_options=options)
        self.prepare()
        channel = self.connection.default_channel
        channel.basic_qos(0, 4, False)
        self._consumer = kombu.Consumer(channel, [kombu.Queue(QUEUE)], on_message=self._take)
        self._consumer.consume()
        self.connection.register_with_event_loop(self.hub)

    def prepare(self) -> None:
        """Before it connects."""

    def keep(self) -> None:
        """Keep what it holds."""

    def connect_again(self) -> None:
        """Give a lost connection up, and connect as Celery does."""
        self.hub.reset()
        self.hub.on_tick.clear()
        with suppress(Exception):
            self.connection.close()
        client = redis.Redis.from_url(self.player.url)
        poll(lambda: _answers(client), timeout_seconds=30, every_seconds=0.1)
        self.connect()

    def _take(self, message: Any) -> None:
        key, at = json.loads(message.body)
        self.player.taken.write(f"{key} {time.time() - at:.6f}\n")
        self.begin(message, key)
        self.hub.call_later(WORK_SECONDS, self.end, message, key)

    def begin(self, message: Any, key: str) -> None:
        """A task starts."""

    def end(self, message: Any, _key: str) -> None:
        """A task ends."""
        with suppress(Exception):  # of plain Celery, with the connection
            message.ack()


class Guarded(Worker):
    """The real transport, leases, counter and heartbeat, after the checks of a start."""

    def __init__(self, player: Player, number: int) -> None:
        from celery_dlq.store.store import Store
        from celery_dlq.store.worker_records import WorkerInfo
        from celery_dlq.transport.redis.fetch import LeaseKeeper
        from celery_dlq.transport.redis.leases import Leases
        from celery_dlq.worker.heartbeat import TICKS_PER_BEAT, Heartbeat

        store = Store(player.url)
        store.check([f"{QUEUE}-DLQ"])
        self._leases = Leases(LEASE_SECONDS, store)
        self._leases.loop_goes_on = True
        self._keeper = LeaseKeeper(self._leases)
        self._keeper.start = lambda: None  # type: ignore[method-assign] - see Player
        self.keep = self._keeper.tick  # type: ignore[method-assign]
        self._counter = store.counter
        info = WorkerInfo(
            hostname=f"w{number}@fleet",
            pid=number,
            version="0",
            started_at=datetime.now(timezone.utc),
            queues=(QUEUE,),
            tasks=(),
            policies={},
        )
        heartbeat = Heartbeat(
            store.workers,
            info,
            store.instructions,
            lambda _found, _now: None,
            told=self._leases.watch.was_unchanged,
        )

        def beat() -> None:
            with suppress(Exception):
                heartbeat.tick()
                self._counter.heartbeat(["orders-DLQ"] if self._running else [])
                self._counter.flush()

        self._running: dict[str, tuple[Any, Any]] = {}
        super().__init__(player, number)
        # Real workers do not start, and beat, in one instant.
        later = TICKS_PER_BEAT * random.random()  # noqa: S311 - no secret
        self.hub.call_later(later, lambda: self.hub.call_repeatedly(1.0, beat))

    def prepare(self) -> None:
        """Fetch by script."""
        from celery_dlq.transport.redis.broker import broker_of
        from celery_dlq.transport.redis.channel import reliable
        from celery_dlq.transport.redis.fetch import refusal

        def connected(channel: Any) -> None:
            assert refusal(channel) is None
            self._leases.connected(broker_of(channel))
            self._keeper.connected(broker_of(channel))

        transport = reliable(self.connection.get_transport_cls(), self._leases, connected)
        self.connection.get_transport_cls = lambda: transport  # type: ignore[method-assign]

    def begin(self, message: Any, key: str) -> None:
        """Count the start."""
        from celery_dlq.letters.record import Delivery
        from celery_dlq.store.worker_records import MessageKey

        self._leases.begin(message.delivery_tag)
        now = datetime.now(timezone.utc)
        name = f"w{self.number}@fleet"
        counted = (
            MessageKey(
                dead_letter_queue=f"{QUEUE}-DLQ", task_id=key, retries=0, redrives=0, nesting=0
            ),
            Delivery(
                number=1,
                retries=0,
                started_at=now,
                worker_hostname=name,
                worker_pid=self.number,
                release=None,
            ),
        )
        self._running[key] = counted
        self._counter.count_first(*counted)

    def end(self, message: Any, key: str) -> None:
        """Forget the count and acknowledge, also what an earlier connection fetched."""
        self._counter.succeeded(*self._running.pop(key), first=True)
        self._leases.acknowledge(message.delivery_tag)
        super().end(message, key)


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
        self.players.clear()


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


@dataclass
class Phase:
    """One rate of messages, at one size of the fleet: what each kind paid, a turn each."""

    name: str
    workers: int
    messages: int
    every: float
    micros: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, list[float]] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)

    def turn(self, fleet: Fleet, idle: tuple[float, float]) -> None:
        """Send messages; what the workers cost while idle is not theirs."""
        client, messages = fleet.server.client(), self.messages
        before, begun = cpu(client), time.monotonic()
        waits = fleet.send(messages, self.every)
        after, took = cpu(client), time.monotonic() - begun
        used, calls = after[0] - before[0] - idle[0] * took, after[1] - before[1] - idle[1] * took
        self.micros.setdefault(fleet.kind, []).append(used / messages * 1e6)
        self.calls.setdefault(fleet.kind, []).append(calls / messages)
        self.waits.setdefault(fleet.kind, []).extend(waits)

    def rows(self) -> Iterator[list[str]]:
        """A row for each kind."""
        plain = self.micros.get("plain")
        for kind, micros in self.micros.items():
            low, middle, high = _quartiles(micros)
            shown = f"{middle:.0f} µs ({low:.0f} to {high:.0f})"
            if plain and kind != "plain":
                low, middle, high = _quartiles([a / b for a, b in zip(micros, plain, strict=True)])
                shown += f", {middle:.2f} times ({low:.2f} to {high:.2f})"
            calls = f"{statistics.median(self.calls[kind]):.0f}"
            yield [f"{self.workers} {kind}", self.name, shown, calls, *_waited(self.waits[kind])]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    found = sorted(values)
    return found[len(found) // 4], statistics.median(found), found[3 * len(found) // 4]


def idle_of(fleets: Sequence[Fleet], seconds: float) -> dict[str, tuple[float, float]]:
    """CPU seconds and commands that each fleet costs a second while nothing happens; shown, too."""
    before, begun = {fleet.kind: cpu(fleet.server.client()) for fleet in fleets}, time.monotonic()
    time.sleep(seconds)
    rates: dict[str, tuple[float, float]] = {}
    for fleet in fleets:
        client, workers = fleet.server.client(), fleet.workers
        took, after = time.monotonic() - begun, cpu(client)
        used, calls = (b - a for a, b in zip(before[fleet.kind], after, strict=True))
        rates[fleet.kind] = used / took, calls / took
        found, kib = client.info(), client.info("memory")["used_memory"] / 1024 / workers
        clients = f"{(found['connected_clients'] - 1) / workers:.1f} connections, {kib:.0f} KiB"
        each = f"{used / took / workers * 1000:.3f} ms/s", f"{calls / took / workers:.1f}/s"
        show([f"{workers} {fleet.kind}", "idle", *each, clients, ""])
    return rates


def measure(fleets: Sequence[Fleet], phases: Sequence[Phase], seconds: float, turns: int) -> None:
    """Each phase in turns of the fleets that are alive; then the books must balance."""
    time.sleep(12 + fleets[0].workers / 50)
    for phase in phases:
        idle = idle_of(fleets, seconds)
        for turn in range(turns):
            for fleet in fleets if turn % 2 else fleets[::-1]:
                phase.turn(fleet, idle[fleet.kind])
    for fleet in fleets:
        fleet.check(killed=False)


def _waited(waits: list[float]) -> list[str]:
    waits = sorted(waits)
    median, p99 = statistics.median(waits), waits[int(len(waits) * 0.99)]
    return [f"{median * 1000:.1f}", f"{p99 * 1000:.1f}"]


def deploy(fleet: Fleet, processes: int, messages: int) -> list[str]:
    """All workers end and others start at once; then they work."""
    client = fleet.server.client()
    client.config_set("slowlog-log-slower-than", 500)
    client.slowlog_reset()
    fleet.stop()
    before, begun = cpu(client), time.monotonic()
    fleet.start(processes)
    after, took = cpu(client), time.monotonic() - begun
    slow = max((one["duration"] for one in client.slowlog_get(128)), default=0)
    fleet.send(messages, 0.01)
    fleet.check(killed=True)
    return [
        f"{fleet.workers} {fleet.kind}",
        f"a deploy of {took:.0f} s",
        f"{(after[0] - before[0]) / fleet.workers * 1000:.1f} ms a worker",
        f"{(after[1] - before[1]) / fleet.workers:.0f} a worker",
        "",
        f"slowest command {slow / 1000:.1f}",
    ]


def restart(fleet: Fleet, messages: int) -> list[str]:
    """Redis is killed while messages wait and run, and comes back with its data."""
    first = fleet.send(messages, 0.01)
    client = fleet.server.client()
    for _ in range(messages):
        client.lpush(QUEUE, _entry(str(fleet.sent)))
        fleet.sent += 1
    fleet.server.kill()
    time.sleep(0.5)
    fleet.server.start()
    fleet.send(messages, 0.01)
    fleet.check(killed=True)
    return [f"{fleet.workers} {fleet.kind}", "Redis killed", "", "", *_waited(first)]


def fault(fleet: Fleet, messages: int, how: signal.Signals) -> list[str]:
    """Half of the processes stand still, or are killed, while messages arrive."""
    victims = fleet.players[::2]
    for player in victims:
        player.send_signal(how)
    waits = fleet.send(messages, 0.02)
    assert waits[-1] < LAPSE_SECONDS, f"a message waited {waits[-1]:.1f} s for a worker that lives"
    for player in victims:
        player.send_signal(signal.SIGCONT)
    fleet.check(killed=True)
    median, longest = statistics.median(waits) * 1000, waits[-1] * 1000
    return [
        f"{fleet.workers} {fleet.kind}",
        "half killed" if how == signal.SIGKILL else "half stand still",
        "",
        "",
        f"{median:.1f}",
        f"longest {longest:.0f}",
    ]


def show(row: list[str]) -> None:
    """Print a row of the table."""
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Measure each size of the fleet."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--player", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument("--workers", type=int, nargs="+", default=[20, 100, 1000])
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--seconds", type=float, default=10.0, help="of the idle phase")
    options.add_argument("--messages", type=int, default=100)
    options.add_argument("--turns", type=int, default=9, help="of each kind in each phase")
    options.add_argument("--chart", type=Path, help="write a picture, an SVG, to this file")
    given = options.parse_args()
    if given.player:
        Player(*given.player).play()
        return
    titles = ["workers", "phase", "CPU of Redis", "commands", "median ms", "p99 ms"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    every: list[Phase] = []
    for workers in given.workers:
        phases = [
            Phase("20 a second", workers, given.messages, 0.05),
            Phase("300 a second", workers, 6 * given.messages, 1 / 300),
            Phase("a burst of 500", workers, 500, 0.0),
        ]
        # More of them keep the machine so busy that they see each message late.
        together = [given.kinds] if workers <= TOGETHER else [[kind] for kind in given.kinds]
        for kinds in together:
            with ExitStack() as stack:
                fleets = [started(stack, kind, workers, given.processes) for kind in kinds]
                measure(fleets, phases, given.seconds, given.turns)
                for fleet in fleets:
                    show(deploy(fleet, given.processes, given.messages))
                if fleets[-1].kind == "guarded":
                    for how in (signal.SIGSTOP, signal.SIGKILL):
                        show(fault(fleets[-1], given.messages, how))
        for phase in phases:
            for row in phase.rows():
                show(row)
        every += phases
        with ExitStack() as stack:
            fleet = started(stack, "guarded", min(workers, 100), given.processes, *AOF)
            show(restart(fleet, given.messages))
    if given.chart:
        chart(every, given.chart)


def started(stack: ExitStack, kind: str, workers: int, processes: int, *options: str) -> Fleet:
    """A fleet on a Redis of its own, until the stack ends."""
    server = stack.enter_context(RedisServer("--maxclients", "20000", *options))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
    fleet = Fleet(server, kind, workers, folder)
    stack.callback(fleet.stop)
    fleet.start(processes)
    return fleet


def chart(phases: Sequence[Phase], path: Path) -> None:
    """What a message costs Redis, by the number of workers that wait."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "celery_dlq"
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(phase.name for phase in phases))
    figure, every = plt.subplots(1, len(names), figsize=(9, 3), sharey=True)
    for axes, name in zip(every, names, strict=True):
        sizes = [phase.workers for phase in phases if phase.name == name]
        for kind in KINDS:
            found = [_quartiles(phase.micros[kind]) for phase in phases if phase.name == name]
            low, middle, high = zip(*found, strict=True)
            (line,) = axes.plot(sizes, middle, marker="o", label=kind)
            axes.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("idle workers")
    every[0].set_ylabel("µs of Redis a message")
    every[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
