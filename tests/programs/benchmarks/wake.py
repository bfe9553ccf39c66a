"""What workers ask of Redis: ``python -m benchmarks.wake [--quick]``.

Commands a second while nothing happens, what a dozen idle workers with Celery's heartbeats cost
the server, time from ``LPUSH`` to the start of the task, what a message costs while twenty workers
wait, and what a task of a busy worker asks.
Guarded and plain workers are alive together, and take turns in one run. Prints Markdown.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import celery
import redis
from benchmarks.node import BARE, note_each_start
from servers import RedisServer

SETTLE_SECONDS = 3.0
KINDS = ("plain", "guarded")
KOMBUS = "guarded, kombu's fetch"
"""What the rest of the plugin does while it is idle: heartbeat, policies."""

QUEUES = (1, 12)
POOLS, RATES = ("prefork", "threads", "gevent"), (5, 20, 50)
WIRE_QUEUES = (1, 20)
TURNS = 9


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    idle_seconds: float
    pushes: int
    workers: int
    idle_workers: int
    starts: int


FULL = Size(idle_seconds=30.0, pushes=300, workers=20, idle_workers=12, starts=9)
QUICK = Size(idle_seconds=3.0, pushes=20, workers=2, idle_workers=2, starts=1)


def work(options: dict[str, Any]) -> None:
    """Work until a signal; each task writes when it started."""
    celery.maybe_patch_concurrency(["celery", "worker", "-P", options["pool"]])
    from celery import Celery

    app = Celery("wake", broker=options["url"], set_as_current=False)
    app.conf.task_ignore_result = True
    app.conf.task_acks_late = True
    app.conf.broker_connection_retry_on_startup = True
    if options["concurrency"] == 1:
        app.conf.worker_prefetch_multiplier = 1  # no room while a task runs
    starts = Path(options["starts"]).open("a", buffering=1)  # noqa: SIM115 - as long as it works

    @app.task(name="work", shared=False)
    def started(key: str) -> None:
        starts.write(f"{key} {time.monotonic_ns()}\n")

    if options["kind"] == BARE:
        note_each_start(options["url"])
    elif options["kind"] != "plain":
        from celery_dlq import DeadLetters

        app.conf.dlq_reliable_fetch = options["kind"] != KOMBUS
        app.conf.dlq_queues = {"*": {"max_deliveries": 3}}
        DeadLetters(app)
    app.Worker(
        hostname=f"{options['name']}@wake",
        pool_cls=options["pool"],
        concurrency=options["concurrency"],
        queues=",".join(options["queues"]),
        loglevel="WARNING",
        quiet=True,
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=not options["heartbeat"],
    ).start()


class Node:
    """One idle worker."""

    def __init__(
        self,
        url: str,
        kind: str,
        queues: Sequence[str],
        name: str,
        folder: Path,
        pool: str,
        heartbeat: bool,
        concurrency: int,
    ) -> None:
        self.kind = kind
        self.queues = queues
        self.starts = folder / f"{name}.starts"
        self.starts.touch()
        options = {
            "url": url,
            "kind": kind,
            "queues": queues,
            "name": name,
            "pool": pool,
            "heartbeat": heartbeat,
            "concurrency": concurrency,
            "starts": str(self.starts),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wake", "--worker", json.dumps(options)],
            env=os.environ,
            stdin=subprocess.DEVNULL,
        )

    def started(self) -> dict[str, int]:
        """Nanoseconds of the start of each task so far."""
        text = self.starts.read_text().rpartition("\n")[0]  # a line may be half written
        return {key: int(at) for key, at in map(str.split, text.splitlines())}

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def nodes(
    url: str,
    wanted: Sequence[tuple[str, Sequence[str]]],
    folder: Path,
    pool: str = "solo",
    *,
    heartbeat: bool = False,
    concurrency: int = 2,
) -> Iterator[list[Node]]:
    """Workers that consume; each has run a task."""
    with ExitStack() as stack, redis.Redis.from_url(url) as client:
        made = []
        for number, (kind, queues) in enumerate(wanted):
            made.append(Node(url, kind, queues, f"w{number}", folder, pool, heartbeat, concurrency))
            stack.callback(made[-1].end)
        for queues in {tuple(node.queues) for node in made}:
            push(client, queues[0], "first")
            wait_for([node for node in made if tuple(node.queues) == queues], "first")
        deadline = time.monotonic() + 60
        while len(client.client_list()) < 2 * len(made):  # each has some; the last one is slow
            if time.monotonic() > deadline:
                raise TimeoutError("not all workers came up")
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)
        yield made


def push(client: Any, queue: str, key: str) -> int:
    """Push a message as kombu writes it; return when, in nanoseconds."""
    body = base64.b64encode(json.dumps([[key], {}, {}]).encode()).decode()
    envelope = {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "work", "id": f"{queue}-{key}", "retries": 0},
        "properties": {
            "correlation_id": f"{queue}-{key}",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"{queue}-{key}",
        },
    }
    text = json.dumps(envelope)
    at = time.monotonic_ns()
    client.lpush(queue, text)
    return at


def wait_for(made: Sequence[Node], key: str) -> int:
    """When the task started, at any of the workers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for node in made:
            if (at := node.started().get(key)) is not None:
                return at
        time.sleep(0.002)
    raise TimeoutError(f"{key} did not start")


def queues_of(kind: str, number: int) -> list[str]:
    """Names of this many queues."""
    return [f"{kind[-5:]}-{number}-{i}" for i in range(number)]


def commands(server: RedisServer) -> dict[str, int]:
    """Calls of each command so far, those that scripts make too."""
    stats = server.client().info("commandstats")
    return {name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()}


def idle(size: Size, folder: Path) -> None:
    """Commands a second of one idle worker."""
    print("\n| queues | worker | commands/s | of which |\n|---|---|---|---|")
    for number in QUEUES:
        for kind in (*KINDS, KOMBUS):
            with (
                RedisServer() as server,
                nodes(server.url, [(kind, queues_of(kind, number))], folder),
            ):
                before = commands(server)
                time.sleep(size.idle_seconds)
                after = commands(server)
                after["info"] -= 1  # our own
                rates = {
                    name: (calls - before.get(name, 0)) / size.idle_seconds
                    for name, calls in after.items()
                    if calls > before.get(name, 0)
                }
                most = sorted(rates.items(), key=lambda found: -found[1])
                said = ", ".join(f"{name} {rate:.2f}" for name, rate in most)
                print(f"| {number} | {kind} | {sum(rates.values()):.2f} | {said} |", flush=True)
            for path in folder.iterdir():
                path.unlink()


def crowd(size: Size, folder: Path) -> None:
    """Server CPU of idle workers, guarded and plain ones side by side, after each of many starts.

    One start says little: plain workers cost less when Redis ends several ``BRPOP`` at once.
    """
    found = []
    for start in range(size.starts):
        with ExitStack() as stack:
            servers = {}
            for kind in KINDS[:: 1 if start % 2 else -1]:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                servers[kind] = stack.enter_context(RedisServer())
                wanted = [(kind, ["idle"])] * size.idle_workers
                stack.enter_context(nodes(servers[kind].url, wanted, own, heartbeat=True))
            time.sleep(size.idle_seconds * 2 / 3)
            spent = [(sum(commands(one).values()), _cpu(one)) for one in servers.values()]
            time.sleep(size.idle_seconds * 2)
            for (kind, one), (calls, cpu) in zip(servers.items(), spent, strict=True):
                each = size.idle_seconds * 2 * size.idle_workers
                rate = (sum(commands(one).values()) - calls) / each
                found.append((kind, rate, (_cpu(one) - cpu) / each * 1e3))
    print("\n| idle workers | commands/s of one | server CPU ms/s of one |\n|---|---|---|")
    cpus = {kind: [cpu for of, _, cpu in found if of == kind] for kind in KINDS}
    for kind in KINDS:
        rate = statistics.median(rate for of, rate, _ in found if of == kind)
        median = statistics.median(cpus[kind])
        print(f"| {size.idle_workers} {kind} | {rate:.2f} | {median:.3f} |")
    ratios = sorted(g / p for p, g in zip(*cpus.values(), strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(f"| CPU, times plain || {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |")


def latency(size: Size, folder: Path) -> None:
    """Time from the push to the start, pushes to all workers in turns."""
    wanted = [(kind, queues_of(kind, number)) for number in QUEUES for kind in KINDS]
    found: dict[int, list[float]] = {i: [] for i in range(len(wanted))}
    with (
        RedisServer() as server,
        nodes(server.url, wanted, folder) as made,
        redis.Redis.from_url(server.url) as client,
    ):
        for turn in range(size.pushes):
            order = list(enumerate(made))
            random.shuffle(order)
            for i, node in order:
                queue = random.choice(node.queues)  # noqa: S311 - no secret
                at = push(client, queue, f"k{turn}")
                found[i].append((wait_for([node], f"k{turn}") - at) / 1e6)
                time.sleep(random.uniform(0.01, 0.05))  # noqa: S311
    print("\n| queues | worker | median ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    for i, (kind, queues) in enumerate(wanted):
        times = sorted(found[i])
        p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
        print(
            f"| {len(queues)} | {kind} | {statistics.median(times):.2f} | {p99:.2f} "
            f"| {times[-1]:.2f} |"
        )
    for path in folder.iterdir():
        path.unlink()


def herd(size: Size, folder: Path) -> None:
    """Server CPU and commands of a message while many workers, with room for one, wait for it.

    Guarded and plain ones side by side, after each of many starts; beside them plain ones that
    write each start to Redis, by one plain command: the bare limit.
    """
    kinds = (*KINDS, BARE)
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for pool, start in product(POOLS, range(size.starts)):
        with ExitStack() as stack:
            servers = {}
            for kind in kinds[:: 1 if start % 2 else -1]:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                servers[kind] = stack.enter_context(RedisServer())
                wanted = [(kind, ["herd"])] * size.workers
                stack.enter_context(nodes(servers[kind].url, wanted, own, pool, concurrency=1))
            idle = _spent(servers, 0, size.idle_seconds / 3)
            for rate in RATES:
                seconds = size.pushes / 6 / rate
                for kind, spent in _spent(servers, rate, seconds).items():
                    cpu, calls = (a - b for a, b in zip(spent, idle[kind], strict=True))
                    found.setdefault((pool, rate, kind), []).append(
                        (cpu / rate * 1e6, calls / rate)
                    )
    sides = " | ".join(f"{kind}: µs; commands" for kind in kinds)
    head = f"waiting | messages a second | {sides} | guarded, times plain | bare, times plain"
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for pool, rate in product(POOLS, RATES):
        costs = {kind: found[pool, rate, kind] for kind in kinds}
        shown = [
            "{:.0f}; {:.1f}".format(*map(statistics.median, zip(*one, strict=True)))
            for one in costs.values()
        ]
        shown += [_times(costs[kind], costs["plain"]) for kind in kinds[1:]]
        print(f"| {size.workers} {pool} | {rate} | {' | '.join(shown)} |", flush=True)


def _times(costs: list[tuple[float, float]], plain: list[tuple[float, float]]) -> str:
    """The ratios of CPU: median and quartiles."""
    ratios = sorted(one / of for (one, _), (of, _) in zip(costs, plain, strict=True))
    low, middle, high = (ratios[len(ratios) * part // 4] for part in (1, 2, 3))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _spent(
    servers: dict[str, RedisServer], rate: int, seconds: float
) -> dict[str, tuple[float, float]]:
    """Server CPU and commands a second while so many messages a second are pushed to each."""
    clients = {kind: server.client() for kind, server in servers.items()}
    before = {kind: (_cpu(one), sum(commands(one).values())) for kind, one in servers.items()}
    begun = time.monotonic()
    for number in range(round(rate * seconds)):
        for client in clients.values():
            push(client, "herd", f"{rate}-{number}")
        time.sleep(max(0.0, begun + (number + 1) / rate - time.monotonic()))
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    found, took = {}, time.monotonic() - begun
    for kind, server in servers.items():
        cpu, calls = (
            _cpu(server) - before[kind][0],
            sum(commands(server).values()) - before[kind][1],
        )
        found[kind] = cpu / took, calls / took
    return found


def wire(size: Size, folder: Path) -> None:
    """What one task of a busy prefork worker sends and asks; its message is in the queue before."""
    head = "queues | worker | bytes to Redis | bytes back | reads of a socket | commands | CPU µs"
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for number in WIRE_QUEUES:
        wanted = [(kind, queues_of(kind, number)) for kind in KINDS]
        with (
            RedisServer() as server,
            nodes(server.url, wanted, folder, "prefork") as made,
            redis.Redis.from_url(server.url) as client,
        ):
            found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
            for turn in range(TURNS):
                for node in made:
                    found[node.kind].append(_wired(server, client, node, turn, size.pushes))
        for kind, turns in found.items():
            sent, received, reads, calls, cpu = map(statistics.median, zip(*turns, strict=True))
            shown = f"{sent:,.0f} | {received:,.0f} | {reads:.2f} | {calls:.1f} | {cpu:.0f}"
            print(f"| {number} | {kind} | {shown} |", flush=True)
        pairs = zip(*(found[kind] for kind in KINDS), strict=True)
        ratios = sorted(guarded[-1] / plain[-1] for plain, guarded in pairs)
        low, middle, high = (ratios[len(ratios) * part // 4] for part in (1, 2, 3))
        print(f"| {number} | CPU, times plain |||||  {middle:.2f} ({low:.2f} to {high:.2f}) |")
        for path in folder.iterdir():
            path.unlink()


def _wired(server: RedisServer, client: Any, node: Node, turn: int, pushes: int) -> list[float]:
    """What a task took when so many waited, in all queues of a worker."""
    each, names = -(-pushes // len(node.queues)), [f"waiting-{name}" for name in node.queues]
    with client.pipeline() as pipe:
        for name in names:
            for number in range(each):
                push(pipe, name, f"t{turn}-{name}-{number}")
        pipe.execute()
    before = _asked(server)
    with client.pipeline() as pipe:
        for name, queue in zip(names, node.queues, strict=True):
            pipe.rename(name, queue)
        pipe.execute()
    push(client, node.queues[0], f"t{turn}-last")  # wakes it
    for key in (f"t{turn}-last", *(f"t{turn}-{name}-{each - 1}" for name in names)):
        wait_for([node], key)
    time.sleep(SETTLE_SECONDS)  # what it still has to say goes out with a tick
    tasks = each * len(names) + 1
    return [(b - a) / tasks for a, b in zip(before, _asked(server), strict=True)]


def _asked(server: RedisServer) -> list[float]:
    """Bytes that Redis got and sent, reads, commands, and its CPU in microseconds, so far."""
    stats = server.client().info("stats")
    sums = [stats["total_net_input_bytes"], stats["total_net_output_bytes"]]
    sums.append(stats["total_reads_processed"])
    return [*sums, sum(commands(server).values()), _cpu(server) * 1e6]


def _cpu(server: RedisServer) -> float:
    found = server.client().info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])


def main() -> None:
    """Measure what was named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wake", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="of idle, crowd, latency, herd, wire; none for all"
    )
    parser.add_argument("--quick", action="store_true", help="see that all works, in seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    measures = {"idle": idle, "crowd": crowd, "latency": latency, "herd": herd, "wire": wire}
    if unknown := set(options.names) - set(measures):
        parser.error(f"expected names of {', '.join(measures)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="wake-") as folder:
        for name in options.names or measures:
            measures[name](QUICK if options.quick else FULL, Path(folder))


if __name__ == "__main__":
    main()
